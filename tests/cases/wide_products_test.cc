// SPDX-License-Identifier: Apache-2.0
// C73, C74: sizes whose products exceed 31 bits are computed in 64 bits.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class WideProducts : public EachBackend {};

// 32 ranks x 10240 tokens x 7168 values: more elements than an int (C73).
TEST_P(WideProducts, CapacityOfALargeGroup) {
  const MoeParams params{.num_experts = 256, .top_k = 8, .hidden_size = 7168, .max_tokens_per_rank = 10'240};
  const BackendConfig config = find_backend(GetParam()).default_config;
  constexpr std::int64_t kRowBytes = 2 * 7168;
  constexpr std::int64_t kAllRows = std::int64_t{32} * 10'240;
  EXPECT_NO_THROW(validate(params));
  const std::int64_t output = output_bytes(params, config, 32);
  const bool by_expert = find_backend(GetParam()).contract.output_layout == OutputLayout::kExpertMajor;
  const std::int64_t copies = by_expert ? 256 / 32 : 1;  // a row for each expert of a rank
  EXPECT_GE(output, copies * kAllRows * kRowBytes);
  EXPECT_LT(output, copies * kAllRows * (kRowBytes + 4096));
  EXPECT_GT(window_bytes(params, config, 32), 0);
}

// A window grows with the tokens, also where 32 bits would wrap (C74).
TEST_P(WideProducts, WindowsGrowWithTokens) {
  MoeParams params{.num_experts = 256, .top_k = 8, .hidden_size = 7168, .max_tokens_per_rank = 1024};
  const BackendConfig config = find_backend(GetParam()).default_config;
  std::int64_t before = window_bytes(params, config, 8);
  for (int tokens = 2048; tokens <= 131'072; tokens *= 2) {
    params.max_tokens_per_rank = tokens;
    const std::int64_t now = window_bytes(params, config, 8);
    EXPECT_GT(now, before + before / 2) << tokens;
    EXPECT_LT(now, 3 * before) << tokens;
    before = now;
  }
}

TEST(WideProductsOfParams, ScaleElements) {
  MoeParams params{.num_experts = 256,
                   .top_k = 8,
                   .hidden_size = 7168,
                   .max_tokens_per_rank = 10'240,
                   .dispatch_format = DispatchFormat::kNvfp4};
  EXPECT_EQ(value_bytes_per_token(params), 3584);
  EXPECT_EQ(scale_bytes_per_token(params), 448);
  EXPECT_EQ(dispatch_bytes_per_token(params) * 32 * 10'240, std::int64_t{4032} * 327'680);
  params.hidden_size = 2'147'483'647;
  EXPECT_EQ(value_bytes_per_token(params), std::int64_t{1} << 30);
  params.dispatch_format = DispatchFormat::kNone;
  params.dtype = Dtype::kF32;
  EXPECT_EQ(dispatch_bytes_per_token(params), std::int64_t{4} * 2'147'483'647);
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         WideProducts,
                         ::testing::Values("all_gather", "high_throughput", "low_latency", "one_sided"),
                         backend_name);

TEST(WideProductsOfQueues, DoNotGrowWithTokens) {
  MoeParams params{.num_experts = 256, .top_k = 8, .hidden_size = 7168, .max_tokens_per_rank = 1};
  const std::int64_t before = window_bytes(params, TwoSidedConfig{}, 8);
  params.max_tokens_per_rank = 1 << 20;
  EXPECT_EQ(window_bytes(params, TwoSidedConfig{}, 8), before);
}

}  // namespace
}  // namespace tokenyard::support
