// SPDX-License-Identifier: Apache-2.0
// What only one_sided promises: the run-time rows per rank, low-precision combine, growth.
#include <gtest/gtest.h>

#include "conformance/small_spec.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

constexpr int kRanks = 3;

TEST(RuntimeMaxTokens, SetsTheRowsOfABlock) {
  const WorldSpec spec = small_spec(kRanks, 2);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "one_sided", spec);
    DispatchResult result;
    for (const std::int64_t tokens : {6, 4, 1, 5, 2, 6}) {
      WorldSpec now = with_seed(spec, 30 + static_cast<std::uint64_t>(tokens));
      now.num_tokens = {tokens, tokens / 2, 0};
      RoundPlan plan{.seed = static_cast<std::uint64_t>(tokens), .zero_copy = tokens % 2 == 0};
      plan.runtime_max_tokens = tokens;
      play_round(communication, make_world(now), plan, result);
    }
  }));
}

// Own tokens <= 0 <= max_tokens_per_rank holds when nobody has a token.
TEST(RuntimeMaxTokens, MayBeZero) {
  WorldSpec spec = small_spec(kRanks, 2);
  spec.num_tokens = {0, 0, 0};
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "one_sided", spec);
    DispatchResult result;
    RoundPlan plan;
    plan.runtime_max_tokens = 0;
    play_round(communication, make_world(spec), plan, result);
  }));
}

class LowPrecision : public ::testing::TestWithParam<Dtype> {};

// Rows cross as saturated e4m3; the sum and the output keep their own rules.
TEST_P(LowPrecision, RowsCrossAsFp8) {
  WorldSpec spec = small_spec(4, 3);
  spec.params.hidden_size = 37;
  spec.params.dtype = GetParam();
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Communication communication =
        create_communication(group, spec.params, OneSidedConfig{.use_low_precision_combine = true}, test_options());
    DispatchResult result;
    for (std::uint64_t round = 0; round < 6; ++round) {
      const Dtype output = round % 3 == 0 ? Dtype::kBf16 : round % 3 == 1 ? Dtype::kF16 : Dtype::kF32;
      const RoundPlan plan{.seed = round, .expert_dtype = GetParam(), .output_dtype = output, .zero_copy = round >= 3};
      play_round(communication, make_world(with_seed(spec, 40 + round)), plan, result);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Dtypes,
                         LowPrecision,
                         ::testing::Values(Dtype::kBf16, Dtype::kF16, Dtype::kF32),
                         [](const auto& dtype) { return std::string(name(dtype.param)); });

TEST(GrowthOfOneSided, MakesRoomAndReplacesHandles) {
  const WorldSpec small = small_spec(kRanks, 5);
  WorldSpec large = small;
  large.params.max_tokens_per_rank = 20;
  large.params.hidden_size = 100;
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "one_sided", small);
    DispatchResult result;
    play_round(communication, make_world(small), {}, result);
    auto* growth = communication.get<Growth>();
    check(growth != nullptr, "one_sided has no Growth");
    const std::int64_t before = communication.window_bytes();
    growth->reserve(small.params, 0);
    check_eq(communication.window_bytes(), before, "window after a request that fits");
    growth->reserve(large.params, 0);
    check(communication.window_bytes() > before, "the window did not grow");
    Tensor rows(Dtype::kBf16, {kRanks, 6, 24});
    Tensor output(Dtype::kBf16, {make_world(small).rank(group.rank()).num_tokens, 24});
    TensorView view = output.view();
    check_throws(ErrorCode::kReplaced, {},
                 [&] { (void)communication.combine(result.handle, {.expert_output = rows.view()}, {}, view); });
    for (std::uint64_t round = 0; round < 3; ++round) {
      play_round(communication, make_world(with_seed(large, round)), {.seed = round}, result);
    }
  }));
}

