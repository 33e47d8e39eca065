// SPDX-License-Identifier: Apache-2.0
#include "support/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "support/casts.h"
#include "support/check.h"
#include "support/rng.h"
#include "unit/log_wire_reference.h"

namespace tokenyard::support {
namespace {

// A float of mixed magnitude from a hash.
float float_of(std::uint64_t hash, bool specials) {
  if (specials && hash % 97 == 0) {
    constexpr float kSpecials[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                   -0.0F, 1e-40F, -1e-7F};
    return kSpecials[(hash / 97) % std::size(kSpecials)];
  }
  const double unit = static_cast<double>(hash >> 11) * 0x1p-52 - 1.0;
  return static_cast<float>(std::ldexp(unit, static_cast<int>(hash % 13) - 6));
}

std::uint64_t hash_of(std::uint64_t seed, int rank, const ExpectedRow& row, std::int64_t column) {
  const auto who = static_cast<std::uint64_t>(rank) + 4096 * static_cast<std::uint64_t>(row.expert + 1);
  const std::uint64_t where = mix(seed + 0x10001U * who) ^
                              mix(static_cast<std::uint64_t>(row.source) << 40 | static_cast<std::uint64_t>(row.token));
  return mix(where + static_cast<std::uint64_t>(column));
}

// Every receiver of every token of `rank`, in rank order, without those that dropped the row.
std::vector<std::vector<int>> receivers(const World& world, int rank, const LayoutRule& rule) {
  std::vector<std::vector<int>> of_token(static_cast<std::size_t>(world.rank(rank).num_tokens));
  for (int receiver = 0; receiver < world.spec.num_ranks; ++receiver) {
    for (const ExpectedRow& row : expect_dispatch(world, receiver, rule).rows) {
      if (row.source != rank) continue;
      std::vector<int>& of_this = of_token[static_cast<std::size_t>(row.token)];
      if (of_this.empty() || of_this.back() != receiver) of_this.push_back(receiver);  // one row for all its experts
    }
  }
  return of_token;
}

bool picks(const World& world, int source, std::int64_t token, std::int64_t expert) {
  for (int slot = 0; slot < world.spec.params.top_k; ++slot) {
    if (world.id(source, token, slot) == expert) return true;
  }
  return false;
}

// Every expert's rows from the start of its block, by source and token.
void expect_expert_rows(const World& world, int rank, ExpectedDispatch& expected) {
  const MoeParams& params = world.spec.params;
  const std::int64_t first = first_expert_of(params, rank, world.spec.num_ranks);
  const std::int64_t experts = num_experts_of(params, rank, world.spec.num_ranks);
  const std::int64_t block = std::int64_t{world.spec.num_ranks} * params.max_tokens_per_rank;
  expected.rows.clear();
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    std::int64_t position = expert * block;
    for (int source = 0; source < world.spec.num_ranks; ++source) {
      for (std::int64_t token = 0; token < world.rank(source).num_tokens; ++token) {
        if (!picks(world, source, token, first + expert)) continue;
        expected.rows.push_back(
            {.source = source, .token = token, .position = position++, .expert = static_cast<int>(expert)});
      }
    }
  }
  expected.total_rows = experts * block;
}

// What one rank's experts make of a token together: weighed in the order of its picks.
std::vector<float> reduced_row(const World& world, int source, std::int64_t token, int rank, const CombineRule& rule) {
  const MoeParams& params = world.spec.params;
  std::vector<float> sums(static_cast<std::size_t>(params.hidden_size), 0.0F);
  for (int slot = 0; slot < params.top_k; ++slot) {
    const std::int64_t id = world.id(source, token, slot);
    if (owner_of(id, params, world.spec.num_ranks) != rank) continue;
    const auto expert = static_cast<int>(id - first_expert_of(params, rank, world.spec.num_ranks));
    const float weight = world.spec.with_weights
                             ? load(world.spec.weight_dtype, world.rank(source).weights.row(token).data(), slot)
                             : late_weight(rule.experts.seed, source, token, slot);
    const ExpectedRow row{.source = source, .token = token, .position = 0, .expert = expert};
    const std::vector<std::byte> output = expert_row(rule.experts, row, rank, params.hidden_size);
    for (std::size_t column = 0; column < sums.size(); ++column) {
      const float value = load(rule.experts.dtype, output.data(), static_cast<std::int64_t>(column));
      sums[column] = std::fma(weight, value, sums[column]);
    }
  }
  return sums;
}

// The row that `rank` sends back for a token, before it is rounded to the wire.
std::vector<float> sent_row(const World& world, const ExpectedRow& row, int rank, const CombineRule& rule) {
  if (rule.layout.layout == OutputLayout::kExpertMajor) return reduced_row(world, row.source, row.token, rank, rule);
  const std::int64_t hidden = world.spec.params.hidden_size;
  const std::vector<std::byte> bytes = expert_row(rule.experts, row, rank, hidden);
  std::vector<float> values;
  for (std::int64_t column = 0; column < hidden; ++column)
    values.push_back(load(rule.experts.dtype, bytes.data(), column));
  return values;
}

}  // namespace

