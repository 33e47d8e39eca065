// SPDX-License-Identifier: Apache-2.0
// Communications made from a byte budget, of about the size that a number of sub-rounds asks for.
// Thread rule: pure functions; `budget_made` is collective over the group.
#pragma once

#include <algorithm>

#include "conformance/small_spec.h"

namespace tokenyard::support {

// Bytes with room for `tokens` of each rank, or a few more: control words, and twice the widest row.
[[nodiscard]] inline std::int64_t budget_for(const WorldSpec& spec, std::int64_t tokens) {
  const MoeParams& params = spec.params;
  const std::int64_t picks = (std::int64_t{params.top_k} * 4 + 15) / 16 * 16;
  const std::int64_t dispatched = dispatch_bytes_per_token(params) + 2 * picks + 32;
  const std::int64_t combined = std::int64_t{params.hidden_size + 1} * size_of(params.dtype) + picks + 16;
  return 1200 * spec.num_ranks + 2 * (3000 + spec.num_ranks * tokens * std::max(dispatched, combined));
}

// Params are left as they are, but for the dtype that quantised rows do not tell.
[[nodiscard]] inline Communication budget_made(const Group& group,
                                               std::int64_t bytes,
                                               Dtype dtype = Dtype::kBf16,
                                               const CommunicationOptions& options = test_options()) {
  return create_communication(group, MoeParams{.dtype = dtype}, HighThroughputConfig{.buffer_bytes = bytes}, options);
}

inline constexpr int kCutRanks = 3;

// 40 tokens a rank at most, through a window for about seven at a time.
[[nodiscard]] inline WorldSpec cut_spec(std::uint64_t seed) {
  WorldSpec spec = small_spec(kCutRanks, seed);
  spec.params.max_tokens_per_rank = 40;
  spec.params.hidden_size = 333;
  spec.params.top_k = 3;
  return spec;
}

[[nodiscard]] inline std::int64_t cutting_budget() {
  return budget_for(cut_spec(1), 7);
}

[[nodiscard]] inline DispatchOptions of_experts(const WorldSpec& spec) {
  return {.num_experts = spec.params.num_experts};
}

// Rows of zeros for the result's rows, and the output for the rank's tokens.
struct Zeros {
  Zeros(const DispatchResult& result, std::int64_t num_tokens, std::int64_t hidden)
      : rows(Dtype::kBf16, {result.counts.num_rows, hidden}), output(Dtype::kBf16, {num_tokens, hidden}) {}

  [[nodiscard]] CombineInput input() const { return {.expert_output = rows.view()}; }

  Tensor rows, output;
};

}  // namespace tokenyard::support
