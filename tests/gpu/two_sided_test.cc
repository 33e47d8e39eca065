// SPDX-License-Identifier: Apache-2.0
// `two_sided` on GPUs: every round against the plain reference, byte for byte, as the host engine is checked; through
// queues of the default size, and through such that hold two rows and wrap in every round.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "gpu/device_ranks.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using support::RoundPlan;
using support::Skew;
using support::World;
using support::WorldSpec;

// Found by asking: the least that is not refused.
std::int64_t least_queue_bytes(const Shape& shape) {
  const auto refused = [&shape](std::int64_t bytes) {
    try {
      (void)window_bytes(params_of(shape), TwoSidedConfig{.queue_bytes_per_peer = bytes}, shape.num_ranks);
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  std::int64_t too_small = 1;
  std::int64_t enough = std::int64_t{1} << 30;
  while (enough - too_small > 1) {
    const std::int64_t middle = too_small + (enough - too_small) / 2;
    (refused(middle) ? too_small : enough) = middle;
  }
  return enough;
}

World world_of(const Shape& shape, int round) {
  return support::make_world({.params = params_of(shape),
                              .num_ranks = shape.num_ranks,
                              .skew = static_cast<Skew>(round % support::kNumSkews),
                              .id_dtype = round % 2 == 1 ? Dtype::kI64 : Dtype::kI32,
                              .with_weights = round % 5 != 4,
                              .eplb_entries = shape.num_experts,
                              .seed = static_cast<std::uint64_t>(round) + 11});
}

RoundPlan plan_of(const Shape& shape, int round) {
  return {.seed = static_cast<std::uint64_t>(round) + 5,
          .expert_dtype = shape.dtype,
          .output_dtype = round % 2 == 1 ? Dtype::kF32 : shape.dtype,
          .strided = round % 3 == 1,
          .caller_tensors = round % 4 == 2,
          .flat_expert_output = round % 5 == 3};
}

void play(const Shape& shape, const TwoSidedConfig& config, const DeviceRounds::Options& options, int num_rounds) {
  run_on_devices(shape, config, options, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < num_rounds; ++round)
      play_round(communication, world_of(shape, round), rounds.through_device(plan_of(shape, round)), result);
  });
}

// The reference takes long for many tokens.
int num_rounds_of(const Shape& shape) {
  return shape.max_tokens > 500 ? 3 : 2 * support::kNumSkews;
}

// For communications that the body makes itself, on device 0.
void run_on_device(int num_ranks, const std::function<void(const Group&, DeviceRounds&)>& body) {
  support::run(support::RankKind::kThreads, num_ranks, [&](const Group& group) {
    DeviceRounds rounds({.device = 0});
    body(group, rounds);
  });
}

class TwoSidedOnGpu : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam()); }
};

TEST_P(TwoSidedOnGpu, RoundsEqualTheReference) {
  play(GetParam(), {}, {}, num_rounds_of(GetParam()));
}

TEST_P(TwoSidedOnGpu, QueuesOfTwoRowsAreEnough) {
  play(GetParam(), {.queue_bytes_per_peer = least_queue_bytes(GetParam())}, {}, num_rounds_of(GetParam()));
}

TEST_P(TwoSidedOnGpu, AnyNumberOfMultiprocessorsGivesTheSameBytes) {
  for (const int num_sms : {1, 3})
    play(GetParam(), {}, {.num_sms = num_sms}, 2);
  play(GetParam(), {.queue_bytes_per_peer = least_queue_bytes(GetParam())}, {.num_sms = 1}, 2);
}

