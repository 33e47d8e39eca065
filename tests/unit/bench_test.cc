// SPDX-License-Identifier: Apache-2.0
// What the bench measures with: its routing and its statistics.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <stdexcept>
#include <vector>

#include "tokenyard/params.h"

#include "cli/bench_routing.h"
#include "cli/time_statistics.h"

namespace tokenyard::cli {
namespace {

std::vector<std::int64_t> picks_of_experts(const BenchShape& shape) {
  std::vector<std::int64_t> picks(static_cast<std::size_t>(shape.num_experts), 0);
  for (const std::int32_t id : bench_ids(shape, 0))
    ++picks.at(static_cast<std::size_t>(id));
  return picks;
}

TEST(BenchRouting, PicksOfATokenAreDifferentExperts) {
  for (const BenchSkew skew : {BenchSkew::kUniform, BenchSkew::kZipf, BenchSkew::kOne}) {
    const BenchShape shape{.num_experts = 9, .top_k = 8, .num_tokens = 200, .skew = skew};
    const std::vector<std::int32_t> ids = bench_ids(shape, 1);
    ASSERT_EQ(ids.size(), 200U * 8);
    for (std::size_t token = 0; token < 200; ++token) {
      const std::set<std::int32_t> picks(ids.begin() + static_cast<std::ptrdiff_t>(token * 8),
                                         ids.begin() + static_cast<std::ptrdiff_t>(token * 8 + 8));
      EXPECT_EQ(picks.size(), 8U);
      EXPECT_GE(*picks.begin(), 0);
      EXPECT_LT(*picks.rbegin(), 9);
    }
  }
}

TEST(BenchRouting, DependsOnSeedAndRankOnly) {
  const BenchShape shape{.seed = 4};
  EXPECT_EQ(bench_ids(shape, 1), bench_ids(shape, 1));
  EXPECT_NE(bench_ids(shape, 1), bench_ids(shape, 0));
  BenchShape other = shape;
  other.seed = 5;
  EXPECT_NE(bench_ids(shape, 1), bench_ids(other, 1));
}

// With one pick a token nothing is drawn again, so the shares are those of the law; 4 standard deviations.
TEST(BenchRouting, ZipfAndUniformAreWhatTheySay) {
  for (const double exponent : {0.0, 1.0, 1.5}) {
    const BenchShape shape{.num_experts = 16,
                           .top_k = 1,
                           .num_tokens = 40'000,
                           .skew = exponent == 0.0 ? BenchSkew::kUniform : BenchSkew::kZipf,
                           .zipf_exponent = exponent};
    double sum = 0;
    for (int expert = 0; expert < 16; ++expert)
      sum += std::pow(expert + 1, -exponent);
    const std::vector<std::int64_t> picks = picks_of_experts(shape);
    for (int expert = 0; expert < 16; ++expert) {
      const double share = std::pow(expert + 1, -exponent) / sum;
      const double deviation = std::sqrt(40'000 * share * (1 - share));
      EXPECT_NEAR(static_cast<double>(picks[static_cast<std::size_t>(expert)]), 40'000 * share, 4 * deviation)
          << "expert " << expert << ", exponent " << exponent;
    }
  }
}

TEST(BenchRouting, OneSendsEveryTokenToExpertZero) {
  const BenchShape shape{.num_tokens = 50, .skew = BenchSkew::kOne};
  EXPECT_EQ(picks_of_experts(shape)[0], 50);
}

TEST(BenchRouting, OwnersAreTheLibrarysOwners) {
  for (const auto& [experts, ranks] : {std::pair(64, 4), std::pair(10, 4), std::pair(3, 5)}) {
    const BenchShape shape{.num_ranks = ranks, .num_experts = experts};
    const MoeParams params{.num_experts = experts};
    for (int expert = 0; expert < experts; ++expert) {
      const int owner = bench_owner(shape, expert);
      const int first = first_local_expert(params, owner, ranks);
      EXPECT_GE(expert, first);
      EXPECT_LT(expert, first + num_local_experts(params, owner, ranks));
    }
  }
}

TEST(BenchRouting, SkewsAreParsedOrRefused) {
  BenchShape shape;
  EXPECT_EQ(parse_bench_skew("zipf:1.25", shape), "");
  EXPECT_EQ(shape.skew, BenchSkew::kZipf);
  EXPECT_EQ(shape.zipf_exponent, 1.25);
  EXPECT_EQ(parse_bench_skew("trace:a/b:c", shape), "a/b:c");
  for (const char* wrong :
       {"", "zipf", "zipf:", "zipf:x", "zipf:-1", "zipf:1x", "one:1", "uniform:2", "trace:", "even"})
    EXPECT_THROW(parse_bench_skew(wrong, shape), std::invalid_argument) << wrong;
}

TEST(BenchStatistics, QuantilesAreValuesOfTheList) {
  EXPECT_EQ(quantile({3}, 0.5), 3);
  EXPECT_EQ(quantile({3}, 0.95), 3);
  EXPECT_EQ(quantile({4, 1, 3, 2}, 0.5), 2);
  EXPECT_EQ(quantile({5, 1, 4, 2, 3}, 0.5), 3);
  std::vector<double> values;
  for (int i = 100; i >= 1; --i)
    values.push_back(i);
  EXPECT_EQ(quantile(values, 0.95), 95);
  EXPECT_EQ(quantile(values, 1.0), 100);
  EXPECT_EQ(quantile(values, 0.0), 1);
}

}  // namespace
}  // namespace tokenyard::cli