TEST(GrowthOfOneSided, DifferentRequestsFailEverywhereAndKeepTheWindow) {
  const WorldSpec spec = small_spec(kRanks, 6);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "one_sided", spec);
    DispatchResult result;
    play_round(communication, make_world(spec), {}, result);
    MoeParams wanted = spec.params;
    wanted.max_tokens_per_rank = group.rank() == 2 ? 31 : 30;
    check_throws(ErrorCode::kMismatch, {"30", "31"}, [&] { communication.get<Growth>()->reserve(wanted, 0); });
    play_round(communication, make_world(with_seed(spec, 7)), {}, result);
  }));
}

TEST(GrowthOfOneSided, IsRefusedWithAnOpenRound) {
  const WorldSpec spec = small_spec(2, 8);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, "one_sided", spec);
    DispatchResult result;
    dispatch_and_check(communication, world, {}, result);
    MoeParams wanted = spec.params;
    wanted.max_tokens_per_rank = 30;
    check_throws(ErrorCode::kInvalidState, {}, [&] { communication.get<Growth>()->reserve(wanted, 0); });
    combine_and_check(communication, world, {}, result, result.handle);
  }));
}

// What one rank cannot ask for.
struct BadGrowth {
  std::string_view name;
  void (*spoil)(MoeParams& wanted, std::int64_t& extra) = nullptr;  // null: a round is open instead
  ErrorCode code = ErrorCode::kInvalidArgument;
  std::string_view reason;
};

class BadGrowthOfOneSided : public ::testing::TestWithParam<BadGrowth> {};

// All hear of it at once, and the window that they had goes on.
TEST_P(BadGrowthOfOneSided, FailsOnAllAtOnceAndKeepsTheWindow) {
  WorldSpec spec = small_spec(kRanks, 9);
  spec.eplb_entries = 8;
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "one_sided", spec);
    const std::int64_t bytes = communication.window_bytes();
    DispatchResult result;
    dispatch_and_check(communication, make_world(spec), {}, result);
    const bool culprit = group.rank() == 1;
    const bool open = GetParam().spoil == nullptr;
    if (!culprit || !open) result.handle = Handle();
    MoeParams wanted = spec.params;
    std::int64_t extra = 0;
    wanted.max_tokens_per_rank = 30;
    if (culprit && !open) GetParam().spoil(wanted, extra);
    const Stopwatch stopwatch;
    check_throws(culprit ? GetParam().code : ErrorCode::kPeerFailed, {"rank 1", std::string(GetParam().reason)},
                 [&] { communication.get<Growth>()->reserve(wanted, extra); });
    stopwatch.check_below(std::chrono::milliseconds(2'000), "a growth that one rank cannot ask for");
    check_eq(communication.window_bytes(), bytes, "the window");
    check_eq(communication.params().max_tokens_per_rank, spec.params.max_tokens_per_rank, "the tokens");
    if (culprit && open) check_result(communication, make_world(spec), {}, result);
    result.handle = Handle();
    for (std::uint64_t round = 0; round < 2; ++round)
      play_round(communication, make_world(with_seed(spec, 10 + round)), {.seed = round}, result);
    MoeParams larger = spec.params;
    larger.max_tokens_per_rank = 31;
    communication.get<Growth>()->reserve(larger, 0);
    play_round(communication, make_world(with_seed(spec, 12)), {}, result);
  }));
}

constexpr BadGrowth kBadGrowths[] = {
    {"params", [](MoeParams& wanted, std::int64_t& /*extra*/) { wanted.hidden_size = -4; }, ErrorCode::kInvalidArgument,
     "hidden_size is -4"},
    {"extra_bytes", [](MoeParams& /*wanted*/, std::int64_t& extra) { extra = -1; }, ErrorCode::kInvalidArgument,
     "extra_payload_bytes_per_token is -1"},
    {"config", [](MoeParams& wanted, std::int64_t& /*extra*/) { wanted.num_experts = 4; }, ErrorCode::kInvalidArgument,
     "eplb_stats_num_experts is 8"},
    {"open_round", nullptr, ErrorCode::kInvalidState, "a round is open"},
};

INSTANTIATE_TEST_SUITE_P(Kinds, BadGrowthOfOneSided, ::testing::ValuesIn(kBadGrowths), [](const auto& tested) {
  return std::string(tested.param.name);
});

}  // namespace
}  // namespace tokenyard::support
