// SPDX-License-Identifier: Apache-2.0
// `two_sided` on GPUs, when ranks differ, give up or stay away while queues are full: who is told, and that the rounds
// after it work.
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "gpu/two_sided_rounds.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using support::World;
using support::WorldSpec;

class TwoSidedFaultsOnGpu : public testing::Test {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(shape_); }

  const Shape shape_ = kQueuedShape;
};

TEST_F(TwoSidedFaultsOnGpu, RanksThatDifferInTheRowsOfABlockAllHearOfIt) {
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
TEST_F(TwoSidedFaultsOnGpu, ARankThatGivesUpTellsItsPeers) {
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

// The same of a combine, for those that it owes rows.
TEST_F(TwoSidedFaultsOnGpu, ARankThatGivesUpACombineTellsItsPeers) {
  run_on_devices(shape_, TwoSidedConfig{.queue_bytes_per_peer = least_queue_bytes(shape_)}, {},
                 [&](Communication& communication, DeviceRounds& rounds) {
                   DispatchResult result;
                   WorldSpec spec = world_of(shape_, 0).spec;
                   spec.num_tokens = {70, 70, 70};  // so many that each rank owes each some
                   const World world = support::make_world(spec);
                   const int rank = communication.rank();
                   for (int wrong = 0; wrong < shape_.num_ranks; ++wrong) {
                     dispatch_and_check(communication, world, rounds.through_device({}), result);
                     support::Tensor output(Dtype::kBf16, {70, shape_.hidden_size});
                     TensorView view = output.view();
                     CombineInput input;
                     input.expert_output = result.hidden_states;
                     if (rank == wrong) {
                       --input.expert_output.shape[2];
                       support::check_throws(ErrorCode::kInvalidArgument, {"expert_output"}, [&] {
                         (void)rounds.combine(communication, result.handle, input, {}, view);
                       });
                     } else {
                       support::check_fault(rounds.combine(communication, result.handle, input, {}, view),
                                            StatusCode::kAborted, wrong, Phase::kCombine);
                     }
                     play_round(communication, world, rounds.through_device(plan_of(shape_, wrong)), result);
                   }
                 });
}

// A dispatch that comes between the halves of another is refused, and the peers hear nothing of it.
TEST_F(TwoSidedFaultsOnGpu, AnOperationRefusedBetweenHalvesHoldsUpNobody) {
  run_on_devices(shape_, TwoSidedConfig{.queue_bytes_per_peer = least_queue_bytes(shape_)}, {},
                 [&](Communication& communication, DeviceRounds& rounds) {
                   const World world = world_of(shape_, 0);
                   const support::RankTensors tensors(world, communication.rank(), false);
                   DispatchOptions options;
                   options.stream.native = rounds.stream();
                   for (int wrong = 0; wrong < shape_.num_ranks; ++wrong) {
                     DispatchInput input;
                     input.hidden_states = rounds.to_device(tensors.input().hidden_states);
                     input.topk_ids = rounds.to_device(tensors.input().topk_ids);
                     DispatchResult open;
                     DispatchResult refused;
                     auto* split = communication.get<SplitPhases>();
                     support::check(split->dispatch_send(input, options, open).ok(), "dispatch_send");
                     if (communication.rank() == wrong) {
                       support::check_throws(ErrorCode::kInvalidState, {"in flight"},
                                             [&] { (void)communication.dispatch(input, options, refused); });
                     }
                     support::check(split->dispatch_receive(options, open).ok(), "dispatch_receive");
                     rounds.synchronize();
                     support::check_ok(communication.poll(), "poll");
                     open.handle = Handle();
                     play_round(communication, world, rounds.through_device(plan_of(shape_, wrong)), refused);
                   }
                 });
}

// One handle dies between the halves of its dispatch, whose queues are full; the next round works.
TEST_F(TwoSidedFaultsOnGpu, PeersOfAHandleThatDiesDropItsRows) {
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

// Ranks that wait for one that does not come say so by the deadline, and work again after a reset.
TEST_F(TwoSidedFaultsOnGpu, ARankThatStaysAwayIsNamed) {
  for (const std::int64_t queue_bytes : {std::int64_t{0}, least_queue_bytes(shape_)}) {
    support::run_ranks(shape_.num_ranks, [&](const Group& group) {
      DeviceRounds rounds({});
      CommunicationOptions options = cuda_options(0);
      options.deadline = patient(std::chrono::milliseconds(400));
      Communication communication =
          create_communication(group, params_of(shape_), TwoSidedConfig{.queue_bytes_per_peer = queue_bytes}, options);
      const World world = world_of(shape_, 0);
      const support::RankTensors tensors(world, group.rank(), false);
      DispatchResult result;
      for (int round = 0; round < 2; ++round) {
        play_round(communication, world, rounds.through_device(plan_of(shape_, round)), result);
        if (group.rank() != 1) {
          support::check_fault(rounds.dispatch(communication, tensors.input(), {}, result), StatusCode::kTimeout, 1,
                               Phase::kDispatch);
        }
        support::check_ok(communication.reset(), "reset");
      }
      play_round(communication, world, rounds.through_device(plan_of(shape_, 2)), result);
      support::check_ok(communication.destroy(), "destroy");
    });
  }
}

}  // namespace
}  // namespace tokenyard::gpu_tests
