// SPDX-License-Identifier: Apache-2.0
// Payloads and outputs of a dispatch as its kernels see them. Pure.
#pragma once

#include "engine/cuda/access_unit.h"
#include "engine/cuda/tasks.h"
#include "engine/engine.h"

namespace tokenyard::engine::cuda {

inline Lane lane_of(const PayloadRows& payload, const protocol::Plane& plane) {
  return {.from = payload.data,
          .from_stride = payload.stride,
          .offset = plane.offset,
          .stride = plane.stride,
          .row_bytes = payload.row_bytes,
          .unit = unit_of(bits_of(payload.data) | bits_of(payload.stride) | bits_of(plane.offset) |
                          bits_of(plane.stride) | bits_of(payload.row_bytes))};
}

inline Copied copied_of(const OutputPlane& output, const protocol::Plane& plane) {
  return {.data = output.data,
          .block_stride = output.block_stride,
          .row_stride = output.row_stride,
          .row_bytes = output.row_bytes,
          .offset = plane.offset,
          .stride = plane.stride,
          .unit = unit_of(bits_of(output.data) | bits_of(output.block_stride) | bits_of(output.row_stride) |
                          bits_of(output.row_bytes) | bits_of(plane.offset) | bits_of(plane.stride))};
}

// Before the receive half no outputs are placed, and `to` is null.
inline Ids ids_of(const MoeParams& params, const DispatchRequest& request, const Round& round) {
  const protocol::Plane& plane = round.planes.planes[protocol::kIdsPlane];
  const OutputPlane& output = request.outputs.planes[protocol::kIdsPlane];
  return {.from = static_cast<const std::byte*>(request.topk_ids.data),
          .from_stride = request.topk_ids.row_stride_bytes(),
          .offset = plane.offset,
          .stride = plane.stride,
          .from_i64 = request.topk_ids.dtype == Dtype::kI64,
          .to = output.data,
          .to_block_stride = output.block_stride,
          .to_row_stride = output.row_stride,
          .to_i64 = output.dtype == Dtype::kI64,
          .top_k = params.top_k,
          .num_experts = params.num_experts,
          .invalid_id = params.invalid_expert_id};
}

}  // namespace tokenyard::engine::cuda
