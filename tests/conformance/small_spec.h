// SPDX-License-Identifier: Apache-2.0
// The small world that feature tests start from.
// Thread rule: pure functions.
#pragma once

#include "support/backends.h"

namespace tokenyard::support {

// Eight experts, two per token, rows of 24 bf16.
[[nodiscard]] inline WorldSpec small_spec(int num_ranks, std::uint64_t seed = 1) {
  WorldSpec spec;
  spec.params = {.num_experts = 8, .top_k = 2, .hidden_size = 24, .max_tokens_per_rank = 6};
  spec.num_ranks = num_ranks;
  spec.seed = seed;
  return spec;
}

// Every token goes to every rank, so every rank waits for every other in both phases.
[[nodiscard]] inline WorldSpec all_to_all_spec(int num_ranks, std::uint64_t seed = 1) {
  WorldSpec spec = small_spec(num_ranks, seed);
  spec.params.num_experts = (num_ranks + 3) / 4 * 4;
  spec.params.top_k = spec.params.num_experts;
  spec.num_tokens.assign(static_cast<std::size_t>(num_ranks), spec.params.max_tokens_per_rank);
  return spec;
}

[[nodiscard]] inline WorldSpec with_seed(WorldSpec spec, std::uint64_t seed) {
  spec.seed = seed;
  return spec;
}

}  // namespace tokenyard::support