bool travels(const World& world, int source, std::int64_t token, int rank, OutputLayout layout) {
  if (layout == OutputLayout::kEveryRank) return true;
  for (int slot = 0; slot < world.spec.params.top_k; ++slot) {
    if (owner_of(world.id(source, token, slot), world.spec.params, world.spec.num_ranks) == rank) return true;
  }
  return false;
}

ExpectedDispatch expect_dispatch(const World& world, int rank, const LayoutRule& rule) {
  const MoeParams& params = world.spec.params;
  const int num_ranks = world.spec.num_ranks;
  const std::int64_t first = first_expert_of(params, rank, num_ranks);
  ExpectedDispatch expected;
  expected.rows_per_expert.assign(static_cast<std::size_t>(num_experts_of(params, rank, num_ranks)), 0);
  std::int64_t next = 0;
  for (int source = 0; source < num_ranks; ++source) {
    std::int64_t from_source = 0;
    for (std::int64_t token = 0; token < world.rank(source).num_tokens; ++token) {
      if (!travels(world, source, token, rank, rule.layout)) continue;
      const std::int64_t position =
          rule.layout == OutputLayout::kRankMajor ? source * rule.tokens_per_rank + token : next;
      ++next;
      ++from_source;
      if (rule.num_worst_tokens >= 0 && position >= rule.num_worst_tokens) {
        ++expected.dropped_rows;
        continue;
      }
      expected.rows.push_back({.source = source, .token = token, .position = position});
      for (std::size_t e = 0; e < expected.rows_per_expert.size(); ++e) {
        bool chosen = false;
        for (int slot = 0; slot < params.top_k; ++slot) {
          chosen = chosen || world.id(source, token, slot) == first + static_cast<std::int64_t>(e);
        }
        expected.rows_per_expert[e] += chosen ? 1 : 0;
      }
    }
    expected.rows_per_source.push_back(from_source);
    expected.tokens_per_source.push_back(world.rank(source).num_tokens);
  }
  expected.num_received = std::ssize(expected.rows);
  expected.total_rows = rule.layout == OutputLayout::kRankMajor ? num_ranks * rule.tokens_per_rank
                        : rule.num_worst_tokens >= 0            ? rule.num_worst_tokens
                                                                : next;
  if (rule.layout == OutputLayout::kExpertMajor) expect_expert_rows(world, rank, expected);
  return expected;
}

std::vector<std::int32_t> expect_source_ranges(const World& world, const ExpectedDispatch& expected) {
  const auto num_ranks = static_cast<std::size_t>(world.spec.num_ranks);
  std::vector<std::int32_t> ranges(expected.rows_per_expert.size() * num_ranks * 2, 0);
  for (const ExpectedRow& row : expected.rows) {
    ++ranges[(static_cast<std::size_t>(row.expert) * num_ranks + static_cast<std::size_t>(row.source)) * 2 + 1];
  }
  for (std::size_t expert = 0; expert < expected.rows_per_expert.size(); ++expert) {
    for (std::size_t source = 1; source < num_ranks; ++source) {
      const std::size_t at = (expert * num_ranks + source) * 2;
      ranges[at] = ranges[at - 2] + ranges[at - 1];
    }
  }
  return ranges;
}

