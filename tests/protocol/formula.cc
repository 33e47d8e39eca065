// SPDX-License-Identifier: Apache-2.0
#include "protocol/formula.h"

#include <algorithm>
#include <array>
#include <utility>

#include "support/rng.h"

namespace tokenyard::protocol_tests {
namespace {

// A hash of coordinates; `what` keeps the families of values apart.
enum class What : std::uint64_t { kTokens, kId, kWord, kExpert, kStatistic, kWeight };

template <class... Coordinates>
std::uint64_t hash(std::uint64_t seed, What what, Coordinates... coordinates) {
  std::uint64_t value = support::mix(seed ^ (static_cast<std::uint64_t>(what) << 60));
  ((value = support::mix(value ^ static_cast<std::uint64_t>(coordinates))), ...);
  return value;
}

}  // namespace

std::int64_t Formula::num_tokens(std::uint64_t operation, int rank) const {
  const std::int64_t most = params.max_tokens_per_rank;
  const std::array<std::int64_t, 8> choices{0, 1, 3, 5, 2, std::min<std::int64_t>(64, most), most - 1, most};
  return choices[hash(seed, What::kTokens, operation, rank) % choices.size()];
}

std::int32_t Formula::id(std::uint64_t operation, int rank, std::int64_t token, int slot) const {
  const std::uint64_t drawn = hash(seed, What::kId, operation, rank, token, slot);
  if (drawn % 8 == 0) return -1;
  return static_cast<std::int32_t>((drawn >> 8) % static_cast<std::uint64_t>(params.num_experts));
}

int Formula::owner(std::int32_t expert) const {
  int first = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    first += params.num_experts / num_ranks + (rank < params.num_experts % num_ranks ? 1 : 0);
    if (expert < first) return rank;
  }
  return -1;
}

std::uint32_t Formula::word(std::uint64_t operation, int rank, std::int64_t token, std::int64_t column) const {
  return static_cast<std::uint32_t>(hash(seed, What::kWord, operation, rank, token, column));
}

std::int32_t Formula::statistic(std::uint64_t operation, int rank, std::int64_t entry) const {
  return static_cast<std::int32_t>(hash(seed, What::kStatistic, operation, rank, entry));
}

float Formula::expert_value(
    std::uint64_t operation, int owner_rank, int source, std::int64_t token, std::int64_t column) const {
  const std::uint64_t drawn = hash(seed, What::kExpert, operation, owner_rank, source, token, column);
  return static_cast<float>(static_cast<int>(drawn % 65536) - 32768);
}

float Formula::weight(std::uint64_t operation, int rank, std::int64_t token, int slot) const {
  constexpr std::array<float, 4> kWeights{0.5F, 1.0F, 2.0F, -1.0F};
  return kWeights[hash(seed, What::kWeight, operation, rank, token, slot) % kWeights.size()];
}

bool Formula::travels(std::uint64_t operation, int source, std::int64_t token, int rank) const {
  if (every_rank()) return true;
  for (int slot = 0; slot < params.top_k; ++slot) {
    const std::int32_t expert = id(operation, source, token, slot);
    if (expert >= 0 && owner(expert) == rank) return true;
  }
  return false;
}

std::int64_t Formula::num_rows(std::uint64_t operation, int source, int rank) const {
  std::int64_t rows = 0;
  for (std::int64_t token = 0; token < num_tokens(operation, source); ++token)
    rows += travels(operation, source, token, rank) ? 1 : 0;
  return rows;
}

Formula make_formula(std::string backend, int num_ranks, std::uint64_t seed, int max_tokens) {
  const int num_experts = find_backend(backend).contract.num_experts_multiple_of == 1 ? 6 : 8;
  return {.backend = std::move(backend),
          .num_ranks = num_ranks,
          .params = {.num_experts = num_experts,
                     .top_k = 2,
                     .hidden_size = 16,
                     .max_tokens_per_rank = max_tokens,
                     .dtype = Dtype::kF32},
          .seed = seed};
}

BackendConfig formula_config(const Formula& formula) {
  if (formula.backend == "one_sided") return OneSidedConfig{.eplb_stats_num_experts = formula.num_statistics()};
  // Three rows, or two of formulas with wider ones: ranks have to wait for room, and for each other.
  if (formula.backend == "two_sided") return TwoSidedConfig{.queue_bytes_per_peer = 3 * 320};
  return find_backend(formula.backend).default_config;
}

}  // namespace tokenyard::protocol_tests
