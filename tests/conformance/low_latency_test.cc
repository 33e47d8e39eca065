// SPDX-License-Identifier: Apache-2.0
// What only low_latency promises: the casts on the way, the logarithmic wire, receive statistics, weights given once.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "conformance/small_spec.h"
#include "support/casts.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"
#include "unit/block_cast_reference.h"

namespace tokenyard::support {
namespace {

constexpr int kRanks = 3;

struct CastCase {
  DispatchCast cast = DispatchCast::kFp8Block128;
  Dtype dtype = Dtype::kBf16;
  int hidden_size = 7;
};

std::vector<CastCase> cast_cases() {
  std::vector<CastCase> cases;
  for (const DispatchCast cast : reference::kCasts) {
    for (const int hidden_size : {1, 7, 128, 300, 2880})
      cases.push_back({cast, hidden_size == 300 ? Dtype::kF32 : Dtype::kBf16, hidden_size});
    cases.push_back({cast, Dtype::kF16, 513});
  }
  return cases;
}

class CastOnTheWay : public ::testing::TestWithParam<CastCase> {
 protected:
  static std::vector<float> row_of_world(const World& world, const ExpectedRow& row) {
    std::vector<float> values;
    const Rows& rows = world.rank(row.source).hidden;
    for (std::int64_t column = 0; column < rows.columns; ++column)
      values.push_back(load(rows.dtype, rows.row(row.token).data(), column));
    return values;
  }

  static void check_cast_rows(const World& world, const ExpectedDispatch& expected, const DispatchResult& result) {
    for (const ExpectedRow& row : expected.rows) {
      const reference::CastRow cast = reference::cast_row(row_of_world(world, row), GetParam().cast);
      const std::string what = "row " + std::to_string(row.position);
      check_bytes(support::row_of(result.hidden_states, row.position), cast.values, "codes of " + what);
      check_bytes(support::row_of(result.hidden_states_scale, row.position), cast.scales, "scales of " + what);
    }
  }
};

// Codes and scales bit for bit, in the library's memory and in the caller's; e8m0 scales fill whole words.
TEST_P(CastOnTheWay, GivesTheCodesAndScalesOfTheDefinition) {
  WorldSpec spec = small_spec(kRanks, 9);
  spec.params.hidden_size = GetParam().hidden_size;
  spec.params.dtype = GetParam().dtype;
  const std::int64_t blocks = (spec.params.hidden_size + 127) / 128;
  const bool e8m0 = GetParam().cast == DispatchCast::kFp8Block128Ue8m0;
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "low_latency", spec);
    DispatchResult result;
    for (std::uint64_t round = 0; round < 4; ++round) {
      const World world = make_world(with_seed(spec, 50 + round));
      const ExpectedDispatch expected = expect_dispatch(world, group.rank(), layout_rule(communication, {}));
      const std::vector<std::int64_t> block = blocks_of(communication, expected);
      Tensor codes(Dtype::kF8e4m3, {block[0], block[1], spec.params.hidden_size});
      Tensor scales(e8m0 ? Dtype::kE8m0 : Dtype::kF32, {block[0], block[1], blocks});
      DispatchResult into;
      into.hidden_states = codes.view();
      into.hidden_states_scale = scales.view();
      const RankTensors tensors(world, group.rank(), round % 2 == 1);
      const DispatchOptions options{.cast = GetParam().cast, .into = round >= 2 ? &into : nullptr};
      check_ok(communication.dispatch(tensors.input(), options, result), "dispatch");
      check_eq(name(result.hidden_states.dtype), name(Dtype::kF8e4m3), "dtype of the codes");
      check_cast_rows(world, expected, result);
      if (round < 2 && e8m0) {
        for (const ExpectedRow& row : expected.rows) {
          const std::byte* after = support::row_of(result.hidden_states_scale, row.position) + blocks;
          for (std::int64_t i = blocks; i % 4 != 0; ++i, ++after)
            check_eq(std::to_integer<int>(*after), 0, "what fills the last word of the scales");
        }
      }
      codes.check_guards("the caller's codes");
      scales.check_guards("the caller's scales");
      combine_and_check(communication, world, {.seed = round, .expert_dtype = Dtype::kBf16}, result, result.handle);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Cases, CastOnTheWay, ::testing::ValuesIn(cast_cases()), [](const auto& tested) {
  return "cast" + std::to_string(static_cast<int>(tested.param.cast)) + "_" + std::string(name(tested.param.dtype)) +
         "_" + std::to_string(tested.param.hidden_size);
});

TEST(CastsThatDiffer, AreAMismatchOnEveryRank) {
  WorldSpec spec = all_to_all_spec(kRanks, 4);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "low_latency", spec);
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    const DispatchCast cast = group.rank() == 1 ? DispatchCast::kFp8Block128 : DispatchCast::kNone;
    check_throws(ErrorCode::kMismatch, {"rank"},
                 [&] { (void)communication.dispatch(tensors.input(), {.cast = cast}, result); });
    play_round(communication, world, {}, result);
  }));
}

