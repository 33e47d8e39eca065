// SPDX-License-Identifier: Apache-2.0
// What the bench sends: the same tokens, picks and expert outputs for Tokenyard and for its peers, made from a seed.
// Everything is a formula, so every rank can work out every answer, and all values are small whole numbers, so that
// sums are exact in every dtype. Nothing is linked but the standard library: peers compile this file too. Thread rule:
// pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tokenyard::cli {

enum class BenchSkew : std::uint8_t {
  kUniform,  // every expert as likely as any other
  kZipf,     // expert e with a likelihood of 1 / (e + 1)^exponent
  kOne,      // every token picks expert 0, and the rest of its experts uniformly
  kTrace,    // the picks of a real layer, from a file
};

struct BenchShape {
  int num_ranks = 2;
  int num_experts = 64;
  int top_k = 8;
  std::int64_t num_tokens = 512;  // of each rank
  std::int64_t hidden_size = 2048;
  BenchSkew skew = BenchSkew::kUniform;
  double zipf_exponent = 1.0;
  std::uint64_t seed = 1;
};

// [num_tokens, top_k] of a rank, without repeats in a token. Not for kTrace.
[[nodiscard]] std::vector<std::int32_t> bench_ids(const BenchShape& shape, int rank);

// The rank that owns an expert, by the rule of the library.
[[nodiscard]] int bench_owner(const BenchShape& shape, int expert);

// A row's values are those from here on of one long row.
[[nodiscard]] inline std::int64_t bench_place(int rank, std::int64_t token) {
  return std::int64_t{rank} * 7919 + token * 31;
}

// -1, 0 or 1.
[[nodiscard]] inline float bench_value(int rank, std::int64_t token, std::int64_t column) {
  const auto mixed = static_cast<std::uint64_t>(bench_place(rank, token) + column) * 0x9E3779B97F4A7C15ULL;
  return static_cast<float>(static_cast<int>((mixed >> 40) % 3) - 1);
}

// An expert multiplies by this; routing weights are 1.
[[nodiscard]] inline float bench_factor(int expert) {
  return static_cast<float>(expert % 2 + 1);
}

// What a token's picks multiply it by, in all.
[[nodiscard]] float bench_total_factor(const std::vector<std::int32_t>& ids, int top_k, std::int64_t token);

// "uniform", "zipf:1.2", "one" or "trace:FILE"; throws std::invalid_argument saying so. Returns the file of a trace.
std::string parse_bench_skew(const std::string& text, BenchShape& shape);

}  // namespace tokenyard::cli
