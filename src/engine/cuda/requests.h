// SPDX-License-Identifier: Apache-2.0
// Parts of requests as kernels are told them, whatever the placement.
#pragma once

#include <cstdint>

#include "engine/cuda/tasks.h"
#include "engine/engine.h"

namespace tokenyard::engine::cuda {

[[nodiscard]] Lane lane_of(const PayloadRows& payload, const protocol::Plane& plane);
[[nodiscard]] Copied copied_of(const OutputPlane& output, const protocol::Plane& plane);
// Before the receive half no outputs are placed, and `to` is null.
[[nodiscard]] Ids ids_of(const DispatchRequest& request, const protocol::Plane& plane, const MoeParams& params);
// Output and biases. Returns their addresses and strides, or-ed together.
[[nodiscard]] std::uint64_t set_target(const CombineTarget& target, CombineTask& task);

}  // namespace tokenyard::engine::cuda
