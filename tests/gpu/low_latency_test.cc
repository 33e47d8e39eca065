// SPDX-License-Identifier: Apache-2.0
// `low_latency` on GPUs: every round against the plain reference, byte for byte, as the host engine is checked.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "gpu/device_ranks.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using support::check;
using support::check_fault;
using support::check_lists_eq;
using support::check_ok;
using support::check_throws;
using support::RoundPlan;
using support::Skew;
using support::World;
using support::WorldSpec;

constexpr std::array kCasts{DispatchCast::kNone, DispatchCast::kFp8Block128, DispatchCast::kFp8Block128PowerOfTwo,
                            DispatchCast::kFp8Block128Ue8m0};

// Skews, casts, dtypes and memory all change from round to round, each with a period of its own.
World world_of(const Shape& shape, std::uint64_t round) {
  return support::make_world({.params = params_of(shape),
                              .num_ranks = shape.num_ranks,
                              .skew = static_cast<Skew>(round % support::kNumSkews),
                              .id_dtype = round % 2 == 1 ? Dtype::kI64 : Dtype::kI32,
                              .weight_dtype = round % 4 == 1 ? Dtype::kBf16 : Dtype::kF32,
                              .with_weights = round % 3 != 2,
                              .seed = round + 11});
}

RoundPlan plan_of(const Shape& shape, std::uint64_t round) {
  constexpr std::array kOutputs{Dtype::kBf16, Dtype::kF32, Dtype::kF16};
  return {.seed = round + 5,
          .expert_dtype = round % 5 == 4 ? Dtype::kF32 : shape.dtype,
          .output_dtype = round % 2 == 0 ? shape.dtype : kOutputs[round / 2 % kOutputs.size()],
          .strided = round % 3 == 1,
          .caller_tensors = round % 7 == 2 || round % 7 == 3,
          .flat_expert_output = round % 5 == 3,
          .cast = kCasts[round % kCasts.size()]};
}

class LowLatencyOnGpu : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam()); }
};

TEST_P(LowLatencyOnGpu, RoundsEqualTheReference) {
  const Shape shape = GetParam();
  run_on_devices(shape, LowLatencyConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (std::uint64_t round = 0; round < 2 * support::kNumSkews; ++round)
      play_round(communication, world_of(shape, round), rounds.through_device(plan_of(shape, round)), result);
  });
}

TEST_P(LowLatencyOnGpu, RowsMayCrossAsLogarithms) {
  const Shape shape = GetParam();
  run_on_devices(shape, LowLatencyConfig{.use_logarithmic_combine = true}, {.zero_copy = true},
                 [&](Communication& communication, DeviceRounds& rounds) {
                   DispatchResult result;
                   for (std::uint64_t round = 0; round < support::kNumSkews; ++round) {
                     RoundPlan plan = plan_of(shape, round);
                     plan.expert_dtype = round % 2 == 0 ? shape.dtype : Dtype::kF32;
                     play_round(communication, world_of(shape, round), rounds.through_device(plan), result);
                   }
                 });
}

TEST_P(LowLatencyOnGpu, TwoRoundsMayBeInFlightAndPhasesInHalves) {
  const Shape shape = GetParam();
  for (const bool halves : {false, true}) {
    run_on_devices(shape, LowLatencyConfig{}, {.halves = halves, .rounds_in_flight = 2},
                   [&](Communication& communication, DeviceRounds& rounds) {
                     DispatchResult first;
                     DispatchResult second;
                     for (std::uint64_t round = 0; round < support::kNumSkews; round += 2) {
                       const std::array worlds{world_of(shape, round), world_of(shape, round + 1)};
                       std::array plans{plan_of(shape, round), plan_of(shape, round + 1)};
                       for (RoundPlan& plan : plans)
                         plan = rounds.through_device(plan);
                       dispatch_and_check(communication, worlds[0], plans[0], first);
                       dispatch_and_check(communication, worlds[1], plans[1], second);
                       const auto combine = [&](std::size_t which, DispatchResult& result) {
                         combine_and_check(communication, worlds[which], plans[which], result, result.handle);
                       };
                       const bool in_order = round % 4 == 0;
                       in_order ? combine(0, first) : combine(1, second);
                       in_order ? combine(1, second) : combine(0, first);
                     }
                   });
  }
}