// Every row crosses as the reference encodes it, so the sums are equal bit for bit.
TEST(LogarithmicCombine, SumsWhatTheWireHolds) {
  for (const int hidden_size : {7, 128, 300}) {
    WorldSpec spec = small_spec(4, 6);
    spec.params.hidden_size = hidden_size;
    EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
      Communication communication =
          create_communication(group, spec.params, LowLatencyConfig{.use_logarithmic_combine = true}, test_options());
      DispatchResult result;
      for (std::uint64_t round = 0; round < 6; ++round) {
        WorldSpec now = with_seed(spec, 70 + round);
        now.with_weights = round % 2 == 0;
        const Dtype output = round % 3 == 0 ? Dtype::kBf16 : round % 3 == 1 ? Dtype::kF16 : Dtype::kF32;
        const RoundPlan plan{.seed = round, .output_dtype = output, .zero_copy = round >= 3};
        play_round(communication, make_world(now), plan, result);
      }
    }));
  }
}

TEST(LogarithmicCombine, WindowsAreSmaller) {
  const MoeParams params{.num_experts = 256, .top_k = 8, .hidden_size = 7168, .max_tokens_per_rank = 128};
  const std::int64_t plain = window_bytes(params, LowLatencyConfig{}, 8);
  EXPECT_LT(window_bytes(params, LowLatencyConfig{.use_logarithmic_combine = true}, 8), plain * 85 / 100);
  EXPECT_LE(plain, 64'000'000);  // the goal for 8 ranks, 128 tokens, hidden size 7168 and 256 experts
}

TEST(ReceiveStatistics, AddUp) {
  const WorldSpec spec = small_spec(kRanks, 8);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "low_latency", spec);
    const auto experts = num_local_experts(spec.params, group.rank(), kRanks);
    std::vector<std::int32_t> routes(static_cast<std::size_t>(experts), 5);
    std::vector<std::int32_t> wanted = routes;
    std::vector<std::int64_t> waited(kRanks, 7);
    const DispatchOptions options{.routes_per_expert = {routes.data(), Dtype::kI32, {experts}},
                                  .wait_per_source = {waited.data(), Dtype::kI64, {kRanks}}};
    DispatchResult result;
    for (std::uint64_t round = 0; round < 5; ++round) {
      WorldSpec now = with_seed(spec, round);
      now.skew = static_cast<Skew>(round % kNumSkews);
      const World world = make_world(now);
      const RankTensors tensors(world, group.rank(), false);
      group.barrier();
      if (group.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      check_ok(communication.dispatch(tensors.input(), options, result), "dispatch");
      const std::vector<std::int32_t> more = expect_routes(world, group.rank());
      for (std::size_t expert = 0; expert < wanted.size(); ++expert)
        wanted[expert] += more[expert];
      check_lists_eq(routes, wanted, "routes per expert");
      combine_and_check(communication, world, {}, result, result.handle);
    }
    for (const std::int64_t nanoseconds : waited)
      check(nanoseconds >= 7, "a wait went backwards");
    if (group.rank() != 2) check(waited[2] > 50'000'000, "the slow rank was not waited for, it seems");
  }));
}

// Weights come at dispatch or at combine; both and neither are errors that the others hear of.
TEST(WeightsOfLowLatency, AreGivenOnce) {
  WorldSpec spec = all_to_all_spec(kRanks, 5);
  const World with = make_world(spec);
  WorldSpec late_spec = spec;
  late_spec.with_weights = false;
  const World late = make_world(late_spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "low_latency", spec);
    DispatchResult result;
    for (const World* world : {&with, &late}) {
      dispatch_and_check(communication, *world, {}, result);
      Tensor rows(Dtype::kBf16, {num_flat_rows(result.hidden_states), spec.params.hidden_size});
      Tensor weights(Dtype::kF32, {6, spec.params.top_k});
      Tensor output(Dtype::kBf16, {6, spec.params.hidden_size});
      TensorView view = output.view();
      CombineInput input{.expert_output = rows.view()};
      const bool culprit = group.rank() == 1;
      if ((world == &with) == culprit) input.topk_weights = weights.view();
      if (culprit) {
        check_throws(ErrorCode::kInvalidArgument, {"topk_weights"},
                     [&] { (void)communication.combine(result.handle, input, {}, view); });
      } else {
        check_fault(communication.combine(result.handle, input, {}, view), StatusCode::kAborted, 1, Phase::kCombine);
      }
      play_round(communication, *world, {}, result);
    }
  }));
}

}  // namespace
}  // namespace tokenyard::support
