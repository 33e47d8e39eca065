// SPDX-License-Identifier: Apache-2.0
// What the tests of `two_sided` on GPUs share: rounds of a shape by their number, and the smallest queues.
// Thread rule: as device_ranks.h.
#pragma once

#include <cstdint>

#include "gpu/device_ranks.h"

namespace tokenyard::gpu_tests {

// Found by asking: the least that is not refused.
inline std::int64_t least_queue_bytes(const Shape& shape) {
  const auto refused = [&shape](std::int64_t bytes) {
    try {
      (void)window_bytes(params_of(shape), TwoSidedConfig{.queue_bytes_per_peer = bytes}, shape.num_ranks);
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  std::int64_t too_small = 1;
  std::int64_t enough = std::int64_t{1} << 30;
  while (enough - too_small > 1) {
    const std::int64_t middle = too_small + (enough - too_small) / 2;
    (refused(middle) ? too_small : enough) = middle;
  }
  return enough;
}

inline support::World world_of(const Shape& shape, int round) {
  return support::make_world({.params = params_of(shape),
                              .num_ranks = shape.num_ranks,
                              .skew = static_cast<support::Skew>(round % support::kNumSkews),
                              .id_dtype = round % 2 == 1 ? Dtype::kI64 : Dtype::kI32,
                              .with_weights = round % 5 != 4,
                              .eplb_entries = shape.num_experts,
                              .seed = static_cast<std::uint64_t>(round) + 11});
}

inline support::RoundPlan plan_of(const Shape& shape, int round) {
  return {.seed = static_cast<std::uint64_t>(round) + 5,
          .expert_dtype = shape.dtype,
          .output_dtype = round % 2 == 1 ? Dtype::kF32 : shape.dtype,
          .strided = round % 3 == 1,
          .caller_tensors = round % 4 == 2,
          .flat_expert_output = round % 5 == 3};
}

inline const Shape kQueuedShape{.num_ranks = 3, .hidden_size = 256, .top_k = 4, .num_experts = 24, .max_tokens = 70};

}  // namespace tokenyard::gpu_tests
