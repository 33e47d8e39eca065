// SPDX-License-Identifier: Apache-2.0
// C32, C53: experts that do not divide by the ranks, several experts on a rank, a rank that owns none.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class UnevenExperts : public EachBackend {};

IdTable one_token_for_each(int num_experts) {
  IdTable table;
  for (std::int64_t expert = 0; expert < num_experts; ++expert)
    table.push_back({expert});
  return table;
}

// One token to each expert from each rank (C32).
TEST_P(UnevenExperts, FirstRanksOwnOneMore) {
  struct Split {
    int num_experts;
    std::vector<std::int64_t> owned;
  };

  for (const Split& split : {Split{10, {3, 3, 2, 2}}, Split{7, {3, 2, 2}}, Split{3, {1, 1, 1, 0}}}) {
    CaseWorld made{.ids = std::vector<IdTable>(split.owned.size(), one_token_for_each(split.num_experts))};
    made.params.num_experts = split.num_experts;
    made.params.max_tokens_per_rank = 10;
    const World world = made.make();
    const auto num_ranks = static_cast<int>(split.owned.size());
    EXPECT_NO_THROW(run_ranks(num_ranks, [&](const Group& group) {
      Communication communication = communication_for(group, GetParam(), world.spec);
      DispatchResult result;
      moe_round(communication, world, {}, result);
      if (communication.contract().id_space == IdSpace::kCargo) return;
      const std::int64_t owned = split.owned[static_cast<std::size_t>(group.rank())];
      check_eq(result.counts.num_rows, owned * num_ranks, "rows");
      check_lists_eq(result.counts.rows_per_expert,
                     std::vector<std::int64_t>(static_cast<std::size_t>(owned), num_ranks), "rows per expert");
    })) << split.num_experts;
  }
}

TEST(UnevenExpertsRule, OwnerOfEachId) {
  const MoeParams params{.num_experts = 10, .top_k = 1, .hidden_size = 8, .max_tokens_per_rank = 1};
  const int owned[] = {3, 3, 2, 2};
  const int first[] = {0, 3, 6, 8};
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(num_local_experts(params, rank, 4), owned[rank]);
    EXPECT_EQ(first_local_expert(params, rank, 4), first[rank]);
  }
}

// Two ranks, two experts each, rows of two: each expert gets one row of each rank, sources ascending (C53).
TEST_P(UnevenExperts, BlocksOfSourceAndExpertDoNotMix) {
  CaseWorld made{.ids = {{{0}, {1}, {2}, {3}}, {{3}, {2}, {1}, {0}}}};
  made.params.hidden_size = 2;
  EXPECT_NO_THROW(play_worlds(GetParam(), std::vector<World>(3, made.make())));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         UnevenExperts,
                         ::testing::ValuesIn(moving_backends_that(takes_any_number_of_experts)),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
