// SPDX-License-Identifier: Apache-2.0
// A rank that never calls: every other rank gets kTimeout that names it and no healthy one within two deadlines and
// half a second, the fault is sticky, and after the collective reset a normal round works.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "conformance/small_spec.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 8;
constexpr int kAbsent = 3;
constexpr milliseconds kDeadline{300};
constexpr milliseconds kLimit = 2 * kDeadline + milliseconds(500);

CommunicationOptions impatient() {
  CommunicationOptions options = test_options();
  options.deadline = kDeadline;
  return options;
}

// Until the fault everybody has played one good round, so the first-round deadline is over.
void reset_and_play(Communication& communication, const Group& group, const World& world, DispatchResult& result) {
  group.barrier();
  check_ok(communication.reset(), "reset");
  check_ok(communication.poll(), "poll after reset");
  for (int round = 0; round < 3; ++round)
    play_round(communication, world, {}, result);
}

class AbsentRank : public ::testing::TestWithParam<std::string_view> {};

TEST_P(AbsentRank, InDispatchIsNamed) {
  const WorldSpec spec = all_to_all_spec(kRanks, 2);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec, impatient());
    DispatchResult result;
    play_round(communication, world, {}, result);
    group.barrier();
    if (group.rank() != kAbsent) {
      const RankTensors tensors(world, group.rank(), false);
      const Stopwatch stopwatch;
      const Status status = communication.dispatch(tensors.input(), {}, result);
      stopwatch.check_below(kLimit, "dispatch without rank 3");
      check_fault(status, StatusCode::kTimeout, kAbsent, Phase::kDispatch);
      check_eq(status.fault.rank, group.rank(), "the rank that reports");
      check(status.fault.waited >= kDeadline / 2, "waited says less than half of the deadline");
      check_fault(communication.poll(), StatusCode::kTimeout, kAbsent, Phase::kDispatch);
      const Stopwatch again;
      check_fault(communication.dispatch(tensors.input(), {}, result), StatusCode::kTimeout, kAbsent, Phase::kDispatch);
      again.check_below(milliseconds(200), "a call after a sticky fault");
    }
    reset_and_play(communication, group, world, result);
  }));
}

TEST_P(AbsentRank, InCombineIsNamed) {
  const WorldSpec spec = all_to_all_spec(kRanks, 3);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec, impatient());
    DispatchResult result;
    play_round(communication, world, {}, result);
    dispatch_and_check(communication, world, {}, result);
    group.barrier();
    if (group.rank() != kAbsent) {
      Tensor rows(Dtype::kBf16, {kRanks * 6, 24});
      Tensor output(Dtype::kBf16, {6, 24});
      TensorView view = output.view();
      const Stopwatch stopwatch;
      const Status status = communication.combine(result.handle, {.expert_output = rows.view()}, {}, view);
      stopwatch.check_below(kLimit, "combine without rank 3");
      check_fault(status, StatusCode::kTimeout, kAbsent, Phase::kCombine);
      check_fault(communication.poll(), StatusCode::kTimeout, kAbsent, Phase::kCombine);
    }
    reset_and_play(communication, group, world, result);
  }));
}

// A rank that is late by less than the deadline is no fault, round after round.
TEST_P(AbsentRank, LateIsNotAbsent) {
  const WorldSpec spec = all_to_all_spec(4, 4);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec, impatient());
    DispatchResult result;
    for (int round = 0; round < 4; ++round) {
      if (group.rank() == round) std::this_thread::sleep_for(kDeadline / 2);
      play_round(communication, world, {}, result);
    }
    const PeerStatistics statistics = communication.statistics();
    check_eq(statistics.num_dispatches, 4, "num_dispatches");
    check_eq(statistics.num_combines, 4, "num_combines");
    check_eq(statistics.waited.size(), 4U, "peers in the statistics");
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, AbsentRank, ::testing::ValuesIn(kMovingBackends), [](const auto& backend) {
  return std::string(backend.param);
});

}  // namespace
}  // namespace tokenyard::support
