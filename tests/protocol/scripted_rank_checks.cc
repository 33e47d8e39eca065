// SPDX-License-Identifier: Apache-2.0
// What a scripted rank must have received.
#include <algorithm>
#include <bit>
#include <string>

#include "protocol/scripted_rank.h"
#include "support/check.h"
#include "support/tensor.h"

namespace tokenyard::protocol_tests {
namespace {

using support::check_eq;
using support::CheckFailure;

std::size_t size(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

std::string at(int source, std::int64_t token) {
  return "token " + std::to_string(token) + " of rank " + std::to_string(source);
}

template <class T>
const T* elements(const TensorView& view, std::int64_t row) {
  return reinterpret_cast<const T*>(support::row_of(view, row));
}

}  // namespace

std::int64_t ScriptedRank::tokens_per_rank(std::uint64_t route) const {
  std::int64_t most = 1;
  for (int source = 0; source < formula_.num_ranks; ++source)
    most = std::max(most, formula_.num_tokens(route, source));
  return most;
}

std::int64_t ScriptedRank::result_rows(std::uint64_t route) const {
  if (formula_.rank_major()) return formula_.num_ranks * tokens_per_rank(route);
  if (formula_.expert_major()) {
    return static_cast<std::int64_t>(expert_output_.size()) / formula_.params.hidden_size;
  }
  std::int64_t rows = 0;
  for (int source = 0; source < formula_.num_ranks; ++source)
    rows += formula_.num_rows(route, source, rank_);
  return worst_tokens_ < 0 ? rows : std::min(rows, worst_tokens_);
}

std::vector<ScriptedRank::Row> ScriptedRank::received_rows(std::uint64_t route) const {
  std::vector<Row> rows;
  if (formula_.expert_major()) {
    const int first = first_local_expert(formula_.params, rank_, formula_.num_ranks);
    const int count = num_local_experts(formula_.params, rank_, formula_.num_ranks);
    for (int expert = 0; expert < count; ++expert)
      add_expert_rows(route, first + expert,
                      std::int64_t{expert} * formula_.num_ranks * formula_.params.max_tokens_per_rank, rows);
    return rows;
  }
  const std::int64_t block = tokens_per_rank(route);
  const auto kept = static_cast<std::size_t>(result_rows(route));
  for (int source = 0; source < formula_.num_ranks; ++source) {
    const std::int64_t tokens = formula_.num_tokens(route, source);
    for (std::int64_t token = 0; token < tokens; ++token) {
      if (!formula_.travels(route, source, token, rank_)) continue;
      if (formula_.rank_major()) {
        rows.push_back({source, token, source * block + token});
      } else if (rows.size() < kept) {
        rows.push_back({source, token, static_cast<std::int64_t>(rows.size())});
      }
    }
  }
  return rows;
}

void ScriptedRank::add_expert_rows(std::uint64_t route, int expert, std::int64_t index, std::vector<Row>& rows) const {
  for (int source = 0; source < formula_.num_ranks; ++source) {
    for (std::int64_t token = 0; token < formula_.num_tokens(route, source); ++token) {
      bool picked = false;
      for (int slot = 0; slot < formula_.params.top_k; ++slot)
        picked = picked || formula_.id(route, source, token, slot) == expert;
      if (picked) rows.push_back({source, token, index++, expert});
    }
  }
}

void ScriptedRank::check_experts(const Numbers& numbers, const DispatchResult& result) const {
  std::vector<std::int64_t> counts(result.counts.rows_per_expert.size(), 0);
  const std::int64_t block = std::int64_t{formula_.num_ranks} * formula_.params.max_tokens_per_rank;
  for (const Row& row : received_rows(numbers.route)) {
    ++counts.at(size(row.index / block));
    check_eq(std::int64_t{result.source_tokens.as<const std::int32_t>()[row.index]}, row.token,
             "source token of row " + std::to_string(row.index));
  }
  support::check_lists_eq(result.counts.rows_per_expert, counts, "rows of the experts");
}

void ScriptedRank::check_result(const Numbers& numbers, bool with_ids, const DispatchResult& result) {
  check_counts(numbers.route, result.counts);
  check_rows(numbers, with_ids, result);
  if (formula_.expert_major()) {
    check_experts(numbers, result);
  } else if (with_ids) {
    check_unused_ids(numbers.route, result.topk_ids);
  }
}

void ScriptedRank::check_counts(std::uint64_t route, const RowCounts& counts) const {
  for (int source = 0; source < formula_.num_ranks; ++source) {
    const std::string from = " of rank " + std::to_string(source);
    check_eq(counts.rows_per_source.at(size(source)), formula_.num_rows(route, source, rank_), "rows" + from);
    check_eq(counts.tokens_per_source.at(size(source)), formula_.num_tokens(route, source), "tokens" + from);
  }
}

void ScriptedRank::check_rows(const Numbers& numbers, bool with_ids, const DispatchResult& result) {
  for (const Row& row : received_rows(numbers.route)) {
    if (row.index % 4 == 0) pause_();
    const auto* words = elements<std::uint32_t>(result.hidden_states, row.index);
    for (std::int64_t column = 0; column < formula_.params.hidden_size; ++column) {
      const std::uint32_t expected = formula_.word(numbers.rows, row.source, row.token, column);
      if (words[column] == expected) continue;
      check_eq(words[column], expected, at(row.source, row.token) + ", column " + std::to_string(column));
    }
    if (with_ids && row.expert < 0) check_ids(numbers.route, row, elements<std::int32_t>(result.topk_ids, row.index));
  }
}

void ScriptedRank::check_ids(std::uint64_t route, const Row& row, const std::int32_t* ids) const {
  for (int slot = 0; slot < formula_.params.top_k; ++slot) {
    std::int32_t expected = formula_.id(route, row.source, row.token, slot);
    if (formula_.layout() == OutputLayout::kCompact) {
      const bool here = expected >= 0 && formula_.owner(expected) == rank_;
      expected = here ? expected - first_local_expert(formula_.params, rank_, formula_.num_ranks) : -1;
    }
    if (ids[slot] == expected) continue;
    check_eq(ids[slot], expected, "id " + std::to_string(slot) + " of " + at(row.source, row.token));
  }
}

// Rows that no token filled say so in every slot, whatever earlier rounds left there.
void ScriptedRank::check_unused_ids(std::uint64_t route, const TensorView& ids) const {
  std::vector<bool> used(size(formula_.rank_major() ? result_rows(route) : std::max<std::int64_t>(worst_tokens_, 0)));
  if (used.empty()) return;
  for (const Row& row : received_rows(route))
    used.at(size(row.index)) = true;
  for (std::size_t row = 0; row < used.size(); ++row) {
    for (int slot = 0; slot < formula_.params.top_k && !used[row]; ++slot) {
      const std::int32_t id = elements<std::int32_t>(ids, static_cast<std::int64_t>(row))[slot];
      if (id != -1) check_eq(id, -1, "id of unused row " + std::to_string(row));
    }
  }
}

void ScriptedRank::check_statistics(std::uint64_t rows, const TensorView& statistics) const {
  for (int source = 0; source < formula_.num_ranks; ++source) {
    for (std::int64_t i = 0; i < formula_.num_statistics(); ++i) {
      check_eq(elements<std::int32_t>(statistics, source)[i], formula_.statistic(rows, source, i),
               "statistic " + std::to_string(i) + " of rank " + std::to_string(source));
    }
  }
}

std::int64_t ScriptedRank::row_at(std::uint64_t route, int source, std::int64_t token, int rank) const {
  std::int64_t row = 0;
  for (int before = 0; before < source; ++before)
    row += formula_.num_rows(route, before, rank);
  for (std::int64_t before = 0; before < token; ++before)
    row += formula_.travels(route, source, before, rank) ? 1 : 0;
  return row;
}

float ScriptedRank::expected_sum(const Numbers& numbers, int owner, std::int64_t token, std::int64_t column) const {
  if (!formula_.expert_major()) return formula_.expert_value(numbers.rows, owner, rank_, token, column);
  float sum = 0.0F;
  for (int slot = 0; slot < formula_.params.top_k; ++slot) {
    const std::int32_t expert = formula_.id(numbers.route, rank_, token, slot);
    if (expert < 0 || formula_.owner(expert) != owner) continue;
    sum += formula_.weight(numbers.rows, rank_, token, slot) *
           formula_.expert_value(numbers.rows, kExpertOwner + expert, rank_, token, column);
  }
  return sum;
}

void ScriptedRank::check_output(const Numbers& numbers) {
  const std::int64_t hidden = formula_.params.hidden_size;
  const std::int64_t tokens = formula_.num_tokens(numbers.route, rank_);
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::vector<int> owners;
    for (int owner = 0; owner < formula_.num_ranks; ++owner) {
      const bool sent = formula_.travels(numbers.route, rank_, token, owner);
      const bool dropped = sent && worst_tokens_ >= 0 && row_at(numbers.route, rank_, token, owner) >= worst_tokens_;
      if (sent && !dropped) owners.push_back(owner);
    }
    for (std::int64_t column = 0; column < hidden; ++column) {
      float sum = 0.0F;
      for (const int owner : owners)
        sum += expected_sum(numbers, owner, token, column);
      const float actual = output_[size(token * hidden + column)];
      if (std::bit_cast<std::uint32_t>(actual) == std::bit_cast<std::uint32_t>(sum)) continue;
      check_eq(actual, sum, "sum of " + at(rank_, token) + ", column " + std::to_string(column));
      throw CheckFailure("sum of " + at(rank_, token) + " has the wrong sign of zero");
    }
  }
}

}  // namespace tokenyard::protocol_tests
