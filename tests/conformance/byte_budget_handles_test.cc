// SPDX-License-Identifier: Apache-2.0
// Handles, halves and queries of a communication made from a byte budget, with rounds that take several sub-rounds.
#include <gtest/gtest.h>

#include "conformance/byte_budget.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

constexpr int kRanks = kCutRanks;

TEST(BudgetHandle, ReplaysAndCombinesAgainInSubRounds) {
  const WorldSpec spec = cut_spec(3);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = budget_made(group, cutting_budget());
    DispatchResult first;
    play_round(communication, world, {}, first);
    check(communication.statistics().num_dispatches > 3, "the call was not cut");
    combine_and_check(communication, world, {.seed = 31}, first, first.handle);  // the same handle again
    DispatchResult other;
    for (std::uint64_t round = 0; round < 3; ++round) {
      WorldSpec between = small_spec(kRanks, 60 + round);  // other shapes, which fit the window
      between.params.num_experts = 5;
      play_round(communication, make_world(between), {}, other);
      const World changed = with_new_rows(world, 50 + round);
      const RankTensors tensors(changed, group.rank(), round == 1);
      DispatchResult again;
      check_ok(communication.dispatch(tensors.input(false), {.replay = &first.handle}, again), "replay");
      const RoundPlan plan{.seed = 70 + round};
      check_result(communication, changed, plan, again, false);
      combine_and_check(communication, changed, plan, again, again.handle);
      combine_and_check(communication, changed, plan, again, first.handle);
    }
  }));
}

// A route of one sub-round may be replayed by rows of any width; one of several only by rows that its sub-rounds fit.
TEST(BudgetHandle, ReplaysRowsOfAnotherWidth) {
  for (const bool cut : {false, true}) {
    WorldSpec spec = cut_spec(4);
    spec.params.hidden_size = 16;
    spec.num_tokens = cut ? std::vector<std::int64_t>{2500, 0, 17} : std::vector<std::int64_t>{20, 0, 17};
    WorldSpec wide = spec;
    wide.params.hidden_size = 700;
    wide.params.dtype = Dtype::kF32;
    const World world = make_world(spec);
    World changed = make_world(wide);
    for (int rank = 0; rank < kRanks; ++rank) {
      changed.rank(rank).ids = world.rank(rank).ids;
      changed.rank(rank).weights = {};
    }
    changed.spec.with_weights = false;
    EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
      Communication communication = budget_made(group, budget_for(wide, 21));
      DispatchResult first;
      play_round(communication, world, {}, first);
      check_eq(communication.statistics().num_dispatches > 1, cut, "the first dispatch was cut");
      const RankTensors tensors(changed, group.rank(), false);
      DispatchResult again;
      const auto replay = [&] {
        return communication.dispatch(tensors.input(false), {.replay = &first.handle}, again);
      };
      if (cut) {
        check_throws(ErrorCode::kCapacity, {"sub-rounds of", "dispatch them with ids"}, [&] { (void)replay(); });
        return;
      }
      check_ok(replay(), "replay");
      const RoundPlan plan{.expert_dtype = Dtype::kF32, .output_dtype = Dtype::kF32};
      check_result(communication, changed, plan, again, false);
      combine_and_check(communication, changed, plan, again, again.handle);
    }));
  }
}

TEST(BudgetReplay, MustBeOfTheSameExperts) {
  const WorldSpec spec = cut_spec(5);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(1, [&](const Group& group) {
    Communication communication = budget_made(group, cutting_budget());
    WorldSpec alone = spec;
    alone.num_ranks = 1;
    const World own = make_world(alone);
    DispatchResult first;
    play_round(communication, own, {}, first);
    const RankTensors tensors(with_new_rows(own, 6), 0, false);
    DispatchResult again;
    check_throws(ErrorCode::kInvalidArgument, {"num_experts is 9", "route is of 8"}, [&] {
      (void)communication.dispatch(tensors.input(false), {.replay = &first.handle, .num_experts = 9}, again);
    });
    check_ok(communication.dispatch(tensors.input(false), {.replay = &first.handle, .num_experts = 8}, again),
             "replay with the same number");
  }));
}

