// SPDX-License-Identifier: Apache-2.0
#include "engine/round.h"

#include <algorithm>

namespace tokenyard::engine {

void Round::reserve(const protocol::WindowShape& shape, int top_k, int num_local_experts) {
  const auto ranks = static_cast<std::size_t>(shape.num_ranks);
  const auto tokens = static_cast<std::size_t>(shape.max_tokens);
  const std::size_t copies = top_k > 0 ? std::min(ranks, static_cast<std::size_t>(top_k)) : ranks;
  first_destination.resize(tokens + 1);
  destinations.resize(tokens * copies);
  wire_ids.resize(tokens * static_cast<std::size_t>(top_k));
  rows_sent.resize(ranks);
  rows_received.resize(ranks);
  row_base.resize(ranks);
  for (auto* per_rank : {&tokens_of, &result_row, &call_tokens_of, &call_rows_from})
    per_rank->resize(ranks);
  rows_per_expert.resize(static_cast<std::size_t>(num_local_experts));
  if (!protocol::space_per_source(shape.placement)) return;
  masks.resize(ranks * static_cast<std::size_t>(protocol::num_chunks(shape.max_tokens, shape.tokens_per_chunk)));
  if (!protocol::by_expert(shape.placement)) return;
  const auto experts_here = static_cast<std::size_t>(num_local_experts);
  experts.picks.resize(ranks * tokens * static_cast<std::size_t>(top_k));
  experts.weights.resize(experts.picks.size());
  experts.source_tokens.resize(experts_here * ranks * tokens);
  experts.source_ranges.resize(experts_here * ranks * 2);
  experts.routes_per_expert.resize(experts_here);
  experts.waited.resize(ranks);
}

}  // namespace tokenyard::engine