TEST_P(LowLatencyOnGpu, AnyNumberOfMultiprocessorsGivesTheSameBytes) {
  const Shape shape = GetParam();
  for (const int num_sms : {1, 3}) {
    run_on_devices(
        shape, LowLatencyConfig{}, {.num_sms = num_sms}, [&](Communication& communication, DeviceRounds& rounds) {
          DispatchResult result;
          for (const std::uint64_t round : {1U, 6U})
            play_round(communication, world_of(shape, round), rounds.through_device(plan_of(shape, round)), result);
        });
  }
}

std::string title(const testing::TestParamInfo<Shape>& info) {
  return title_of(info.param);
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const bool spread : {false, true}) {
    for (const int num_ranks : {1, 2, 3, 4, 8})
      all.push_back({.num_ranks = num_ranks, .hidden_size = 128, .spread = spread});
    for (const int hidden_size : {7, 2048, 2880, 7168})
      all.push_back({.hidden_size = hidden_size, .max_tokens = 20, .spread = spread});
    // Longer rows than the threads of a block take at once.
    all.push_back({.hidden_size = 17'000, .num_experts = 16, .max_tokens = 5, .spread = spread});
    for (const int top_k : {1, 2, 9, 40})
      all.push_back({.num_ranks = 3, .hidden_size = 64, .top_k = top_k, .num_experts = 47, .spread = spread});
    for (const Dtype dtype : {Dtype::kF16, Dtype::kF32})
      all.push_back({.hidden_size = 520, .dtype = dtype, .spread = spread});
    // More tokens than blocks; and so many that rows are stamped.
    all.push_back({.hidden_size = 256, .num_experts = 16, .max_tokens = 300, .spread = spread});
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32})
      all.push_back({.hidden_size = 136, .num_experts = 16, .max_tokens = 520, .dtype = dtype, .spread = spread});
    all.push_back({.num_ranks = 5, .hidden_size = 7, .num_experts = 23, .max_tokens = 513, .spread = spread});
    all.push_back({.hidden_size = 512, .spread = spread, .kind = support::RankKind::kProcesses});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, LowLatencyOnGpu, testing::ValuesIn(shapes()), title);

// Ranks of one small round, with a device.
class LowLatencyCallsOnGpu : public testing::Test {
 protected:
  static constexpr int kRanks = 3;

  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(shape_); }

  Shape shape_{.num_ranks = kRanks, .hidden_size = 256, .max_tokens = 12};
};

TEST_F(LowLatencyCallsOnGpu, StatisticsAddUpOnTheDevice) {
  run_on_devices(shape_, LowLatencyConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const MoeParams params = params_of(shape_);
    const auto experts = num_local_experts(params, communication.rank(), kRanks);
    std::vector<std::int32_t> routes(static_cast<std::size_t>(experts), 5);
    routes[0] = 0x7FFFFFFF;  // stays there
    std::vector<std::int32_t> wanted = routes;
    std::vector<std::int64_t> waited(kRanks, 7);
    const DispatchOptions options{.routes_per_expert = {routes.data(), Dtype::kI32, {experts}},
                                  .wait_per_source = {waited.data(), Dtype::kI64, {kRanks}}};
    DispatchResult result;
    for (std::uint64_t round = 0; round < support::kNumSkews; ++round) {
      const World world = world_of(shape_, round);
      const support::RankTensors tensors(world, communication.rank(), false);
      const std::vector<std::int64_t> before = waited;
      check_ok(rounds.dispatch(communication, tensors.input(), options, result), "dispatch");
      const std::vector<std::int32_t> more = support::expect_routes(world, communication.rank());
      for (std::size_t expert = 1; expert < wanted.size(); ++expert)
        wanted[expert] += more[expert];
      check_lists_eq(routes, wanted, "routes per expert");
      for (std::size_t source = 0; source < waited.size(); ++source)
        check(waited[source] >= before[source] && waited[source] < 60'000'000'000, "a wait out of its range");
      combine_and_check(communication, world, rounds.through_device({}), result, result.handle);
    }
  });
}

