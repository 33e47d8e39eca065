// SPDX-License-Identifier: Apache-2.0
// The reference's own casts and rules, against published facts of the formats and counted examples.
#include "support/reference.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "support/casts.h"

namespace tokenyard::support {
namespace {

class ReferenceFormat : public ::testing::TestWithParam<Dtype> {};

TEST_P(ReferenceFormat, EveryPatternSurvivesDecodeAndEncode) {
  const Dtype dtype = GetParam();
  const std::uint32_t patterns = 1U << (8 * size_of(dtype));
  for (std::uint32_t bits = 0; bits < patterns; ++bits) {
    const float value = decode(dtype, bits);
    if (std::isnan(value)) continue;
    ASSERT_EQ(encode(dtype, value), bits) << value;
  }
}

// A value between two neighbours goes to the nearer one, and from the middle to the even one.
TEST_P(ReferenceFormat, RoundsToNearestEven) {
  const Dtype dtype = GetParam();
  const std::uint32_t last_finite = dtype == Dtype::kBf16 ? 0x7F7FU : dtype == Dtype::kF16 ? 0x7BFFU : 0x7EU;
  for (std::uint32_t bits = 0; bits < last_finite; ++bits) {
    const double low = decode(dtype, bits);
    const double high = decode(dtype, bits + 1);
    const double middle = low + (high - low) / 2;
    if (static_cast<double>(static_cast<float>(middle)) != middle) continue;  // below f32's own grain
    const auto at = static_cast<float>(middle);
    ASSERT_EQ(encode(dtype, at), bits % 2 == 0 ? bits : bits + 1);
    ASSERT_EQ(encode(dtype, std::nextafter(at, 0.0F)), bits);
    ASSERT_EQ(encode(dtype, std::nextafter(at, std::numeric_limits<float>::infinity())), bits + 1);
    ASSERT_EQ(encode(dtype, -std::nextafter(at, 0.0F)), bits | (1U << (8 * size_of(dtype) - 1)));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats,
                         ReferenceFormat,
                         ::testing::Values(Dtype::kBf16, Dtype::kF16, Dtype::kF8e4m3),
                         [](const auto& dtype) { return std::string(name(dtype.param)); });

TEST(ReferenceCasts, KnownValues) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(encode(Dtype::kBf16, 1.0F), 0x3F80U);
  EXPECT_EQ(encode(Dtype::kBf16, -kNan), 0x7FFFU);
  EXPECT_EQ(encode(Dtype::kF16, kNan), 0x7FFFU);
  EXPECT_EQ(encode(Dtype::kF16, 65519.0F), 0x7BFFU);
  EXPECT_EQ(encode(Dtype::kF16, 65520.0F), 0x7C00U);
  EXPECT_EQ(encode(Dtype::kBf16, std::numeric_limits<float>::max()), 0x7F80U);
  EXPECT_EQ(encode(Dtype::kBf16, -kInfinity), 0xFF80U);
  EXPECT_EQ(encode(Dtype::kF8e4m3, 448.0F), 0x7EU);
  EXPECT_EQ(encode(Dtype::kF8e4m3, 1e9F), 0x7EU);
  EXPECT_EQ(encode(Dtype::kF8e4m3, -kInfinity), 0xFEU);
  EXPECT_EQ(encode(Dtype::kF8e4m3, kNan), 0x7FU);
  EXPECT_EQ(encode(Dtype::kF8e4m3, 0x1p-9F), 0x01U);
  EXPECT_EQ(encode(Dtype::kF8e4m3, 0x1p-10F), 0x00U);
  EXPECT_EQ(encode(Dtype::kBf16, -0.0F), 0x8000U);
  EXPECT_TRUE(std::isnan(decode(Dtype::kF8e4m3, 0xFF)));
}

// 10 experts on 4 ranks: 3, 3, 2, 2.
TEST(ReferenceRoute, OwnersFollowTheBlocks) {
  const MoeParams params{.num_experts = 10, .top_k = 1, .hidden_size = 8, .max_tokens_per_rank = 1};
  const int owners[] = {0, 0, 0, 1, 1, 1, 2, 2, 3, 3};
  for (int expert = 0; expert < 10; ++expert)
    EXPECT_EQ(owner_of(expert, params, 4), owners[expert]);
  EXPECT_EQ(owner_of(-1, params, 4), -1);
  EXPECT_EQ(owner_of(10, params, 4), -1);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(num_local_experts(params, rank, 4), num_experts_of(params, rank, 4));
    EXPECT_EQ(first_local_expert(params, rank, 4), first_expert_of(params, rank, 4));
  }
}

// Rank 0 sends token 0 to rank 1 and token 1 to both; rank 1 sends nothing live.
TEST(ReferenceRoute, RowsOfASmallExample) {
  World world{
      .spec = {.params = {.num_experts = 4, .top_k = 2, .hidden_size = 1, .max_tokens_per_rank = 3}, .num_ranks = 2},
      .ranks = {{.num_tokens = 2, .ids = {3, 3, 0, 2}}, {.num_tokens = 1, .ids = {-1, -1}}}};
  const ExpectedDispatch compact = expect_dispatch(world, 1, {.layout = OutputLayout::kCompact});
  ASSERT_EQ(compact.rows.size(), 2U);
  EXPECT_EQ(compact.rows_per_expert, (std::vector<std::int64_t>{1, 1}));
  EXPECT_EQ(expect_ids(world, compact.rows[0], 1, IdSpace::kLocal), (std::vector<std::int64_t>{1, 1}));
  EXPECT_EQ(expect_ids(world, compact.rows[1], 1, IdSpace::kLocal), (std::vector<std::int64_t>{-1, 0}));
  const ExpectedDispatch blocks = expect_dispatch(world, 0, {.layout = OutputLayout::kRankMajor, .tokens_per_rank = 3});
  ASSERT_EQ(blocks.rows.size(), 1U);
  EXPECT_EQ(blocks.rows[0].position, 1);
  EXPECT_EQ(blocks.total_rows, 6);
  EXPECT_EQ(expect_dispatch(world, 0, {.layout = OutputLayout::kEveryRank}).total_rows, 3);
  EXPECT_EQ(expect_missing_rows(world, 0, {.layout = OutputLayout::kCompact, .num_worst_tokens = 1}), 1);
}

}  // namespace
}  // namespace tokenyard::support
