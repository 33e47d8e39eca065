// SPDX-License-Identifier: Apache-2.0
// Making and ending communications, handles that are used, left or outlive them, and several of them at once.
#include <gtest/gtest.h>

#include <optional>

#include "conformance/small_spec.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

constexpr int kRanks = 3;

class LifeCycle : public ::testing::TestWithParam<std::string_view> {};

// What a rank passes to a combine that must fail before it looks at tensors.
struct CombineArguments {
  Tensor rows{Dtype::kBf16, {18, 24}};
  Tensor output{Dtype::kBf16, {6, 24}};
  TensorView view = output.view();

  void expect(ErrorCode code, Communication& communication, Handle& handle) {
    check_throws(code, {}, [&] { (void)communication.combine(handle, {.expert_output = rows.view()}, {}, view); });
  }
};

TEST_P(LifeCycle, DestroyIsIdempotentAndFinal) {
  const WorldSpec spec = all_to_all_spec(kRanks);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    play_round(communication, world, {}, result);
    dispatch_and_check(communication, world, {}, result);
    Handle kept = std::move(result.handle);
    check_ok(communication.destroy(), "destroy");
    check_ok(communication.destroy(), "second destroy");
    CombineArguments().expect(ErrorCode::kDestroyed, communication, kept);
    const RankTensors tensors(world, group.rank(), false);
    check_throws(ErrorCode::kDestroyed, {}, [&] { (void)communication.dispatch(tensors.input(), {}, result); });
  }));
}

TEST_P(LifeCycle, HandleMayOutliveItsCommunication) {
  const WorldSpec spec = all_to_all_spec(kRanks);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    DispatchResult result;
    std::optional<Communication> communication(communication_for(group, GetParam(), spec));
    dispatch_and_check(*communication, world, {}, result);
    group.barrier();
    communication.reset();
    Communication next = communication_for(group, GetParam(), spec);
    CombineArguments().expect(ErrorCode::kDestroyed, next, result.handle);
    play_round(next, world, {}, result);
  }));
}

TEST_P(LifeCycle, UsedAndForeignHandlesAreRefused) {
  const WorldSpec spec = all_to_all_spec(kRanks);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication one = communication_for(group, GetParam(), spec);
    Communication other = communication_for(group, GetParam(), spec);
    DispatchResult result;
    play_round(one, world, {}, result);
    if (one.contract().handle_use == HandleUse::kOnce) {
      CombineArguments().expect(ErrorCode::kInvalidState, one, result.handle);
    }
    Handle empty;
    check_throws(ErrorCode::kInvalidState, {}, [&] {
      CombineArguments arguments;
      (void)one.combine(empty, {.expert_output = arguments.rows.view()}, {}, arguments.view);
    });
    check_ok(one.poll(), "refused handles leave no fault");
    DispatchResult mine;
    play_round(one, world, {}, mine);
    play_round(other, world, {}, mine);
  }));
}

// A handle that dies without a combine frees its rows, on any rank, round after round.
TEST_P(LifeCycle, HandlesMayDieUnused) {
  const WorldSpec spec = small_spec(kRanks, 3);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    for (std::uint64_t round = 0; round < 12; ++round) {
      const World world = make_world(with_seed(spec, round));
      dispatch_and_check(communication, world, {}, result);
      if (round % 3 == 0) result.handle = Handle();
      if (round % 3 == 1) combine_and_check(communication, world, {}, result, result.handle);
    }  // round % 3 == 2: the next dispatch kills it
  }));
}

// Between the halves of a dispatch: neither headers nor rows were read. Nobody waits for them later.
TEST_P(LifeCycle, HandlesMayDieBetweenTheHalvesOfADispatch) {
  const WorldSpec spec = all_to_all_spec(kRanks, 2);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    for (int round = 0; round < 6; ++round) {
      const RankTensors tensors(world, group.rank(), false);
      check_ok(communication.get<SplitPhases>()->dispatch_send(tensors.input(), {}, result), "dispatch_send");
      result.handle = Handle();
      if (round % 2 == 0) play_round(communication, world, {}, result);
    }
    play_round(communication, world, {}, result);
  }));
}

