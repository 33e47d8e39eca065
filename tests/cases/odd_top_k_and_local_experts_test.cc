// SPDX-License-Identifier: Apache-2.0
// C29, C46, C47: nothing may need a power of two or one of a few sizes: any top_k and any number of local experts.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class OddSizes : public EachBackend {};

// Five experts on each rank, top-k 3, 5, 6 and 7 (C29).
TEST_P(OddSizes, TopK) {
  for (const int top_k : {3, 5, 6, 7}) {
    IdTable table;
    for (std::int64_t token = 0; token < 6; ++token) {
      std::vector<std::int64_t> row;
      for (std::int64_t slot = 0; slot < top_k; ++slot)
        row.push_back((token + 3 * slot) % 10);
      if (token == 4) row[1] = -1;
      table.push_back(row);
    }
    CaseWorld made{.ids = {table, table}};
    made.params = {
        .num_experts = 10, .top_k = top_k, .hidden_size = 16, .max_tokens_per_rank = 6, .dtype = Dtype::kF32};
    EXPECT_NO_THROW(play_worlds(GetParam(), std::vector<World>(2, made.make()))) << top_k;
  }
}

// The layout's counts agree with the live ids (C29).
TEST(OddSizesOfLayout, RowSumsAreLiveRanks) {
  CaseWorld made{.ids = std::vector<IdTable>(2, IdTable{{9, 0, 8, 1, 7, 2, 6}, {-1, -1, 3, -1, -1, -1, -1}})};
  made.params = {.num_experts = 10, .top_k = 7, .hidden_size = 16, .max_tokens_per_rank = 2, .dtype = Dtype::kF32};
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, "high_throughput", world.spec);
    const RankTensors tensors(world, group.rank(), false);
    const Layout layout = communication.get<RouteQuery>()->layout(tensors.input().topk_ids);
    check_lists_eq(layout.num_tokens_per_expert, std::vector<std::int32_t>{1, 1, 1, 1, 0, 0, 1, 1, 1, 1}, "experts");
    check_lists_eq(layout.num_tokens_per_rank, std::vector<std::int32_t>{2, 1}, "ranks");
  }));
}

// One token to each expert from each rank: every count is 2 (C46), and with a second choice (C47).
TEST_P(OddSizes, LocalExperts) {
  for (const int local : {1, 3, 5, 8, 9, 16, 33, 65}) {
    const int num_experts = 2 * local;
    CaseWorld one;
    one.params = {.num_experts = num_experts,
                  .top_k = 1,
                  .hidden_size = 8,
                  .max_tokens_per_rank = num_experts,
                  .dtype = Dtype::kF32};
    CaseWorld two = one;
    two.params.top_k = 2;
    one.ids.resize(2);
    two.ids.resize(2);
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      for (std::size_t rank = 0; rank < 2; ++rank) {
        one.ids[rank].push_back({expert});
        two.ids[rank].push_back({expert, (expert * 7 + 1) % num_experts});
      }
    }
    const World world = one.make();
    EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
      Communication communication = communication_for(group, GetParam(), world.spec);
      DispatchResult result;
      moe_round(communication, world, {}, result);
      if (communication.contract().id_space == IdSpace::kCargo) return;
      check_lists_eq(result.counts.rows_per_expert, std::vector<std::int64_t>(static_cast<std::size_t>(local), 2),
                     "rows per expert");
    })) << local;
    EXPECT_NO_THROW(play_worlds(GetParam(), {two.make()})) << local;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         OddSizes,
                         ::testing::ValuesIn(moving_backends_that(takes_any_number_of_experts)),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
