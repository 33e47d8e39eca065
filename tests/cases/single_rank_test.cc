// SPDX-License-Identifier: Apache-2.0
// C34: one rank is a plain local permutation and a weighted sum, in every backend.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class SingleRank : public EachBackend {};

TEST_P(SingleRank, IsNoSpecialCase) {
  CaseWorld made{.ids = {{{0, 3}, {2, 1}, {-1, 2}}}, .weights = {{{0.5F, 2.0F}, {1.0F, 0.25F}, {0.0F, 4.0F}}}};
  made.params.top_k = 2;
  made.params.hidden_size = 8;
  EXPECT_NO_THROW(play_worlds(GetParam(), std::vector<World>(4, made.make())));
}

INSTANTIATE_TEST_SUITE_P(Backends, SingleRank, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
