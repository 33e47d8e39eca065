// SPDX-License-Identifier: Apache-2.0
// Communications that share queues and get in each other's way: every conflict is an error or a fault that says what is
// wrong, no row is ever taken for another's, and after the resets all work on.
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "conformance/queue_pair.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = kQueueRanks;
constexpr milliseconds kDeadline{300};
constexpr milliseconds kLimit = 2 * kDeadline + milliseconds(500);

CommunicationOptions impatient() {
  CommunicationOptions options = test_options();
  options.deadline = kDeadline;
  return options;
}

class TurnsOfQueues : public ::testing::TestWithParam<RankKind> {};

TEST_P(TurnsOfQueues, AHalfThatIsNotReceivedHoldsOthersUp) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    QueuePair pair(group);
    pair.play_both();
    dispatch_and_check(pair.other, pair.other_world, {}, pair.other_result);
    check_ok(pair.one.get<SplitPhases>()->dispatch_send(pair.tensors.input(), {}, pair.result), "dispatch_send");
    const std::vector<std::string> open{"communication 1", "hidden_size 24", "dispatch", "not received"};
    std::vector<std::string> named = open;
    named.insert(named.end(), {"next combine of communication 2", "hidden_size 40"});
    CombineTensors tensors(40);
    check_throws(ErrorCode::kInvalidState, named,
                 [&] { (void)pair.other.combine(pair.other_result.handle, tensors.input(), {}, tensors.view); });
    DispatchResult refused;
    named = open;
    named.emplace_back("next dispatch of communication 2");
    check_throws(ErrorCode::kInvalidState, named,
                 [&] { (void)pair.other.dispatch(pair.other_tensors.input(), {}, refused); });
    check_ok(pair.one.get<SplitPhases>()->dispatch_receive({}, pair.result), "dispatch_receive");
    check_result(pair.one, pair.world, {}, pair.result);

    CombineTensors own(24);
    check_ok(pair.one.get<SplitPhases>()->combine_send(pair.result.handle, own.input(), {}), "combine_send");
    check_throws(ErrorCode::kInvalidState, {"communication 1", "combine that is sent and not received"},
                 [&] { (void)pair.other.dispatch(pair.other_tensors.input(), {}, refused); });
    check_ok(pair.one.get<SplitPhases>()->combine_receive(pair.result.handle, own.view), "combine_receive");
    check_ok(pair.one.poll(), "poll");
    check_ok(pair.other.poll(), "poll of the other");
    pair.play_both();
  }));
}

// The ranks that did nothing wrong are told, and all go on.
TEST_P(TurnsOfQueues, OneRanksConflictIsTold) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    QueuePair pair(group);
    pair.play_both();
    auto* split = pair.one.get<SplitPhases>();
    for (int culprit = 0; culprit < kRanks; ++culprit) {
      check_ok(split->dispatch_send(pair.tensors.input(), {}, pair.result), "dispatch_send");
      if (group.rank() == culprit) {
        check_throws(ErrorCode::kInvalidState, {"communication 1"},
                     [&] { (void)pair.other.dispatch(pair.other_tensors.input(), {}, pair.other_result); });
        check_ok(split->dispatch_receive({}, pair.result), "dispatch_receive");
      } else {
        check_ok(split->dispatch_receive({}, pair.result), "dispatch_receive");
        check_fault(pair.other.dispatch(pair.other_tensors.input(), {}, pair.other_result), StatusCode::kAborted,
                    culprit, Phase::kDispatch);
      }
      check_result(pair.one, pair.world, {}, pair.result);
      combine_and_check(pair.one, pair.world, {}, pair.result, pair.result.handle);
      pair.play_both();
    }
  }));
}