// Between the halves of a combine: the owners of the rows may use their memory again.
TEST_P(LifeCycle, HandlesMayDieBetweenTheHalvesOfACombine) {
  const WorldSpec spec = all_to_all_spec(kRanks, 2);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    for (int round = 0; round < 6; ++round) {
      dispatch_and_check(communication, world, {}, result);
      Tensor rows(Dtype::kBf16, {num_flat_rows(result.hidden_states), spec.params.hidden_size});
      check_ok(communication.get<SplitPhases>()->combine_send(result.handle, {.expert_output = rows.view()}, {}),
               "combine_send");
      result.handle = Handle();
    }
    play_round(communication, world, {}, result);
  }));
}

// The rows of a combine before still lie where those of the next would: an error at once, after which the call may be
// repeated. Where two are in flight, each has its own place, so one that came later and is done does not help.
TEST_P(LifeCycle, ACombineWaitsForTheHalvesBefore) {
  const Contract& contract = find_backend(GetParam()).contract;
  if (contract.takes_turns) GTEST_SKIP() << "has turns instead";
  const WorldSpec spec = all_to_all_spec(kRanks, 2);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    auto* split = communication.get<SplitPhases>();
    DispatchResult first;
    DispatchResult between;
    DispatchResult last;
    dispatch_and_check(communication, world, {}, first);
    const Tensor rows(Dtype::kBf16, {num_flat_rows(first.hidden_states), spec.params.hidden_size});
    const Tensor output(Dtype::kBf16, {world.rank(group.rank()).num_tokens, spec.params.hidden_size});
    TensorView combined = output.view();
    const auto send = [&](DispatchResult& result) {
      check_ok(split->combine_send(result.handle, {.expert_output = rows.view()}, {}), "combine_send");
    };
    send(first);
    if (contract.max_in_flight > 1) {
      dispatch_and_check(communication, world, {}, between);
      send(between);
      check_ok(split->combine_receive(between.handle, combined), "combine_receive");
    }
    dispatch_and_check(communication, world, {}, last);
    group.barrier();
    const Stopwatch stopwatch;
    check_throws(ErrorCode::kInvalidState, {"was sent and not received"},
                 [&] { (void)split->combine_send(last.handle, {.expert_output = rows.view()}, {}); });
    stopwatch.check_below(std::chrono::milliseconds(1'000), "the refused combine");
    check_ok(split->combine_receive(first.handle, combined), "combine_receive");
    combine_and_check(communication, world, {}, last, last.handle);
  }));
}

// One dispatch more than may be open is an error and not corruption.
TEST_P(LifeCycle, TooManyOpenOperationsAreRefused) {
  const WorldSpec spec = all_to_all_spec(2);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    const int depth = communication.contract().max_in_flight;
    check(depth >= 1, "max_in_flight is not positive");
    std::vector<DispatchResult> open(static_cast<std::size_t>(depth));
    for (DispatchResult& result : open)
      dispatch_and_check(communication, world, {}, result);
    DispatchResult extra;
    const RankTensors tensors(world, group.rank(), false);
    check_throws(ErrorCode::kInvalidState, {}, [&] { (void)communication.dispatch(tensors.input(), {}, extra); });
    group.barrier();
    for (DispatchResult& result : open) {
      check_result(communication, world, {}, result);
      combine_and_check(communication, world, {}, result, result.handle);
    }
    play_round(communication, world, {}, extra);
  }));
}

// Where rounds count, and not views, which others may have none of: the peers, which may wait for a round that this
// rank has open, hear nothing of it, within a round and between the halves of a dispatch.
TEST_P(LifeCycle, ADispatchThatOneRankAsksForTooEarlyLosesNothing) {
  if (find_backend(GetParam()).contract.max_in_flight < 2) GTEST_SKIP() << "views count, and the peers are told";
  const WorldSpec spec = all_to_all_spec(kRanks, 2);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    const auto depth = static_cast<std::size_t>(communication.contract().max_in_flight);
    const RankTensors tensors(world, group.rank(), false);
    std::vector<DispatchResult> open(depth);
    DispatchResult extra;
    for (int early = 0; early < kRanks; ++early) {
      const auto ask = [&] {
        if (group.rank() != early) return;
        check_throws(ErrorCode::kInvalidState, {"in flight"},
                     [&] { (void)communication.dispatch(tensors.input(), {}, extra); });
      };
      auto* split = communication.get<SplitPhases>();
      for (DispatchResult& result : open)
        check_ok(split->dispatch_send(tensors.input(), {}, result), "dispatch_send");
      ask();
      for (DispatchResult& result : open) {
        check_ok(split->dispatch_receive({}, result), "dispatch_receive");
        check_result(communication, world, {}, result);
      }
      ask();
      for (DispatchResult& result : open)
        combine_and_check(communication, world, {}, result, result.handle);
      play_round(communication, world, {}, extra);
    }
  }));
}