std::vector<std::int32_t> expect_routes(const World& world, int rank) {
  const MoeParams& params = world.spec.params;
  std::vector<std::int32_t> routes(static_cast<std::size_t>(num_experts_of(params, rank, world.spec.num_ranks)), 0);
  const std::int64_t first = first_expert_of(params, rank, world.spec.num_ranks);
  for (const RankData& data : world.ranks) {
    for (const std::int64_t id : data.ids) {
      if (owner_of(id, params, world.spec.num_ranks) == rank) ++routes[static_cast<std::size_t>(id - first)];
    }
  }
  return routes;
}

std::vector<std::int64_t> expect_ids(const World& world, const ExpectedRow& row, int rank, IdSpace space) {
  const MoeParams& params = world.spec.params;
  std::vector<std::int64_t> ids;
  for (int slot = 0; slot < params.top_k; ++slot) {
    const std::int64_t id = world.id(row.source, row.token, slot);
    if (space == IdSpace::kCargo) {
      ids.push_back(id);
    } else if (space == IdSpace::kGlobal) {
      // -1 and the configured id both mean "no expert"; a result knows one mark for it (Contract).
      ids.push_back(id == -1 ? params.invalid_expert_id : id);
    } else {
      const bool own = owner_of(id, params, world.spec.num_ranks) == rank;
      ids.push_back(own ? id - first_expert_of(params, rank, world.spec.num_ranks) : -1);
    }
  }
  return ids;
}

std::vector<std::byte> expert_row(const ExpertData& data, const ExpectedRow& row, int rank, std::int64_t hidden) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(hidden * size_of(data.dtype)));
  for (std::int64_t column = 0; column < hidden; ++column) {
    store(data.dtype, bytes.data(), column, float_of(hash_of(data.seed, rank, row, column), data.specials));
  }
  return bytes;
}

float late_weight(std::uint64_t seed, int rank, std::int64_t token, int slot) {
  return float_of(hash_of(seed ^ 0x1A7E, rank, {.source = rank, .token = token, .position = 0}, slot), false);
}

float returned_weight(std::uint64_t seed, const ExpectedRow& row, int rank, int slot) {
  return float_of(hash_of(seed ^ 0x5EED, rank, row, slot), false);
}

std::vector<std::byte> bias_bytes(std::uint64_t seed, int which, Dtype dtype, std::int64_t elements) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(elements * size_of(dtype)));
  const std::uint64_t start = mix(seed * 7 + static_cast<std::uint64_t>(which));
  for (std::int64_t i = 0; i < elements; ++i) {
    store(dtype, bytes.data(), i, float_of(mix(start + static_cast<std::uint64_t>(i)), true));
  }
  return bytes;
}

