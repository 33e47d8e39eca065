// SPDX-License-Identifier: Apache-2.0
// What ranks send and must receive, as formulas of (rank, token, operation): every rank can work out every word of
// every other, so a stale or torn row is told from the right one without sharing anything but a seed.
// Thread rule: pure functions of plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tokenyard/backends.h"

namespace tokenyard::protocol_tests {

struct Formula {
  std::string backend;
  int num_ranks = 1;
  MoeParams params{};  // of f32 rows
  std::uint64_t seed = 1;

  // 0 now and then, the maximum now and then, and what lies on both sides of a chunk's end.
  [[nodiscard]] std::int64_t num_tokens(std::uint64_t operation, int rank) const;
  // -1, or an expert.
  [[nodiscard]] std::int32_t id(std::uint64_t operation, int rank, std::int64_t token, int slot) const;
  [[nodiscard]] int owner(std::int32_t expert) const;
  // Any bits: they travel as they are.
  [[nodiscard]] std::uint32_t word(std::uint64_t operation, int rank, std::int64_t token, std::int64_t column) const;
  [[nodiscard]] std::int32_t statistic(std::uint64_t operation, int rank, std::int64_t entry) const;
  // A small whole number, so that sums over ranks are exact.
  [[nodiscard]] float expert_value(
      std::uint64_t operation, int owner_rank, int source, std::int64_t token, std::int64_t column) const;
  // Whether the token has a row at `rank`.
  [[nodiscard]] bool travels(std::uint64_t operation, int source, std::int64_t token, int rank) const;
  [[nodiscard]] std::int64_t num_rows(std::uint64_t operation, int source, int rank) const;

  // What a token's pick weighs, a power of two; and whether it is given at dispatch or at combine.
  [[nodiscard]] float weight(std::uint64_t operation, int rank, std::int64_t token, int slot) const;

  [[nodiscard]] static bool weights_at_dispatch(std::uint64_t operation) { return operation / 4 % 2 == 0; }

  [[nodiscard]] OutputLayout layout() const { return find_backend(backend).contract.output_layout; }

  [[nodiscard]] bool rank_major() const { return layout() == OutputLayout::kRankMajor; }

  [[nodiscard]] bool expert_major() const { return layout() == OutputLayout::kExpertMajor; }

  [[nodiscard]] bool every_rank() const { return layout() == OutputLayout::kEveryRank; }

  // Queues take statistics of all experts only.
  [[nodiscard]] int num_statistics() const { return backend == "two_sided" ? params.num_experts : 3; }
};

// Six experts (or eight, where they must be a multiple of four), two a token; rows of 64 bytes, so a chunk has 64
// tokens.
[[nodiscard]] Formula make_formula(std::string backend, int num_ranks, std::uint64_t seed, int max_tokens);

[[nodiscard]] BackendConfig formula_config(const Formula& formula);

}  // namespace tokenyard::protocol_tests
