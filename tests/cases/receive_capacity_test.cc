// SPDX-License-Identifier: Apache-2.0
// C59: there is room for every token of every rank on one rank, also with more experts than ranks squared.
// C70: rows of the second and later sources start where the counts of all (source, expert) pairs say.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class ReceiveCapacity : public EachBackend {};

// 2 ranks, 8 experts, 4 slots, 3 tokens at most: all on rank 1, then all on rank 0.
TEST_P(ReceiveCapacity, HoldsEveryTokenOfEveryRank) {
  CaseWorld made{.ids = std::vector<IdTable>(2, repeated(3, {4, 5, 6, 7}))};
  made.params = {.num_experts = 8, .top_k = 4, .hidden_size = 20, .max_tokens_per_rank = 3, .dtype = Dtype::kF32};
  const World on_one = made.make();
  made.ids.assign(2, repeated(3, {3, 2, 1, 0}));
  const World on_zero = made.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), on_one.spec);
    DispatchResult result;
    for (int round = 0; round < 4; ++round) {
      const World& world = round % 2 == 0 ? on_one : on_zero;
      moe_round(communication, world, {}, result);
      if (communication.contract().output_layout == OutputLayout::kCompact) {
        check_eq(result.counts.num_rows, group.rank() == (round + 1) % 2 ? 6 : 0, "compact rows");
      }
      if (communication.contract().output_layout == OutputLayout::kExpertMajor) {
        check_eq(num_flat_rows(result.hidden_states), 24, "room for expert-major rows");
      }
      // The caller's tensors, with guards around them.
      play_round(communication, world, {.expert_dtype = Dtype::kF32, .caller_tensors = true}, result);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, ReceiveCapacity, ::testing::ValuesIn(kMovingBackends), backend_name);

class SourceOffsets : public EachBackend {};

// 1 + (source + 2 expert) % 3 tokens from each rank to each of six experts on three ranks.
TEST_P(SourceOffsets, FollowTheCountsOfSourceAndExpert) {
  CaseWorld made{.ids = std::vector<IdTable>(3)};
  made.params = {.num_experts = 6, .top_k = 1, .hidden_size = 24, .max_tokens_per_rank = 18, .dtype = Dtype::kF32};
  std::vector<std::int64_t> to_expert(6, 0);
  for (std::int64_t source = 0; source < 3; ++source) {
    for (std::int64_t expert = 5; expert >= 0; --expert) {
      const std::int64_t count = 1 + (source + 2 * expert) % 3;
      to_expert[static_cast<std::size_t>(expert)] += count;
      for (std::int64_t i = 0; i < count; ++i)
        made.ids[static_cast<std::size_t>(source)].push_back({expert});
    }
  }
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    for (int round = 0; round < 3; ++round) {
      moe_round(communication, world, {}, result);
      if (!routes(communication.contract())) continue;
      const auto first = static_cast<std::size_t>(2 * group.rank());
      check_lists_eq(result.counts.rows_per_expert, std::vector{to_expert[first], to_expert[first + 1]}, "rows");
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         SourceOffsets,
                         ::testing::ValuesIn(moving_backends_that(takes_any_number_of_experts)),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
