// SPDX-License-Identifier: Apache-2.0
// The layer, its slices and its experts: against the layer's own expected output, and against plain loops.
#include "cli/moe_layer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "tokenyard/error.h"

#include "cli/fp8_rows.h"
#include "protocol/casts.h"

namespace tokenyard::cli {
namespace {

using protocol::decode;
using protocol::encode;

const MoeLayer& layer() {
  static const MoeLayer loaded = MoeLayer::load(TOKENYARD_TEST_DATA "/tiny_moe");
  return loaded;
}

// A sixteenth of the tokens, from all domains, keeps this quick under sanitizers.
constexpr std::int64_t kStride = 16;

struct Sample {
  TensorView hidden_states;
  TensorView topk_ids;
  TensorView topk_weights;
  std::vector<float> expected;
};

Sample sample() {
  const auto every = [](TensorView view) {
    view.shape[0] /= kStride;
    view.strides[0] *= kStride;
    return view;
  };
  Sample result{every(layer().hidden_states()), every(layer().topk_ids()), every(layer().topk_weights()), {}};
  const auto hidden = static_cast<std::size_t>(layer().hidden_size());
  for (std::int64_t row = 0; row < result.hidden_states.num_rows(); ++row) {
    const auto expected = layer().expected_output().subspan(static_cast<std::size_t>(row * kStride) * hidden, hidden);
    result.expected.insert(result.expected.end(), expected.begin(), expected.end());
  }
  return result;
}

TEST(TokensOfRank, SharesAreContiguousAndEven) {
  for (const std::int64_t num_tokens : {0, 1, 7, 8192}) {
    for (const int num_ranks : {1, 2, 3, 5, 8, 13}) {
      std::int64_t next = 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const TokenRange range = tokens_of_rank(num_tokens, rank, num_ranks);
        EXPECT_EQ(range.first, next);
        EXPECT_GE(range.count, num_tokens / num_ranks);
        EXPECT_LE(range.count, (num_tokens + num_ranks - 1) / num_ranks);
        next += range.count;
      }
      EXPECT_EQ(next, num_tokens);
    }
  }
}

TEST(MoeLayer, HasTheShapesOfItsFiles) {
  EXPECT_EQ(layer().num_experts(), 64);
  EXPECT_EQ(layer().top_k(), 8);
  EXPECT_EQ(layer().hidden_size(), 256);
  EXPECT_EQ(layer().expert_hidden_size(), 64);
  EXPECT_EQ(layer().num_tokens(), 8192);
  EXPECT_EQ(std::vector(layer().token_shape().begin(), layer().token_shape().end()),
            (std::vector<std::int64_t>{4, 2048}));
  EXPECT_EQ(layer().topk_ids().describe(), "i64[8192, 8]");
  EXPECT_EQ(layer().topk_weights().describe(), "f32[8192, 8]");
}

TEST(MoeLayer, AMissingFolderIsNamed) {
  try {
    (void)MoeLayer::load("no_such_layer");
    FAIL() << "there is no such folder";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no_such_layer/tokens.safetensors"), std::string::npos) << error.what();
  }
}

TEST(LocalExperts, AllExpertsGiveTheExpectedOutput) {
  const Sample tokens = sample();
  LocalExperts experts(layer(), 0, layer().num_experts());
  std::vector<std::uint16_t> output(tokens.expected.size(), 0x7FFF);
  experts.compute(
      {.hidden_states = tokens.hidden_states, .topk_ids = tokens.topk_ids, .topk_weights = tokens.topk_weights},
      {output.data(), Dtype::kBf16, {tokens.hidden_states.num_rows(), layer().hidden_size()}});
  // What one rounding to bf16 costs is at most 2^-9 of each value.
  EXPECT_LT(relative_error(output, tokens.expected), 1.0 / 512);
}

TEST(LocalExperts, Fp8RowsStayNear) {
  const Sample tokens = sample();
  const Fp8Rows rows = quantise_fp8_rows(tokens.hidden_states);
  LocalExperts experts(layer(), 0, layer().num_experts());
  std::vector<std::uint16_t> output(tokens.expected.size());
  experts.compute({.hidden_states = rows.codes_view(),
                   .hidden_states_scale = rows.scales_view(),
                   .topk_ids = tokens.topk_ids,
                   .topk_weights = tokens.topk_weights},
                  {output.data(), Dtype::kBf16, {rows.num_rows, layer().hidden_size()}});
  const double error = relative_error(output, tokens.expected);
  EXPECT_LT(error, 2e-2);
  EXPECT_GT(error, 1e-3);
}

// Ranks' shares add up to the whole whatever the id space, the layout and the strides.
TEST(LocalExperts, SharesOfThreeRanksAddUp) {
  const Sample tokens = sample();
  const std::int64_t num_rows = tokens.hidden_states.num_rows();
  const std::int64_t hidden = layer().hidden_size();
  constexpr std::int64_t kBlocks = 4;
  constexpr std::int64_t kPadding = 5;  // rows between blocks, and elements between output rows
  const std::int64_t per_block = num_rows / kBlocks;
  TensorView blocks = tokens.hidden_states;
  blocks.num_dims = 3;
  blocks.shape = {kBlocks, per_block, hidden, 0};
  blocks.strides = {per_block * tokens.hidden_states.strides[0], tokens.hidden_states.strides[0], 1, 0};
  std::vector<float> sums(tokens.expected.size());
  const std::vector<int> firsts{0, 22, 43, 64};
  for (std::size_t rank = 0; rank < 3; ++rank) {
    LocalExperts experts(layer(), firsts[rank], firsts[rank + 1] - firsts[rank]);
    // Ids as a local id space has them.
    std::vector<std::int64_t> ids;
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const auto* from = tokens.topk_ids.as<const std::int64_t>() + row * tokens.topk_ids.strides[0];
      std::transform(from, from + layer().top_k(), std::back_inserter(ids), [&](std::int64_t id) {
        return id >= firsts[rank] && id < firsts[rank + 1] ? id - firsts[rank] : -1;
      });
    }
    const std::int64_t row_stride = hidden + kPadding;
    const std::int64_t block_stride = (per_block + kPadding) * row_stride;
    std::vector<std::uint16_t> output(static_cast<std::size_t>(kBlocks * block_stride), 0x4242);
    TensorView output_view(output.data(), Dtype::kBf16, {kBlocks, per_block, hidden});
    output_view.strides = {block_stride, row_stride, 1, 0};
    experts.compute({.hidden_states = blocks,
                     .topk_ids = {ids.data(), Dtype::kI64, {num_rows, layer().top_k()}},
                     .topk_weights = tokens.topk_weights},
                    output_view);
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const auto* values = output.data() + row / per_block * block_stride + row % per_block * row_stride;
      for (std::int64_t i = 0; i < hidden; ++i) {
        sums[static_cast<std::size_t>(row * hidden + i)] += decode<protocol::Bf16>(values[i]);
      }
      EXPECT_EQ(values[hidden], 0x4242) << "wrote past row " << row;
    }
  }
  std::vector<std::uint16_t> rounded(sums.size());
  std::ranges::transform(sums, rounded.begin(), encode<protocol::Bf16>);
  EXPECT_LT(relative_error(rounded, tokens.expected), 4e-3);
}

