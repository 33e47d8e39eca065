// SPDX-License-Identifier: Apache-2.0
// `high_throughput` on GPUs beside plain rounds: handles that replay and combine again, tensors that are too small,
// calls that ranks give up or do not agree in.
#include <gtest/gtest.h>

#include "gpu/device_ranks.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using support::check;
using support::check_eq;
using support::check_ok;
using support::RankTensors;
using support::RoundPlan;
using support::Tensor;
using support::World;

constexpr Shape kShape{.num_ranks = 3, .hidden_size = 128, .top_k = 4, .num_experts = 10};

World world_of(const Shape& shape, std::uint64_t seed) {
  return support::make_world({.params = params_of(shape), .num_ranks = shape.num_ranks, .seed = seed});
}

TEST(HighThroughputCallsOnGpu, HandlesReplayTheirRoutes) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const World world = world_of(kShape, 3);
    RoundPlan plan = rounds.through_device({.weights_back = true, .num_biases = 1});
    DispatchResult first;
    play_round(communication, world, plan, first);
    DispatchResult other;
    for (std::uint64_t round = 0; round < 4; ++round) {
      play_round(communication, world_of(kShape, 90 + round), plan, other);
      const World changed = support::with_new_rows(world, 50 + round);
      const RankTensors tensors(changed, communication.rank(), round % 2 == 1);
      DispatchResult again;
      DispatchOptions options{.replay = &first.handle};
      RoundPlan replay = plan;
      replay.seed = 70 + round;
      if (round % 2 == 1) options.num_worst_tokens = replay.num_worst_tokens = kShape.num_ranks * kShape.max_tokens;
      check_ok(rounds.dispatch(communication, tensors.input(false), options, again), "replay");
      support::check_result(communication, changed, replay, again, false);
      support::combine_and_check(communication, changed, replay, again, again.handle);
    }
  });
}

TEST(HighThroughputCallsOnGpu, AHandleCombinesAgain) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  for (const bool zero_copy : {false, true}) {
    run_on_devices(kShape, HighThroughputConfig{}, {.zero_copy = zero_copy},
                   [&](Communication& communication, DeviceRounds& rounds) {
                     const World world = world_of(kShape, 4);
                     RoundPlan plan = rounds.through_device({.weights_back = true});
                     DispatchResult result;
                     for (int round = 0; round < 2; ++round) {
                       dispatch_and_check(communication, world, plan, result);
                       for (std::uint64_t seed = 1; seed < 5; ++seed) {
                         plan.seed = seed;
                         combine_and_check(communication, world, plan, result, result.handle);
                       }
                     }
                   });
  }
}

TEST(HighThroughputCallsOnGpu, OverflowKeepsTheRowsForASecondReceive) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const RoundPlan plan = rounds.through_device({});
    DispatchResult result;
    for (std::uint64_t round = 0; round < 3; ++round) {
      const World world = world_of(kShape, 30 + round);
      const RankTensors tensors(world, communication.rank(), false);
      const auto expected = expect_dispatch(world, communication.rank(), support::layout_rule(communication, plan));
      check(expected.total_rows > 1, "too few rows for this test");
      Tensor few(Dtype::kBf16, {expected.total_rows - 1, kShape.hidden_size});
      Tensor enough(Dtype::kBf16, {expected.total_rows + 2, kShape.hidden_size});
      DispatchResult small;
      small.hidden_states = few.view();
      DispatchResult large;
      large.hidden_states = enough.view();
      const Status status = rounds.dispatch(communication, tensors.input(), {.into = &small}, result);
      check(status.code == StatusCode::kOverflow, "expected overflow, got: " + status.message());
      check_eq(status.needed_rows, expected.total_rows, "needed_rows");
      check_ok(rounds.receive(communication, {.into = &large}, result), "second dispatch_receive");
      support::check_result(communication, world, plan, result);
      check_eq(result.hidden_states.data, enough.view().data, "address of the caller's rows");
      enough.check_guards("the tensor that was large enough");
      support::combine_and_check(communication, world, plan, result, result.handle);
    }
  });
}

// The rank that made the mistake throws, the others hear of it, with counts on the host or not, and go on.
TEST(HighThroughputCallsOnGpu, MisuseAbortsTheRoundForAll) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const World world = world_of(kShape, 5);
    const RankTensors tensors(world, communication.rank(), false);
    const RoundPlan plan = rounds.through_device({});
    DispatchResult result;
    for (int round = 0; round < 4; ++round) {
      DispatchOptions options;
      if (round % 2 == 1) options.num_worst_tokens = kShape.num_ranks * kShape.max_tokens;
      if (communication.rank() == round % kShape.num_ranks) {
        DispatchInput wrong = tensors.input();
        wrong.hidden_states.shape[1] -= 1;
        support::check_throws(ErrorCode::kInvalidArgument, {"hidden_states"},
                              [&] { (void)rounds.dispatch(communication, wrong, options, result); });
      } else {
        const Status status = rounds.dispatch(communication, tensors.input(), options, result);
        check(status.code == StatusCode::kAborted, "expected aborted, got: " + status.message());
        check_eq(status.fault.peer, round % kShape.num_ranks, "who gave up");
      }
      play_round(communication, world, plan, result);
    }
  });
}

TEST(HighThroughputCallsOnGpu, DisagreementIsAnErrorOnAll) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const World world = world_of(kShape, 6);
    const RankTensors tensors(world, communication.rank(), false);
    const RoundPlan plan = rounds.through_device({});
    DispatchResult result;
    for (int round = 0; round < 2; ++round) {
      DispatchOptions options;
      if (round == 1) options.num_worst_tokens = kShape.num_ranks * kShape.max_tokens;
      DispatchInput input = tensors.input();
      if (communication.rank() == 1) input.topk_weights = {};
      support::check_throws(ErrorCode::kMismatch, {"rank"},
                            [&] { (void)rounds.dispatch(communication, input, options, result); });
      play_round(communication, world, plan, result);
    }
  });
}

TEST(HighThroughputCallsOnGpu, AWrongCombineEndsTheRoundForAll) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const World world = world_of(kShape, 7);
    const RoundPlan plan = rounds.through_device({});
    DispatchResult result;
    for (int round = 0; round < 2; ++round) {
      dispatch_and_check(communication, world, plan, result);
      const std::int64_t rows = result.counts.num_rows + (communication.rank() == 2 ? 1 : 0);
      const Tensor expert_output(Dtype::kBf16, {rows, kShape.hidden_size});
      Tensor sums(Dtype::kBf16, {world.rank(communication.rank()).num_tokens, kShape.hidden_size});
      TensorView output = sums.view();
      const auto combine = [&] {
        return rounds.combine(communication, result.handle, {.expert_output = expert_output.view()}, {}, output);
      };
      if (communication.rank() == 2) {
        support::check_throws(ErrorCode::kInvalidArgument, {"expert_output"}, [&] { (void)combine(); });
      } else {
        const Status status = combine();
        check(status.code == StatusCode::kAborted, "expected aborted, got: " + status.message());
      }
      play_round(communication, world, plan, result);
    }
  });
}

TEST(HighThroughputCallsOnGpu, ByteBudgetsAreRefused) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  support::run_ranks(1, [](const Group& group) {
    support::check_throws(ErrorCode::kUnsupported, {"buffer_bytes"}, [&] {
      (void)create_communication(group, params_of({.num_ranks = 1}), HighThroughputConfig{.buffer_bytes = 64 << 20},
                                 cuda_options(0));
    });
  });
}

}  // namespace
}  // namespace tokenyard::gpu_tests
