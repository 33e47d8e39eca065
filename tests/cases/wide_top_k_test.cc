// SPDX-License-Identifier: Apache-2.0
// C23, C25: top_k from 1 to 64 works, also above 32, above the experts of a rank, and above all experts when the rest
// is padded; more than 64 is refused at creation.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class WideTopK : public EachBackend {};

class WideTopKOfRoutes : public EachBackend {};

// Five live slots and four experts (C25).
TEST_P(WideTopKOfRoutes, MoreLiveSlotsThanExpertsAreRefused) {
  CaseWorld made{.ids = std::vector<IdTable>(2, repeated(1, {0, 1, 2, 3, -1}))};
  made.params.top_k = 5;
  const World right = made.make();
  World wrong = right;
  for (RankData& data : wrong.ranks)
    data.ids[4] = 3;
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), right.spec);
    DispatchResult result;
    const RankTensors tensors(wrong, group.rank(), false);
    check_throws(ErrorCode::kInvalidArgument, {"5", "4"},
                 [&] { (void)communication.dispatch(tensors.input(), {}, result); });
    moe_round(communication, right, {}, result);
  }));
}

// 40 slots, three of them live (C23).
TEST_P(WideTopK, MostlyPadded) {
  std::vector<std::int64_t> row(40, -1);
  row[0] = 47;
  row[33] = 1;
  row[39] = 24;
  CaseWorld made{.ids = std::vector<IdTable>(2, repeated(2, row))};
  made.params = {.num_experts = 48, .top_k = 40, .hidden_size = 16, .max_tokens_per_rank = 2, .dtype = Dtype::kF32};
  EXPECT_NO_THROW(play_worlds(GetParam(), std::vector<World>(3, made.make())));
}

TEST_P(WideTopK, SixtyFourLiveSlots) {
  std::vector<std::int64_t> row(64);
  for (std::size_t slot = 0; slot < row.size(); ++slot)
    row[slot] = static_cast<std::int64_t>(63 - slot);
  CaseWorld made{.ids = std::vector<IdTable>(3, repeated(2, row))};
  made.params = {.num_experts = 64, .top_k = 64, .hidden_size = 16, .max_tokens_per_rank = 2, .dtype = Dtype::kF32};
  EXPECT_NO_THROW(play_worlds(GetParam(), std::vector<World>(3, made.make()), {}, Experts::kIdentity));
}

TEST_P(WideTopK, MoreThanSixtyFourIsRefused) {
  WorldSpec spec;
  spec.params = {.num_experts = 100, .top_k = 65, .hidden_size = 16, .max_tokens_per_rank = 2};
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    check_throws(ErrorCode::kInvalidArgument, {"65", "64"}, [&] { (void)communication_for(group, GetParam(), spec); });
  }));
}

// One expert on each of four ranks; several on each of two; five slots for four experts (C25).
TEST_P(WideTopK, AboveTheExperts) {
  CaseWorld made{.ids = std::vector<IdTable>(4, repeated(3, {0, 1, 2, 3}))};
  made.params.top_k = 4;
  EXPECT_NO_THROW(play_worlds(GetParam(), {made.make()}));
  made.params.num_experts = 8;
  made.params.top_k = 6;
  made.ids.assign(2, repeated(3, {0, 7, 2, 5, 4, 1}));
  EXPECT_NO_THROW(play_worlds(GetParam(), {made.make()}));
  made.params.num_experts = 4;
  made.params.top_k = 5;
  made.ids.assign(4, repeated(3, {3, 2, -1, 0, 1}));
  EXPECT_NO_THROW(play_worlds(GetParam(), {made.make()}));
}

INSTANTIATE_TEST_SUITE_P(Backends, WideTopK, ::testing::ValuesIn(kMovingBackends), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, WideTopKOfRoutes, ::testing::ValuesIn(moving_backends_that(routes)), backend_name);

}  // namespace
}  // namespace tokenyard::support