// With what was sent overwritten between the halves.
TEST_P(TwoSidedOnGpu, HalvesGiveTheSameBytes) {
  play(GetParam(), {}, {.halves = true}, 4);
  play(GetParam(), {.queue_bytes_per_peer = least_queue_bytes(GetParam())}, {.halves = true, .num_sms = 2}, 4);
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
    for (const int top_k : {1, 2, 9})
      all.push_back({.num_ranks = 3, .hidden_size = 64, .top_k = top_k, .num_experts = 28, .spread = spread});
    for (const Dtype dtype : {Dtype::kF16, Dtype::kF32})
      all.push_back({.hidden_size = 520, .dtype = dtype, .spread = spread});
    all.push_back({.num_ranks = 4, .hidden_size = 256, .max_tokens = 1100, .spread = spread});
    for (const int num_ranks : {2, 4})
      all.push_back(
          {.num_ranks = num_ranks, .hidden_size = 512, .spread = spread, .kind = support::RankKind::kProcesses});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, TwoSidedOnGpu, testing::ValuesIn(shapes()), title);

class TwoSidedRoundsOnGpu : public testing::Test {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(shape_); }

  const Shape shape_{.num_ranks = 3, .hidden_size = 256, .top_k = 4, .num_experts = 24, .max_tokens = 70};
};

TEST_F(TwoSidedRoundsOnGpu, QuantisedRowsTravelWithTheirScales) {
  for (const DispatchFormat format :
       {DispatchFormat::kFp8PerTensor, DispatchFormat::kFp8Block128, DispatchFormat::kMxfp8, DispatchFormat::kNvfp4}) {
    run_on_device(shape_.num_ranks, [&](const Group& group, DeviceRounds& rounds) {
      WorldSpec spec = world_of(shape_, 1).spec;
      spec.params.dispatch_format = format;
      Communication communication = create_communication(group, spec.params, TwoSidedConfig{}, cuda_options(0));
      DispatchResult result;
      for (const bool caller : {false, true}) {
        play_round(communication, support::make_world(spec),
                   rounds.through_device({.seed = 3, .caller_tensors = caller}), result);
      }
      support::check_ok(communication.destroy(), "destroy");
    });
  }
}

// Expert output of another dtype is rounded once to that of the params, this rank's own too.
TEST_F(TwoSidedRoundsOnGpu, ExpertOutputIsCastToTheParamsDtype) {
  for (const bool halves : {false, true}) {
    run_on_devices(shape_, TwoSidedConfig{}, {.halves = halves},
                   [&](Communication& communication, DeviceRounds& rounds) {
                     DispatchResult result;
                     for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
                       play_round(communication, world_of(shape_, 0),
                                  rounds.through_device({.seed = 8, .expert_dtype = dtype}), result);
                     }
                   });
  }
}

TEST_F(TwoSidedRoundsOnGpu, RuntimeMaxTokensSetTheRowsOfABlock) {
  run_on_devices(shape_, TwoSidedConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (const std::int64_t tokens : {70, 33, 0, 1, 65, 8}) {
      WorldSpec spec = world_of(shape_, 0).spec;
      spec.num_tokens = {tokens, tokens / 2, 0};
      RoundPlan plan{.seed = 4, .caller_tensors = tokens == 33};
      plan.runtime_max_tokens = tokens;
      play_round(communication, support::make_world(spec), rounds.through_device(plan), result);
    }
  });
}

TEST_F(TwoSidedRoundsOnGpu, RanksThatDifferInTheRowsOfABlockAllHearOfIt) {
  run_on_devices(shape_, TwoSidedConfig{.queue_bytes_per_peer = least_queue_bytes(shape_)}, {},
                 [&](Communication& communication, DeviceRounds& rounds) {
                   DispatchResult result;
                   const World world = world_of(shape_, 0);
                   const int rank = communication.rank();
                   for (int odd = 0; odd < shape_.num_ranks; ++odd) {
                     DispatchOptions options;
                     options.runtime_max_tokens_per_rank = rank == odd ? 70 : 68;
                     WorldSpec spec = world.spec;
                     spec.num_tokens = {68, 68, 68};
                     const support::RankTensors sent(support::make_world(spec), rank, false);
                     support::check_throws(ErrorCode::kMismatch, {"rank"}, [&] {
                       (void)rounds.dispatch(communication, sent.input(), options, result);
                     });
                     result.handle = Handle();
                     play_round(communication, world, rounds.through_device(plan_of(shape_, odd)), result);
                   }
                 });
}