TEST(BudgetSplit, DispatchHasHalvesAndCombineOnlyWhenItWasNotCut) {
  for (const bool cut : {false, true}) {
    const WorldSpec spec = cut_spec(6);
    const World world = make_world(spec);
    EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
      Communication communication = budget_made(group, cut ? cutting_budget() : budget_for(spec, 40));
      auto* halves = communication.get<SplitPhases>();
      check(halves != nullptr, "no halves");
      for (int round = 0; round < 2; ++round) {
        const RankTensors tensors(world, group.rank(), false);
        DispatchResult result;
        check_ok(halves->dispatch_send(tensors.input(), of_experts(spec), result), "dispatch_send");
        check_ok(halves->dispatch_receive(of_experts(spec), result), "dispatch_receive");
        check_result(communication, world, {}, result);
        Zeros zeros(result, tensors.num_tokens(), spec.params.hidden_size);
        TensorView output = zeros.output.view();
        if (cut) {
          check_throws(ErrorCode::kUnsupported, {"sub-rounds", "Communication::combine"},
                       [&] { (void)halves->combine_send(result.handle, zeros.input(), {}); });
        } else {
          check_ok(halves->combine_send(result.handle, zeros.input(), {}), "combine_send");
          check_ok(halves->combine_receive(result.handle, output), "combine_receive");
        }
        combine_and_check(communication, world, {}, result, result.handle);  // nothing was lost
      }
    }));
  }
}

// Too small a tensor costs nothing: the rows are kept for one that is large enough.
TEST(BudgetOverflow, IsToldAndMayBeRepeated) {
  const WorldSpec spec = cut_spec(7);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = budget_made(group, cutting_budget());
    const std::int64_t rows = expect_dispatch(world, group.rank(), {.layout = OutputLayout::kCompact}).total_rows;
    check(rows > 1, "the test needs rows");
    const RankTensors tensors(world, group.rank(), false);
    DispatchResult result;
    for (const std::int64_t room : {rows - 1, rows}) {
      Tensor hidden(Dtype::kBf16, {room, spec.params.hidden_size});
      DispatchResult into;
      into.hidden_states = hidden.view();
      DispatchOptions options = of_experts(spec);
      options.into = &into;
      const Status status = room < rows ? communication.dispatch(tensors.input(), options, result)
                                        : communication.get<SplitPhases>()->dispatch_receive(options, result);
      check_eq(status.needed_rows, room < rows ? rows : 0, "rows that are needed");
      if (room < rows) continue;
      check_result(communication, world, {}, result);
      check_eq(result.hidden_states.data, hidden.view().data, "the caller's memory");
      combine_and_check(communication, world, {}, result, result.handle);
    }
  }));
}

TEST(BudgetRoutes, QueryTakesTheExperts) {
  const WorldSpec spec = cut_spec(8);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = budget_made(group, cutting_budget());
    auto* query = communication.get<RouteQuery>();
    const RankTensors tensors(world, group.rank(), false);
    const TensorView ids = tensors.input().topk_ids;
    check_throws(ErrorCode::kInvalidArgument, {"num_experts is not given"}, [&] { (void)query->layout(ids); });
    DispatchResult result;
    dispatch_and_check(communication, world, {}, result);
    const Layout layout = query->layout(ids, 8);  // also while a round is under way, and for other experts
    check_eq(std::ssize(layout.num_tokens_per_expert), std::int64_t{8}, "experts");
    for (int to = 0; to < kRanks; ++to) {
      std::int32_t sent = 0;
      for (std::int64_t token = 0; token < ids.shape[0]; ++token)
        sent += travels(world, group.rank(), token, to, OutputLayout::kCompact) ? 1 : 0;
      check_eq(layout.num_tokens_per_rank[static_cast<std::size_t>(to)], sent, "tokens for a rank");
    }
    check_eq(std::ssize(query->layout(ids, 99).num_tokens_per_expert), std::int64_t{99}, "other experts");
    combine_and_check(communication, world, {}, result, result.handle);
  }));
}

}  // namespace
}  // namespace tokenyard::support