TEST(LocalExperts, AnExpertChosenTwiceWeighsTwiceAndNoRouteGivesZero) {
  const TensorView rows = layer().hidden_states().rows(0, 3);
  LocalExperts experts(layer(), 10, 4);
  std::vector<std::int64_t> ids{11, 11, 11, -1, 14, 9};
  std::vector<float> weights{0.25F, 0.25F, 0.5F, 9.0F, 9.0F, 9.0F};
  std::vector<std::uint16_t> output(3 * 256, 0x7FFF);
  experts.compute({.hidden_states = rows,
                   .topk_ids = {ids.data(), Dtype::kI64, {3, 2}},
                   .topk_weights = {weights.data(), Dtype::kF32, {3, 2}},
                   .first_id = 10},
                  {output.data(), Dtype::kBf16, {3, 256}});
  std::vector<std::uint16_t> once(3 * 256);
  ids = {11, -1, 11, -1, -1, -1};
  weights = {0.5F, 0, 0.5F, 0, 0, 0};
  experts.compute({.hidden_states = rows,
                   .topk_ids = {ids.data(), Dtype::kI64, {3, 2}},
                   .topk_weights = {weights.data(), Dtype::kF32, {3, 2}},
                   .first_id = 10},
                  {once.data(), Dtype::kBf16, {3, 256}});
  EXPECT_EQ(output, once);
  EXPECT_TRUE(std::all_of(output.begin() + 512, output.end(), [](std::uint16_t v) { return v == 0; }));
  EXPECT_FALSE(std::all_of(output.begin(), output.begin() + 256, [](std::uint16_t v) { return v == 0; }));
}

TEST(LocalExperts, OtherDtypesAreRefused) {
  LocalExperts experts(layer(), 0, 1);
  std::vector<std::uint16_t> output(256);
  std::vector<std::int32_t> ids(8);
  EXPECT_THROW(experts.compute({.hidden_states = layer().hidden_states().rows(0, 1),
                                .topk_ids = {ids.data(), Dtype::kI32, {1, 8}},
                                .topk_weights = layer().topk_weights().rows(0, 1)},
                               {output.data(), Dtype::kBf16, {1, 256}}),
               Error);
}

TEST(Fp8Rows, ScalesAreThoseOfTheFormat) {
  std::vector<std::uint16_t> values(2 * 200);
  for (std::size_t i = 0; i < 128; ++i)
    values[i] = encode<protocol::Bf16>(static_cast<float>(i) - 63.0F);
  values[199] = encode<protocol::Bf16>(-3.5F);
  const Fp8Rows rows = quantise_fp8_rows({values.data(), Dtype::kBf16, {2, 200}});
  EXPECT_EQ(rows.scales, (std::vector<float>{64.0F / 448.0F, 3.5F / 448.0F, 1.0F, 1.0F}));
  EXPECT_EQ(rows.codes[127], 0x7E);
  EXPECT_EQ(rows.codes[199], 0xFE);
  EXPECT_EQ(rows.codes[200], 0x00);
  std::vector<float> decoded(200);
  dequantise_fp8_row({rows.codes.data(), 200}, rows.scales.data(), decoded.data());
  for (std::size_t i = 0; i < 200; ++i) {
    const float value = decode<protocol::Bf16>(values[i]);
    EXPECT_NEAR(decoded[i], value, std::abs(value) / 16 + 1e-3F) << i;
  }
}

}  // namespace
}  // namespace tokenyard::cli
