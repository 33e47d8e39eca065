// SPDX-License-Identifier: Apache-2.0
// Requests and targets of a combine as its kernels see them. What depends on the placement is left to its engine.
#pragma once

#include "engine/cuda/tasks.h"
#include "engine/engine.h"

namespace tokenyard::engine::cuda {

// The rows, from where they lie to what they are on the wire; staged unless they are the wire's already and `in_place`.
[[nodiscard]] CombineTask combine_task(const CombineRequest& request, Dtype wire, bool in_place);

// Adds the output and the biases. Returns all their addresses and strides, or-ed together.
std::uint64_t add_target(const CombineTarget& target, CombineTask& task);

// Whether rows, biases and output may be accessed by units of 16 bytes of the wire; `places` as add_target gives them.
[[nodiscard]] bool in_vectors(const CombineTask& task, std::uint64_t places);

}  // namespace tokenyard::engine::cuda
