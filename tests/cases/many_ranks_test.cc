// SPDX-License-Identifier: Apache-2.0
// C52: numbers of ranks beyond a machine word work, and a number above the cap is refused before anything is made.
// C76, C77: slots of many ranks and experts are all different, and both sides agree where they are.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class ManyRanks : public EachBackend {};

// Every rank sends one token to every expert's owner; a slot used twice would lose a row (C76, C77).
TEST_P(ManyRanks, SlotsAreDistinct) {
  struct Size {
    int num_ranks;
    int local_experts;
  };

  for (const Size& size : {Size{6, 1}, Size{12, 2}, Size{32, 9}, Size{6, 9}}) {
    CaseWorld made;
    const int num_experts = size.num_ranks * size.local_experts;
    made.params = {
        .num_experts = num_experts, .top_k = 2, .hidden_size = 4, .max_tokens_per_rank = 12, .dtype = Dtype::kF32};
    made.ids.resize(static_cast<std::size_t>(size.num_ranks));
    for (int rank = 0; rank < size.num_ranks; ++rank) {
      for (std::int64_t token = 0; token < 12; ++token) {
        made.ids[static_cast<std::size_t>(rank)].push_back(
            {(rank + 25 * token) % num_experts, (7 * rank + 3 * token + 1) % num_experts});
      }
    }
    const World world = made.make();
    EXPECT_NO_THROW(play_worlds(GetParam(), {world, world, world}, {}, Experts::kIdentity)) << size.num_ranks;
  }
}

TEST_P(ManyRanks, BeyondSixtyFour) {
  CaseWorld made{.ids = std::vector<IdTable>(65, IdTable{{0}, {64}})};
  made.params.num_experts = 65;
  made.params.hidden_size = 4;
  made.params.max_tokens_per_rank = 2;
  const World world = made.make();
  EXPECT_NO_THROW(play_worlds(GetParam(), {world, world}, {}, Experts::kIdentity));
}

TEST(ManyRanksLimit, AboveTheCapIsRefusedFirst) {
  EXPECT_NO_THROW(check_throws(ErrorCode::kInvalidArgument, {"1025", "1024"}, [] { (void)Group::in_process(1025); }));
  EXPECT_NO_THROW(check_throws(ErrorCode::kInvalidArgument, {"0"}, [] { (void)Group::in_process(0); }));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         ManyRanks,
                         ::testing::ValuesIn(moving_backends_that(takes_any_number_of_experts)),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