TEST_F(LowLatencyCallsOnGpu, AThirdRoundInFlightIsRefused) {
  run_on_devices(shape_, LowLatencyConfig{}, {.rounds_in_flight = 2},
                 [&](Communication& communication, DeviceRounds& rounds) {
                   std::array<DispatchResult, 3> results;
                   const World world = world_of(shape_, 0);
                   const RoundPlan plan = rounds.through_device({});
                   const support::RankTensors tensors(world, communication.rank(), false);
                   dispatch_and_check(communication, world, plan, results[0]);
                   dispatch_and_check(communication, world, plan, results[1]);
                   check_throws(ErrorCode::kInvalidState, {"2 rounds are in flight"},
                                [&] { (void)communication.dispatch(tensors.input(), {}, results[2]); });
                   for (int round : {0, 1})
                     combine_and_check(communication, world, plan, results[round], results[round].handle);
                   play_round(communication, world, plan, results[2]);
                 });
}

TEST_F(LowLatencyCallsOnGpu, MisuseEndsOneOperationOnEveryRank) {
  run_on_devices(shape_, LowLatencyConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const bool culprit = communication.rank() == 1;
    DispatchResult result;
    const auto play = [&](std::uint64_t round) {
      play_round(communication, world_of(shape_, round), rounds.through_device(plan_of(shape_, round)), result);
    };
    const World world = world_of(shape_, 0);
    const support::RankTensors tensors(world, communication.rank(), false);
    for (std::uint64_t time = 0; time < 3; ++time) {
      play(3 * time);
      // A dispatch that one rank gives up.
      DispatchInput input = tensors.input();
      if (culprit) {
        input.router_logits = input.topk_ids;
        check_throws(ErrorCode::kInvalidArgument, {"router_logits"},
                     [&] { (void)rounds.dispatch(communication, input, {}, result); });
      } else {
        check_fault(rounds.dispatch(communication, input, {}, result), StatusCode::kAborted, 1, Phase::kDispatch);
      }
      play(3 * time + 1);
      // Casts that differ.
      const DispatchCast cast = culprit ? DispatchCast::kFp8Block128 : DispatchCast::kNone;
      check_throws(ErrorCode::kMismatch, {"rank"},
                   [&] { (void)rounds.dispatch(communication, tensors.input(), {.cast = cast}, result); });
      play(3 * time + 2);
    }
  });
}

// The others owe the culprit rows, and wait for its.
TEST_F(LowLatencyCallsOnGpu, ACombineThatOneRankGivesUpIsAbortedForItsOrigins) {
  for (const bool late : {false, true}) {
    run_on_devices(shape_, LowLatencyConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
      WorldSpec spec{.params = params_of(shape_), .num_ranks = kRanks, .with_weights = !late, .seed = 4};
      spec.num_tokens.assign(kRanks, 12);  // with 8 of 64 experts each, to every rank
      const World world = support::make_world(spec);
      const RoundPlan plan = rounds.through_device({});
      DispatchResult result;
      for (int time = 0; time < 3; ++time) {
        dispatch_and_check(communication, world, plan, result);
        support::Tensor rows(Dtype::kBf16, {support::num_flat_rows(result.hidden_states), shape_.hidden_size});
        support::Tensor weights(Dtype::kF32, {12, shape_.top_k});
        support::Tensor output(Dtype::kBf16, {12, shape_.hidden_size});
        TensorView view = output.view();
        CombineInput input{.expert_output = rows.view()};
        if (late) input.topk_weights = weights.view();
        if (communication.rank() == 1) {
          input.expert_output = {};
          check_throws(ErrorCode::kInvalidArgument, {"expert_output"},
                       [&] { (void)rounds.combine(communication, result.handle, input, {}, view); });
        } else {
          check_fault(rounds.combine(communication, result.handle, input, {}, view), StatusCode::kAborted, 1,
                      Phase::kCombine);
        }
        play_round(communication, world, plan, result);
      }
    });
  }
}

}  // namespace
}  // namespace tokenyard::gpu_tests
