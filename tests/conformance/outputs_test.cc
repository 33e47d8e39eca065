// SPDX-License-Identifier: Apache-2.0
// Where a dispatch's output may live: caller's tensors, also too small ones, and the allocator's memory.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "conformance/small_spec.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

constexpr int kRanks = 3;

class Outputs : public ::testing::TestWithParam<std::string_view> {};

// Too few rows: the rows wait in the window, needed_rows says how many, and the receive half may be repeated.
TEST_P(Outputs, OverflowKeepsTheRowsForASecondReceive) {
  const WorldSpec spec = all_to_all_spec(kRanks, 4);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    auto* halves = communication.get<SplitPhases>();
    check(halves != nullptr, "no SplitPhases");
    DispatchResult result;
    for (int round = 0; round < 3; ++round) {
      const RankTensors tensors(world, group.rank(), false);
      const ExpectedDispatch expected = expect_dispatch(world, group.rank(), layout_rule(communication, {}));
      Tensor few(Dtype::kBf16, {expected.total_rows - 1, 24});
      Tensor enough(Dtype::kBf16, {expected.total_rows, 24});
      DispatchResult small;
      small.hidden_states = few.view();
      DispatchResult large;
      large.hidden_states = enough.view();
      check_ok(halves->dispatch_send(tensors.input(), {.into = &small}, result), "dispatch_send");
      const Status status = halves->dispatch_receive({.into = &small}, result);
      check(status.code == StatusCode::kOverflow, "expected overflow, got: " + status.message());
      check_eq(status.needed_rows, expected.total_rows, "needed_rows");
      few.check_guards("the tensor that was too small");
      check_ok(halves->dispatch_receive({.into = &large}, result), "second dispatch_receive");
      check_result(communication, world, {}, result);
      check_eq(result.hidden_states.data, enough.view().data, "address of the caller's rows");
      enough.check_guards("the tensor that was large enough");
      combine_and_check(communication, world, {}, result, result.handle);
    }
  }));
}

// The blocking call reports the overflow too, and the communication goes on.
TEST_P(Outputs, BlockingOverflowIsAStatus) {
  const WorldSpec spec = all_to_all_spec(kRanks, 4);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    {
      const RankTensors tensors(world, group.rank(), false);
      Tensor few(Dtype::kBf16, {2, 24});
      DispatchResult small;
      small.hidden_states = few.view();
      const Status status = communication.dispatch(tensors.input(), {.into = &small}, result);
      check(status.code == StatusCode::kOverflow, "expected overflow, got: " + status.message());
      check_eq(status.needed_rows, 18, "needed_rows");
      few.check_guards("the tensor that was too small");
      result.handle = Handle();
    }
    play_round(communication, world, {}, result);
  }));
}

// Rows that are not looked at are combined all the same: the result of an overflow stays as it was, here that of an
// equal round.
TEST_P(Outputs, OverflowedHandleCombines) {
  const WorldSpec spec = all_to_all_spec(kRanks, 4);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    play_round(communication, world, {}, result);
    const RankTensors tensors(world, group.rank(), false);
    Tensor few(Dtype::kBf16, {2, 24});
    DispatchResult small;
    small.hidden_states = few.view();
    const Status status = communication.dispatch(tensors.input(), {.into = &small}, result);
    check(status.code == StatusCode::kOverflow, "expected overflow, got: " + status.message());
    combine_and_check(communication, world, {}, result, result.handle);
    play_round(communication, world, {}, result);
  }));
}

