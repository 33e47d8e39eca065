// SPDX-License-Identifier: Apache-2.0
// C20: the same expert twice in one token travels once, is one row, and counts with both weights.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class ExpertChosenTwice : public EachBackend {};

TEST_P(ExpertChosenTwice, BothWeightsCount) {
  CaseWorld made{.ids = std::vector<IdTable>(2, repeated(1, {2, 2})),
                 .weights = std::vector<WeightTable>(2, {{0.25F, 0.5F}})};
  made.params.top_k = 2;
  made.params.hidden_size = 4;
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    moe_round(communication, world, {}, result);
    if (communication.contract().id_space == IdSpace::kCargo) return;
    check_eq(result.counts.num_rows, group.rank() == 1 ? 2 : 0, "rows");
    check_lists_eq(result.counts.rows_per_expert, std::vector<std::int64_t>{group.rank() == 1 ? 2 : 0, 0},
                   "rows per expert");
  }));
}

// With a third choice between the two equal ones, in every order.
TEST_P(ExpertChosenTwice, InAnyOrder) {
  std::vector<World> worlds;
  for (const std::vector<std::int64_t>& row : IdTable{{1, 3, 1}, {3, 1, 1}, {1, 1, 3}, {3, 3, 3}, {0, 3, 0}}) {
    CaseWorld made{.ids = std::vector<IdTable>(3, repeated(5, row)),
                   .weights = std::vector<WeightTable>(3, WeightTable(5, {0.5F, 2.0F, 0.125F}))};
    made.params.top_k = 3;
    worlds.push_back(made.make());
  }
  EXPECT_NO_THROW(play_worlds(GetParam(), worlds));
}

INSTANTIATE_TEST_SUITE_P(Backends, ExpertChosenTwice, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
