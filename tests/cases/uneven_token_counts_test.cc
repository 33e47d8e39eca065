// SPDX-License-Identifier: Apache-2.0
// C43, C44, C50: ranks with different numbers of tokens, maxima that are no multiple of a chunk, uneven splits.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class UnevenTokens : public EachBackend {};

TEST_P(UnevenTokens, PadsCauseNoTraffic) {
  WorldSpec spec;
  spec.params = {.num_experts = 8, .top_k = 2, .hidden_size = 16, .max_tokens_per_rank = 16};
  spec.num_ranks = 4;
  spec.num_tokens = {1, 5, 16, 7};
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    for (int round = 0; round < 3; ++round)
      play_round(communication, world, {}, result);
    check_lists_eq(result.counts.tokens_per_source, std::vector<std::int64_t>{1, 5, 16, 7}, "tokens per source");
  }));
}

// Any maximum, filled to the brim (C44).
TEST_P(UnevenTokens, AnyMaximum) {
  for (const int max_tokens : {1, 63, 64, 65, 100}) {
    WorldSpec spec;
    spec.params = {.num_experts = 6, .top_k = 2, .hidden_size = 8, .max_tokens_per_rank = max_tokens};
    spec.num_ranks = 2;
    spec.num_tokens = {max_tokens, max_tokens};
    const World world = make_world(spec);
    EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
      Communication communication = communication_for(group, GetParam(), spec);
      DispatchResult result;
      for (int round = 0; round < 2; ++round)
        play_round(communication, world, {}, result);
    })) << max_tokens;
  }
}

// Rank i sends split[i][j] rows to rank j, and rank j has them in rank order (C50).
TEST_P(UnevenTokens, ThreeRanksWithUnevenSplits) {
  std::vector<World> worlds;
  for (const std::vector<std::int64_t>& first : IdTable{{3, 2, 1}, {3, 0, 3}}) {
    const IdTable splits{first, {2, 2, 2}, {1, 2, 3}};
    CaseWorld made;
    made.params.num_experts = 3;
    made.params.hidden_size = 2;
    for (const std::vector<std::int64_t>& split : splits) {
      IdTable table;
      for (std::size_t to = 0; to < 3; ++to) {
        for (std::int64_t i = 0; i < split[to]; ++i)
          table.push_back({static_cast<std::int64_t>(to)});
      }
      made.ids.push_back(table);
    }
    worlds.push_back(made.make());
  }
  EXPECT_NO_THROW(play_worlds(GetParam(), {worlds[0], worlds[1], worlds[0], worlds[1]}));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         UnevenTokens,
                         ::testing::ValuesIn(moving_backends_that(takes_any_number_of_experts)),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