// A second combine of one communication before the first is received would use its turn.
TEST_P(TurnsOfQueues, ACombineWaitsForItsOwnHalves) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    QueuePair pair(group);
    auto* split = pair.one.get<SplitPhases>();
    DispatchResult second;
    CombineTensors tensors(24);
    dispatch_and_check(pair.one, pair.world, {}, pair.result);
    check_ok(split->combine_send(pair.result.handle, tensors.input(), {}), "combine_send");
    dispatch_and_check(pair.one, pair.world, {}, second);
    group.barrier();
    check_throws(ErrorCode::kInvalidState, {"communication 1", "combine that is sent and not received"},
                 [&] { (void)split->combine_send(second.handle, tensors.input(), {}); });
    check_ok(split->combine_receive(pair.result.handle, tensors.view), "combine_receive");
    pair.play_both();
  }));
}

// A half that nobody will receive lets go of its turn: with its handle, with its communication, or with destroy.
TEST_P(TurnsOfQueues, AbandonedHalvesHoldNobodyUp) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    for (int way = 0; way < 6; ++way) {
      std::optional<QueuePair> pair(group);
      Communication third = communication_for(group, "two_sided", pair->world.spec);
      auto* split = pair->one.get<SplitPhases>();
      const CombineTensors tensors(24);
      if (way % 2 == 0) {
        check_ok(split->dispatch_send(pair->tensors.input(), {}, pair->result), "dispatch_send");
      } else {
        dispatch_and_check(pair->one, pair->world, {}, pair->result);
        check_ok(split->combine_send(pair->result.handle, tensors.input(), {}), "combine_send");
      }
      if (way / 2 == 0) pair->result.handle = Handle();
      if (way / 2 == 1) check_ok(pair->one.destroy(), "destroy");
      if (way / 2 == 2) {
        group.barrier();  // a rank that is gone sends nothing
        Communication gone = std::move(pair->one);
      }
      DispatchResult result;
      play_round(pair->other, pair->other_world, {}, result);
      play_round(third, pair->world, {}, result);
      group.barrier();
    }
  }));
}

TEST_P(TurnsOfQueues, AnotherOrderOfDispatchesIsAMismatch) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    for (int stranger = 0; stranger < kRanks; ++stranger) {
      QueuePair pair(group);
      pair.play_both();
      const bool strange = group.rank() == stranger;
      const Stopwatch stopwatch;
      check_throws(ErrorCode::kMismatch,
                   {"different orders", strange ? "is in communication 2 (" : "is in communication 1 (",
                    strange ? "with communication 1 (" : "with communication 2 (", "hidden_size 40", "reset()"},
                   [&] {
                     Communication& first = strange ? pair.other : pair.one;
                     const RankTensors& tensors = strange ? pair.other_tensors : pair.tensors;
                     (void)first.dispatch(tensors.input(), {}, pair.result);
                   });
      stopwatch.check_below(milliseconds(3000), "noticing another order");
      // Whatever is called now, nothing moves until the resets.
      check(pair.one.poll().code == StatusCode::kAborted, "poll of one");
      check(pair.other.poll().code == StatusCode::kAborted, "poll of the other");
      check(pair.one.dispatch(pair.tensors.input(), {}, pair.result).code == StatusCode::kAborted, "dispatch of one");
      check(pair.other.dispatch(pair.other_tensors.input(), {}, pair.other_result).code == StatusCode::kAborted,
            "dispatch of the other");
      pair.reset_both(group);
    }
  }));
}

TEST_P(TurnsOfQueues, AnotherOrderOfCombinesIsAMismatch) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    QueuePair pair(group, impatient());
    pair.play_both();
    dispatch_and_check(pair.one, pair.world, {}, pair.result);
    dispatch_and_check(pair.other, pair.other_world, {}, pair.other_result);
    CombineTensors tensors(24);
    CombineTensors other_tensors(40);
    check_throws(ErrorCode::kMismatch, {"different orders", "communication 1 (", "communication 2 ("}, [&] {
      if (group.rank() == 1) {
        (void)pair.other.combine(pair.other_result.handle, other_tensors.input(), {}, other_tensors.view);
      } else {
        (void)pair.one.combine(pair.result.handle, tensors.input(), {}, tensors.view);
      }
    });
    check(!pair.one.poll().ok() && !pair.other.poll().ok(), "a fault that both report");
    pair.reset_both(group);
  }));
}

