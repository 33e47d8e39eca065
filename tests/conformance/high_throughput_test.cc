// SPDX-License-Identifier: Apache-2.0
// What only high_throughput promises: cached handles, a fixed number of result rows, the layout query, SMs.
#include <gtest/gtest.h>

#include "conformance/small_spec.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

constexpr int kRanks = 3;

TEST(CachedHandle, ReplaysItsRouteWithNewRows) {
  const WorldSpec spec = small_spec(kRanks, 3);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "high_throughput", spec);
    DispatchResult first;
    RoundPlan plan;
    play_round(communication, world, plan, first);
    for (std::uint64_t round = 0; round < 4; ++round) {
      const World changed = with_new_rows(world, 50 + round);
      const RankTensors tensors(changed, group.rank(), round % 2 == 1);
      DispatchResult again;
      check_ok(communication.dispatch(tensors.input(false), {.replay = &first.handle}, again), "replay");
      check_result(communication, changed, plan, again, false);
      plan.seed = 70 + round;
      Handle& handle = again.handle.valid() ? again.handle : first.handle;
      combine_and_check(communication, changed, plan, again, handle);
    }
  }));
}

// Other rounds between two replays change nothing for the cached route.
TEST(CachedHandle, SurvivesOtherRounds) {
  const WorldSpec spec = small_spec(kRanks, 4);
  const World cached = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "high_throughput", spec);
    DispatchResult first;
    play_round(communication, cached, {}, first);
    DispatchResult other;
    for (std::uint64_t round = 0; round < 3; ++round) {
      play_round(communication, make_world(with_seed(spec, 90 + round)), {}, other);
      const World changed = with_new_rows(cached, round);
      const RankTensors tensors(changed, group.rank(), false);
      DispatchResult again;
      check_ok(communication.dispatch(tensors.input(false), {.replay = &first.handle}, again), "replay");
      check_result(communication, changed, {}, again, false);
      combine_and_check(communication, changed, {}, again, again.handle.valid() ? again.handle : first.handle);
    }
  }));
}

class WorstTokens : public ::testing::TestWithParam<int> {};

// More rows than arrive, exactly as many as the fullest rank gets, too few, none.
TEST_P(WorstTokens, FixesTheRows) {
  WorldSpec spec = small_spec(kRanks, 6);
  spec.num_tokens = {6, 5, 4};
  const World world = make_world(spec);
  std::int64_t fullest = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    fullest = std::max(fullest, expect_dispatch(world, rank, {.layout = OutputLayout::kCompact}).total_rows);
  }
  RoundPlan plan{.weights_back = true, .num_biases = 1};
  plan.num_worst_tokens = std::max<std::int64_t>(0, fullest + GetParam());
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "high_throughput", spec);
    DispatchResult result;
    for (int round = 0; round < 3; ++round)
      play_round(communication, world, plan, result);
    RoundPlan plain = plan;
    plain.num_worst_tokens.reset();
    play_round(communication, world, plain, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Sizes, WorstTokens, ::testing::Values(5, 0, -1, -4, -1000), [](const auto& difference) {
  return difference.param < 0 ? "fewer" + std::to_string(-difference.param) : "more" + std::to_string(difference.param);
});

TEST(LayoutQuery, CountsWhatADispatchWouldSend) {
  for (const Skew skew : {Skew::kUniform, Skew::kMaskedIds, Skew::kDuplicates, Skew::kAllToOneExpert}) {
    WorldSpec spec = small_spec(kRanks, 8);
    spec.skew = skew;
    const World world = make_world(spec);
    EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
      Communication communication = communication_for(group, "high_throughput", spec);
      auto* query = communication.get<RouteQuery>();
      check(query != nullptr, "high_throughput has no RouteQuery");
      const RankTensors tensors(world, group.rank(), true);
      const Layout layout = query->layout(tensors.input().topk_ids);
      std::vector<std::int32_t> per_expert(8, 0);
      std::vector<std::int32_t> per_rank(kRanks, 0);
      const std::int64_t num_tokens = world.rank(group.rank()).num_tokens;
      check_eq(layout.is_token_in_rank.num_rows(), num_tokens, "rows of is_token_in_rank");
      for (std::int64_t token = 0; token < num_tokens; ++token) {
        for (int rank = 0; rank < kRanks; ++rank) {
          const bool sent = travels(world, group.rank(), token, rank, OutputLayout::kCompact);
          per_rank[static_cast<std::size_t>(rank)] += sent ? 1 : 0;
          const int flag = std::to_integer<int>(row_of(layout.is_token_in_rank, token)[rank]);
          check_eq(flag, sent ? 1 : 0, "is_token_in_rank");
        }
        for (std::int64_t expert = 0; expert < 8; ++expert) {
          const bool chosen = world.id(group.rank(), token, 0) == expert || world.id(group.rank(), token, 1) == expert;
          per_expert[static_cast<std::size_t>(expert)] += chosen ? 1 : 0;
        }
      }
      check_lists_eq(layout.num_tokens_per_rank, per_rank, "num_tokens_per_rank");
      check_lists_eq(layout.num_tokens_per_expert, per_expert, "num_tokens_per_expert");
    })) << name(skew);
  }
}

TEST(SmBudgetOfHighThroughput, IsClampedAndMayRise) {
  const WorldSpec spec = small_spec(1);
  EXPECT_NO_THROW(run_ranks(1, [&](const Group& group) {
    Communication communication =
        create_communication(group, spec.params, HighThroughputConfig{.max_num_sms = 12}, test_options());
    auto* budget = communication.get<SmBudget>();
    check(budget != nullptr, "high_throughput has no SmBudget");
    budget->set_num_sms(4);
    check_eq(budget->num_sms(), 4, "SMs after lowering");
    budget->set_num_sms(1'000'000);
    check_eq(budget->num_sms(), 12, "SMs are clamped to the cap");
    check_throws(ErrorCode::kInvalidArgument, {"0"}, [&] { budget->set_num_sms(0); });
    check_eq(budget->max_sms_used(), 0, "SMs used by the host engine");
  }));
}

}  // namespace
}  // namespace tokenyard::support