// Memory that the hook cannot give now is asked for again, and the rows are still there.
TEST_P(Outputs, RefusedMemoryKeepsTheRows) {
  const WorldSpec spec = all_to_all_spec(kRanks, 4);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    std::vector<std::unique_ptr<std::byte[]>> blocks;
    bool refuses = false;
    CommunicationOptions options = test_options();
    options.allocate_output = [&](std::int64_t bytes, Device /*device*/) -> void* {
      if (refuses) return nullptr;
      blocks.push_back(std::make_unique<std::byte[]>(static_cast<std::size_t>(bytes)));
      return blocks.back().get();
    };
    Communication communication = communication_for(group, GetParam(), spec, options);
    DispatchResult result;
    for (int round = 0; round < 3; ++round) {
      const RankTensors tensors(world, group.rank(), false);
      refuses = true;
      check_throws(ErrorCode::kSystem, {"allocate_output"},
                   [&] { (void)communication.dispatch(tensors.input(), {}, result); });
      refuses = false;
      check_ok(communication.get<SplitPhases>()->dispatch_receive({}, result), "second dispatch_receive");
      check_result(communication, world, {}, result);
      combine_and_check(communication, world, {}, result, result.handle);
    }
  }));
}

// Memory of the hook is owned by the caller: rows stay readable after combine and after destroy.
TEST_P(Outputs, AllocatedOutputsOutliveTheRound) {
  const WorldSpec spec = small_spec(kRanks, 5);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    std::vector<std::unique_ptr<std::byte[]>> blocks;
    CommunicationOptions options = test_options();
    options.allocate_output = [&](std::int64_t bytes, Device device) -> void* {
      check(bytes > 0 && device.kind == DeviceKind::kCpu, "odd arguments for the allocator");
      blocks.push_back(std::make_unique<std::byte[]>(static_cast<std::size_t>(bytes)));
      return blocks.back().get();
    };
    Communication communication = communication_for(group, GetParam(), spec, options);
    DispatchResult result;
    play_round(communication, world, {}, result);
    check(!blocks.empty() || result.counts.num_rows == 0, "the allocator was not asked");
    DispatchResult other;
    play_round(communication, make_world(with_seed(spec, 6)), {}, other);
    check_result(communication, world, {}, result, result.topk_ids.defined());
    check_ok(communication.destroy(), "destroy");
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         Outputs,
                         ::testing::Values("all_gather", "high_throughput"),
                         [](const auto& backend) { return std::string(backend.param); });

class EveryOutput : public ::testing::TestWithParam<std::string_view> {};

// The two halves of both phases give what the whole calls give, also with work between them.
TEST_P(EveryOutput, SplitHalvesEqualWholeCalls) {
  const WorldSpec spec = small_spec(kRanks, 9);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    auto* halves = communication.get<SplitPhases>();
    check(halves != nullptr, "no SplitPhases");
    DispatchResult result;
    for (std::uint64_t round = 0; round < 5; ++round) {
      const World world = make_world(with_seed(spec, 60 + round));
      {
        RankTensors tensors(world, group.rank(), false);
        check_ok(halves->dispatch_send(tensors.input(), {}, result), "dispatch_send");
      }  // the input may be reused: here it is gone
      check_ok(halves->dispatch_receive({}, result), "dispatch_receive");
      check_result(communication, world, {}, result);
      combine_and_check(communication, world, {.seed = round}, result, result.handle);
    }
  }));
}

// A receive half that is given a tensor of the wrong kind may be repeated without it.
TEST_P(EveryOutput, RefusedTensorKeepsTheRows) {
  const WorldSpec spec = small_spec(kRanks, 9);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    auto* halves = communication.get<SplitPhases>();
    DispatchResult result;
    for (int round = 0; round < 3; ++round) {
      const RankTensors tensors(world, group.rank(), false);
      Tensor wrong(Dtype::kI32, {1, 1});
      DispatchResult into;
      into.hidden_states = wrong.view();
      check_ok(halves->dispatch_send(tensors.input(), {}, result), "dispatch_send");
      check_throws(ErrorCode::kInvalidArgument, {"into->hidden_states", "i32[1, 1]"},
                   [&] { (void)halves->dispatch_receive({.into = &into}, result); });
      wrong.check_guards("the tensor that was refused");
      check_ok(halves->dispatch_receive({}, result), "second dispatch_receive");
      check_result(communication, world, {}, result);
      combine_and_check(communication, world, {}, result, result.handle);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, EveryOutput, ::testing::ValuesIn(kMovingBackends), [](const auto& backend) {
  return std::string(backend.param);
});

}  // namespace
}  // namespace tokenyard::support