// Combine here, dispatch there: they use different rings, so nobody can tell before the deadline, and nobody is to
// blame alone.
TEST_P(TurnsOfQueues, PhasesInAnotherOrderEndAtTheDeadline) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    QueuePair pair(group, impatient());
    pair.play_both();
    dispatch_and_check(pair.one, pair.world, {}, pair.result);
    CombineTensors tensors(24);
    const Stopwatch stopwatch;
    const Status status = group.rank() == 0 ? pair.other.dispatch(pair.other_tensors.input(), {}, pair.other_result)
                                            : pair.one.combine(pair.result.handle, tensors.input(), {}, tensors.view);
    stopwatch.check_below(kLimit, "ranks that wait for each other");
    check(status.code == StatusCode::kAborted || status.code == StatusCode::kTimeout, status.message());
    check(!pair.one.poll().ok() && !pair.other.poll().ok(), "a fault that both report");
    pair.reset_both(group);
  }));
}

// One rank is a turn behind: it left out a round of one communication that the others played.
TEST_P(TurnsOfQueues, ASkippedRoundIsFound) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    QueuePair pair(group, impatient());
    pair.play_both();
    const bool skips = group.rank() == 2;
    // Nobody waits: the others leave their halves alone.
    if (!skips) {
      check_ok(pair.one.get<SplitPhases>()->dispatch_send(pair.tensors.input(), {}, pair.result), "dispatch_send");
      pair.result.handle = Handle();
    }
    group.barrier();
    check_throws(ErrorCode::kMismatch, {"different orders", "turn"},
                 [&] { (void)pair.other.dispatch(pair.other_tensors.input(), {}, pair.other_result); });
    pair.reset_both(group);
  }));
}

TEST_P(TurnsOfQueues, AFaultInOneIsEveryones) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    QueuePair pair(group, impatient());
    pair.play_both();
    group.barrier();
    if (group.rank() != 1) {
      const Stopwatch stopwatch;
      check_fault(pair.one.dispatch(pair.tensors.input(), {}, pair.result), StatusCode::kTimeout, 1, Phase::kDispatch);
      stopwatch.check_below(kLimit, "dispatch without rank 1");
      check_fault(pair.other.poll(), StatusCode::kTimeout, 1, Phase::kDispatch);
      const Stopwatch again;
      check_fault(pair.other.dispatch(pair.other_tensors.input(), {}, pair.other_result), StatusCode::kTimeout, 1,
                  Phase::kDispatch);
      again.check_below(milliseconds(200), "the other communication after the fault");
    }
    group.barrier();
    // Reset of one alone: the other says that it is not sound on every rank, rank 1 too, which saw nothing.
    check_ok(pair.one.reset(), "reset");
    check_ok(pair.one.poll(), "poll after the reset");
    check(!pair.other.poll().ok(), "the other reports the fault until its own reset");
    play_round(pair.one, pair.world, {}, pair.result);
    check(!pair.other.dispatch(pair.other_tensors.input(), {}, pair.other_result).ok(), "the other took part");
    check_ok(pair.other.reset(), "reset of the other");
    check_ok(pair.one.poll(), "poll after the second reset");
    for (int round = 0; round < 3; ++round)
      pair.play_both();
  }));
}

// Rank 2 waits in one communication for ranks that gave up in the other: it is told whom they blame and need not wait
// for its own clock.
TEST_P(TurnsOfQueues, AFaultIsToldToWaitersInOthers) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    CommunicationOptions options = test_options();
    options.deadline = group.rank() == 2 ? milliseconds(20'000) : kDeadline;
    QueuePair pair(group, options);
    pair.play_both();
    dispatch_and_check(pair.one, pair.world, {}, pair.result);
    group.barrier();
    const Stopwatch stopwatch;
    if (group.rank() == 0) {
      CombineTensors tensors(24);
      check_fault(pair.one.combine(pair.result.handle, tensors.input(), {}, tensors.view), StatusCode::kTimeout, 1,
                  Phase::kCombine);
    } else if (group.rank() == 2) {
      const Status status = pair.other.dispatch(pair.other_tensors.input(), {}, pair.other_result);
      check_fault(status, StatusCode::kTimeout, 1, Phase::kDispatch);
      stopwatch.check_below(milliseconds(10'000), "waiting for a rank that gave up");
    }
    pair.reset_both(group);
  }));
}

