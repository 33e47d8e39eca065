// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/requests.h"

#include "engine/cuda/access_unit.h"

namespace tokenyard::engine::cuda {

Lane lane_of(const PayloadRows& payload, const protocol::Plane& plane) {
  const std::uint64_t all = bits_of(payload.data) | bits_of(payload.stride) | bits_of(plane.offset) |
                            bits_of(plane.stride) | bits_of(payload.row_bytes);
  return {.from = payload.data,
          .from_stride = payload.stride,
          .offset = plane.offset,
          .stride = plane.stride,
          .row_bytes = payload.row_bytes,
          .unit = unit_of(all)};
}

Copied copied_of(const OutputPlane& output, const protocol::Plane& plane) {
  const std::uint64_t all = bits_of(output.data) | bits_of(output.block_stride) | bits_of(output.row_stride) |
                            bits_of(output.row_bytes) | bits_of(plane.offset) | bits_of(plane.stride);
  return {.data = output.data,
          .block_stride = output.block_stride,
          .row_stride = output.row_stride,
          .row_bytes = output.row_bytes,
          .offset = plane.offset,
          .stride = plane.stride,
          .unit = unit_of(all)};
}

Ids ids_of(const DispatchRequest& request, const protocol::Plane& plane, const MoeParams& params) {
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

std::uint64_t set_target(const CombineTarget& target, CombineTask& task) {
  const TensorView& output = target.output;
  task.output = static_cast<std::byte*>(output.data);
  task.output_stride = output.row_stride_bytes();
  task.output_dtype = output.dtype;
  std::uint64_t all = bits_of(output.data) | bits_of(task.output_stride);
  for (std::size_t i = 0; i < target.bias.size(); ++i) {
    if (!target.bias[i].defined()) continue;
    task.bias[i] = static_cast<const std::byte*>(target.bias[i].data);
    task.bias_stride[i] = target.bias[i].row_stride_bytes();
    all |= bits_of(task.bias[i]) | bits_of(task.bias_stride[i]);
  }
  return all;
}

}  // namespace tokenyard::engine::cuda