// Different shapes, one group, used in turns and in different orders of phases; one ends while the others go on.
TEST_P(LifeCycle, SeveralCommunicationsOfOneGroup) {
  std::vector<WorldSpec> specs(3, small_spec(kRanks, 5));
  specs[1].params.hidden_size = 130;
  specs[1].params.max_tokens_per_rank = 16;
  specs[2].params.num_experts = 12;
  specs[2].params.top_k = 3;
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    std::vector<Communication> all;
    for (const WorldSpec& spec : specs)
      all.push_back(communication_for(group, GetParam(), spec));
    std::vector<DispatchResult> results(3);
    for (std::uint64_t round = 0; round < 5; ++round) {
      std::vector<World> worlds;
      for (const WorldSpec& spec : specs)
        worlds.push_back(make_world(with_seed(spec, 10 * round + 1)));
      for (std::size_t i = 0; i < 3; ++i)
        dispatch_and_check(all[i], worlds[i], {}, results[i]);
      for (std::size_t i = 3; i-- > 0;) {
        combine_and_check(all[i], worlds[i], {.seed = round}, results[i], results[i].handle);
      }
    }
    check_ok(all[0].destroy(), "destroy");
    for (std::size_t i = 1; i < 3; ++i) {
      play_round(all[i], make_world(with_seed(specs[i], 99)), {}, results[i]);
    }
  }));
}

// Ranks 0..2 and ranks 1..3 of four threads, each thread in one or both groups.
TEST_P(LifeCycle, OverlappingGroups) {
  const std::vector<Group> low = Group::in_process(3);
  const std::vector<Group> high = Group::in_process(3);
  const WorldSpec spec = small_spec(3, 6);
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    const auto thread = static_cast<std::size_t>(group.rank());
    std::optional<Communication> in_low;
    std::optional<Communication> in_high;
    if (thread < 3) in_low.emplace(communication_for(low[thread], GetParam(), spec));
    if (thread > 0) in_high.emplace(communication_for(high[thread - 1], GetParam(), spec));
    DispatchResult low_result;
    DispatchResult high_result;
    for (std::uint64_t round = 0; round < 5; ++round) {
      const World low_world = make_world(with_seed(spec, round));
      const World high_world = make_world(with_seed(spec, 100 + round));
      if (in_low) dispatch_and_check(*in_low, low_world, {}, low_result);
      if (in_high) play_round(*in_high, high_world, {}, high_result);
      if (in_low) combine_and_check(*in_low, low_world, {}, low_result, low_result.handle);
    }
  }));
}

// The epoch counter passes 2^32 and 0 in the middle of the rounds.
TEST_P(LifeCycle, EpochsWrapAround) {
  const WorldSpec spec = small_spec(4, 7);
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    CommunicationOptions options = test_options();
    options.initial_epoch = 0xFFFFFFFDU;
    Communication communication = communication_for(group, GetParam(), spec, options);
    DispatchResult result;
    for (std::uint64_t round = 0; round < 8; ++round) {
      play_round(communication, make_world(with_seed(spec, round)), {.seed = round}, result);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, LifeCycle, ::testing::ValuesIn(kMovingBackends), [](const auto& backend) {
  return std::string(backend.param);
});

TEST(Creation, DifferentParamsAreNamedOnEveryRank) {
  EXPECT_NO_THROW(run_ranks(4, [](const Group& group) {
    WorldSpec spec = small_spec(4);
    spec.params.max_tokens_per_rank = group.rank() == 2 ? 16 : 8;
    check_throws(ErrorCode::kMismatch, {"max_tokens_per_rank", "8", "16"},
                 [&] { (void)communication_for(group, "one_sided", spec); });
    spec.params.max_tokens_per_rank = 8;
    Communication communication = communication_for(group, "one_sided", spec);
    DispatchResult result;
    play_round(communication, make_world(spec), {}, result);
  }));
}

TEST(Creation, PassthroughSaysWhyThereIsNone) {
  EXPECT_NO_THROW(run_ranks(2, [](const Group& group) {
    check_throws(ErrorCode::kUnsupported, {"passthrough"},
                 [&] { (void)create_communication(group, small_spec(2).params, "passthrough"); });
  }));
}

}  // namespace
}  // namespace tokenyard::support