std::vector<std::byte> expect_combine(const World& world, int rank, const CombineRule& rule) {
  const std::int64_t hidden = world.spec.params.hidden_size;
  const std::int64_t elements = world.rank(rank).num_tokens * hidden;
  const Dtype wire = rule.low_precision ? Dtype::kF8e4m3 : world.spec.params.dtype;
  std::vector<std::byte> output(static_cast<std::size_t>(elements * size_of(rule.output_dtype)));
  std::vector<std::vector<std::byte>> biases;
  for (int which = 0; which < rule.num_biases; ++which) {
    biases.push_back(bias_bytes(rule.experts.seed + static_cast<std::uint64_t>(rule.bias_rank) * 64, which,
                                rule.output_dtype, elements));
  }
  const std::vector<std::vector<int>> of_token = receivers(world, rank, rule.layout);
  for (std::int64_t token = 0; token < world.rank(rank).num_tokens; ++token) {
    std::vector<float> sums(static_cast<std::size_t>(hidden), 0.0F);
    for (const int receiver : of_token[static_cast<std::size_t>(token)]) {
      const std::vector<float> sent = sent_row(world, {.source = rank, .token = token, .position = 0}, receiver, rule);
      const std::vector<float> crossed = rule.logarithmic ? reference::log_row(sent).decoded : std::vector<float>();
      for (std::size_t column = 0; column < sums.size(); ++column)
        sums[column] += rule.logarithmic ? crossed[column] : decode(wire, encode(wire, sent[column]));
    }
    for (std::int64_t column = 0; column < hidden; ++column) {
      const std::int64_t at = token * hidden + column;
      float sum = sums[static_cast<std::size_t>(column)];
      for (const std::vector<std::byte>& bias : biases)
        sum += load(rule.output_dtype, bias.data(), at);
      store(rule.output_dtype, output.data(), at, sum);
    }
  }
  return output;
}

std::vector<std::byte> expect_returned_weights(const World& world, int rank, const CombineRule& rule) {
  const MoeParams& params = world.spec.params;
  std::vector<std::byte> output(static_cast<std::size_t>(world.rank(rank).num_tokens * params.top_k * 4));
  const std::vector<std::vector<int>> of_token = receivers(world, rank, rule.layout);
  for (std::int64_t token = 0; token < world.rank(rank).num_tokens; ++token) {
    for (int slot = 0; slot < params.top_k; ++slot) {
      const int owner = owner_of(world.id(rank, token, slot), params, world.spec.num_ranks);
      for (const int receiver : of_token[static_cast<std::size_t>(token)]) {
        if (receiver != owner) continue;
        const ExpectedRow row{.source = rank, .token = token, .position = 0};
        const float weight = returned_weight(rule.experts.seed, row, receiver, slot);
        store(Dtype::kF32, output.data(), token * params.top_k + slot, weight);
      }
    }
  }
  return output;
}

std::int64_t expect_missing_rows(const World& world, int rank, const LayoutRule& rule) {
  LayoutRule all = rule;
  all.num_worst_tokens = -1;
  const auto count = [&](const LayoutRule& with) {
    std::int64_t rows = 0;
    for (const std::vector<int>& of_token : receivers(world, rank, with))
      rows += std::ssize(of_token);
    return rows;
  };
  return count(all) - count(rule);
}

void check_elements(const TensorView& actual, std::span<const std::byte> expected, const std::string& what) {
  const std::int64_t row_bytes = last_dim_bytes(actual);
  const std::int64_t columns = row_bytes / size_of(actual.dtype);
  const std::int64_t rows = num_flat_rows(actual);
  check_eq(rows * row_bytes, static_cast<std::int64_t>(expected.size()), what + ", bytes");
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::byte* got = row_of(actual, row);
    const std::byte* want = expected.data() + row * row_bytes;
    if (row_bytes == 0 || std::memcmp(got, want, static_cast<std::size_t>(row_bytes)) == 0) continue;
    for (std::int64_t column = 0; column < columns; ++column) {
      std::uint32_t got_bits = 0;
      std::uint32_t want_bits = 0;
      std::memcpy(&got_bits, got + column * size_of(actual.dtype), static_cast<std::size_t>(size_of(actual.dtype)));
      std::memcpy(&want_bits, want + column * size_of(actual.dtype), static_cast<std::size_t>(size_of(actual.dtype)));
      const bool both_nan = actual.dtype == Dtype::kF32 && std::isnan(decode(actual.dtype, got_bits)) &&
                            std::isnan(decode(actual.dtype, want_bits));
      if (got_bits == want_bits || both_nan) continue;
      const std::string where = what + " at [" + std::to_string(row) + ", " + std::to_string(column) + "]";
      check_eq(decode(actual.dtype, got_bits), decode(actual.dtype, want_bits), where);
      check_eq(got_bits, want_bits, where + ", bits");
    }
  }
}

}  // namespace tokenyard::support