// A rank whose arguments make no sense throws, its peers are told, and the next round works.
TEST_F(TwoSidedRoundsOnGpu, ARankThatGivesUpTellsItsPeers) {
  run_on_devices(shape_, TwoSidedConfig{.queue_bytes_per_peer = least_queue_bytes(shape_)}, {},
                 [&](Communication& communication, DeviceRounds& rounds) {
                   DispatchResult result;
                   const World world = world_of(shape_, 0);
                   const int rank = communication.rank();
                   for (int wrong = 0; wrong < shape_.num_ranks; ++wrong) {
                     const support::RankTensors tensors(world, rank, false);
                     DispatchInput input = tensors.input();
                     if (rank == wrong) {
                       std::vector<std::int32_t> statistics(3, 1);
                       input.eplb_local_stats = {statistics.data(), Dtype::kI32, {3}};
                       support::check_throws(ErrorCode::kInvalidArgument, {"eplb_local_stats"},
                                             [&] { (void)rounds.dispatch(communication, input, {}, result); });
                     } else {
                       support::check_fault(rounds.dispatch(communication, input, {}, result), StatusCode::kAborted,
                                            wrong, Phase::kDispatch);
                     }
                     result.handle = Handle();
                     play_round(communication, world, rounds.through_device(plan_of(shape_, wrong)), result);
                   }
                 });
}

// One handle dies between the halves of its dispatch, whose queues are full; the next round works.
TEST_F(TwoSidedRoundsOnGpu, PeersOfAHandleThatDiesDropItsRows) {
  run_on_devices(shape_, TwoSidedConfig{.queue_bytes_per_peer = least_queue_bytes(shape_)}, {},
                 [&](Communication& communication, DeviceRounds& rounds) {
                   const World world = world_of(shape_, 0);
                   const support::RankTensors tensors(world, communication.rank(), false);
                   DispatchOptions options;
                   options.stream.native = rounds.stream();
                   DispatchResult result;
                   for (int dead = 0; dead < shape_.num_ranks; ++dead) {
                     DispatchInput input;
                     input.hidden_states = rounds.to_device(tensors.input().hidden_states);
                     input.topk_ids = rounds.to_device(tensors.input().topk_ids);
                     auto* split = communication.get<SplitPhases>();
                     support::check(split->dispatch_send(input, options, result).ok(), "dispatch_send");
                     if (communication.rank() != dead)
                       support::check(split->dispatch_receive(options, result).ok(), "dispatch_receive");
                     result.handle = Handle();
                     play_round(communication, world, rounds.through_device(plan_of(shape_, dead)), result);
                   }
                 });
}

// Here each communication has queues of its own, so nobody takes turns.
TEST_F(TwoSidedRoundsOnGpu, CommunicationsOfOneGroupAreIndependent) {
  run_on_device(shape_.num_ranks, [&](const Group& group, DeviceRounds& rounds) {
    const auto make = [&] { return create_communication(group, params_of(shape_), TwoSidedConfig{}, cuda_options(0)); };
    Communication first = make();
    Communication second = make();
    support::check(!first.contract().takes_turns, "takes_turns");
    const World world = world_of(shape_, 0);
    const support::RankTensors tensors(world, group.rank(), false);
    DispatchOptions options;
    options.stream.native = rounds.stream();
    DispatchInput input;
    input.hidden_states = rounds.to_device(tensors.input().hidden_states);
    input.topk_ids = rounds.to_device(tensors.input().topk_ids);
    DispatchResult open;
    support::check(first.get<SplitPhases>()->dispatch_send(input, options, open).ok(), "dispatch_send");
    DispatchResult result;
    play_round(second, world, rounds.through_device(plan_of(shape_, 3)), result);
    support::check(first.get<SplitPhases>()->dispatch_receive(options, open).ok(), "dispatch_receive");
    rounds.synchronize();
    open.handle = Handle();
    play_round(first, world, rounds.through_device(plan_of(shape_, 4)), result);
    support::check_ok(second.destroy(), "destroy");
    support::check_ok(first.destroy(), "destroy");
  });
}

}  // namespace
}  // namespace tokenyard::gpu_tests