// A reset of one ends what another has between two halves, on every rank alike; its epochs stay in step.
TEST_P(TurnsOfQueues, AResetEndsTheHalvesOfOthers) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    QueuePair pair(group);
    pair.play_both();
    auto* split = pair.one.get<SplitPhases>();
    check_ok(split->dispatch_send(pair.tensors.input(), {}, pair.result), "dispatch_send");
    check_ok(pair.other.reset(), "reset of the other");
    play_round(pair.other, pair.other_world, {}, pair.other_result);
    check_fault(split->dispatch_receive({}, pair.result), StatusCode::kAborted, group.rank(), Phase::kDispatch);
    check_ok(pair.one.poll(), "poll");
    pair.play_both();

    CombineTensors tensors(24);
    dispatch_and_check(pair.one, pair.world, {}, pair.result);
    check_ok(split->combine_send(pair.result.handle, tensors.input(), {}), "combine_send");
    check_ok(pair.other.reset(), "reset of the other");
    play_round(pair.other, pair.other_world, {}, pair.other_result);
    check_fault(split->combine_receive(pair.result.handle, tensors.view), StatusCode::kAborted, group.rank(),
                Phase::kCombine);
    pair.play_both();
    // A round that is open between its phases has nothing in the queues.
    dispatch_and_check(pair.one, pair.world, {}, pair.result);
    check_ok(pair.other.reset(), "reset of the other");
    combine_and_check(pair.one, pair.world, {}, pair.result, pair.result.handle);
    pair.play_both();
  }));
}

// Faulted queues are not shared with a new communication, which works at once.
TEST_P(TurnsOfQueues, ANewCommunicationGetsSoundQueues) {
  EXPECT_NO_THROW(run(GetParam(), kRanks, [](const Group& group) {
    QueuePair pair(group, impatient());
    pair.play_both();
    group.barrier();
    if (group.rank() == 0) {
      check(!pair.one.dispatch(pair.tensors.input(), {}, pair.result).ok(), "a dispatch without the others");
    }
    Communication fresh = communication_for(group, "two_sided", pair.world.spec);
    DispatchResult result;
    for (int round = 0; round < 3; ++round)
      play_round(fresh, pair.world, {}, result);
    pair.reset_both(group);
    play_round(fresh, pair.world, {}, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks,
                         TurnsOfQueues,
                         ::testing::Values(RankKind::kThreads, RankKind::kProcesses),
                         [](const auto& kind) { return std::string(name(kind.param)); });

// A thread that meets another inside the queues is refused; the other one's round is as it was.
TEST(ThreadsOfQueues, AreInsideOneAtATime) {
  EXPECT_NO_THROW(run_ranks(kRanks, [](const Group& group) {
    QueuePair pair(group);
    pair.play_both();
    if (group.rank() == 0) {
      std::exception_ptr failure;
      std::thread waits([&] {
        try {
          play_round(pair.one, pair.world, {}, pair.result);
        } catch (...) {
          failure = std::current_exception();
        }
      });
      std::this_thread::sleep_for(milliseconds(100));  // it waits for rank 1 now
      std::exception_ptr refused;
      try {
        check_throws(ErrorCode::kInvalidState, {"rank 0", "another thread", "groups of their own"},
                     [&] { (void)pair.other.dispatch(pair.other_tensors.input(), {}, pair.other_result); });
      } catch (...) {
        refused = std::current_exception();
      }
      group.barrier();
      waits.join();
      if (failure) std::rethrow_exception(failure);
      if (refused) std::rethrow_exception(refused);
    } else {
      group.barrier();
      play_round(pair.one, pair.world, {}, pair.result);
    }
    pair.play_both();
  }));
}

}  // namespace
}  // namespace tokenyard::support
