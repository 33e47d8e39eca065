// SPDX-License-Identifier: Apache-2.0
// The plain reference: from what all ranks give, what each rank must get. Written from the contract alone.
// Thread rule: pure functions on plain values.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tokenyard/backends.h"

#include "support/world.h"

namespace tokenyard::support {

// One row that a rank receives, and where it stands in the flat output.
struct ExpectedRow {
  int source = 0;
  std::int64_t token = 0;
  std::int64_t position = 0;
  int expert = -1;  // expert major: of the receiver's own, from 0
};

struct ExpectedDispatch {
  std::vector<ExpectedRow> rows{};  // in order of position, without dropped ones
  std::int64_t num_received = 0;    // rows that crossed or stayed here, each (token, rank) once; without dropped ones
  std::int64_t total_rows = 0;      // rows of the output, unused ones too
  std::int64_t dropped_rows = 0;
  std::vector<std::int64_t> rows_per_source{}, tokens_per_source{}, rows_per_expert{};
};

struct LayoutRule {
  OutputLayout layout = OutputLayout::kCompact;
  std::int64_t tokens_per_rank = 0;    // rank major
  std::int64_t num_worst_tokens = -1;  // compact: fixed rows; -1: none
};

// Whether the token has a live expert on `rank`; always under kEveryRank.
[[nodiscard]] bool travels(const World& world, int source, std::int64_t token, int rank, OutputLayout layout);

// [num_local_experts, num_ranks, {first row, rows}]
[[nodiscard]] std::vector<std::int32_t> expect_source_ranges(const World& world, const ExpectedDispatch& expected);
// Picks of each of the rank's experts, repeated ones too.
[[nodiscard]] std::vector<std::int32_t> expect_routes(const World& world, int rank);

[[nodiscard]] ExpectedDispatch expect_dispatch(const World& world, int rank, const LayoutRule& rule);

// The ids of one received row as `rank` sees them.
[[nodiscard]] std::vector<std::int64_t> expect_ids(const World& world, const ExpectedRow& row, int rank, IdSpace space);

// Expert output is a hash of (seed, rank, source, token, column), so every rank knows every other's. Its magnitudes are
// mixed so that sums round, and now and then it is NaN, infinite, -0 or denormal.
struct ExpertData {
  std::uint64_t seed = 1;
  Dtype dtype = Dtype::kBf16;
  bool specials = true;
};

[[nodiscard]] std::vector<std::byte> expert_row(const ExpertData& data,
                                                const ExpectedRow& row,
                                                int rank,
                                                std::int64_t hidden);
// What a token's pick weighs: as given at dispatch, or else as `late_weight` gives it at combine.
[[nodiscard]] float late_weight(std::uint64_t seed, int rank, std::int64_t token, int slot);
[[nodiscard]] float returned_weight(std::uint64_t seed, const ExpectedRow& row, int rank, int slot);
[[nodiscard]] std::vector<std::byte> bias_bytes(std::uint64_t seed, int which, Dtype dtype, std::int64_t elements);

struct CombineRule {
  LayoutRule layout{};  // num_worst_tokens is then the same on every rank
  ExpertData experts{};
  Dtype output_dtype = Dtype::kBf16;
  bool low_precision = false;  // rows cross as f8e4m3
  bool logarithmic = false;    // rows cross as 10-bit logarithms
  int num_biases = 0;
  int bias_rank = 0;  // biases are hashes too, of the rank that adds them
};

// [num_tokens, hidden] of `rank`'s tokens, by the documented chain of roundings.
[[nodiscard]] std::vector<std::byte> expect_combine(const World& world, int rank, const CombineRule& rule);
// [num_tokens, top_k] f32: what comes back of `returned_weight`. Each slot comes back once, from the owner of its
// expert; slots without one are 0.
[[nodiscard]] std::vector<std::byte> expect_returned_weights(const World& world, int rank, const CombineRule& rule);
// Rows of `rank`'s tokens that receivers dropped.
[[nodiscard]] std::int64_t expect_missing_rows(const World& world, int rank, const LayoutRule& rule);

// Equal bits, except that any NaN equals any other in f32.
void check_elements(const TensorView& actual, std::span<const std::byte> expected, const std::string& what);

}  // namespace tokenyard::support
