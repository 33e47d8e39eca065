// SPDX-License-Identifier: Apache-2.0
// C04, C11, C13: a rank that receives 0, 1 or 2 rows gets tensors of the right shape and dtype and may combine them.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class RankWithoutRows : public EachBackend {};

// Rank 1 receives nothing, unquantised and in fp8, several rounds (C04).
TEST_P(RankWithoutRows, ShapesAreKept) {
  for (const DispatchFormat format : {DispatchFormat::kNone, DispatchFormat::kFp8Block128}) {
    WorldSpec spec;
    spec.params = {
        .num_experts = 4, .top_k = 1, .hidden_size = 256, .max_tokens_per_rank = 4, .dispatch_format = format};
    spec.num_ranks = 2;
    spec.skew = Skew::kEmptyRanks;  // ids in {0, 1}
    spec.num_tokens = {4, 4};
    const World world = make_world(spec);
    EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
      Communication communication = communication_for(group, GetParam(), spec);
      DispatchResult result;
      for (int round = 0; round < 3; ++round)
        play_round(communication, world, {}, result);
      if (communication.contract().output_layout != OutputLayout::kCompact || group.rank() == 0) return;
      check_eq(result.hidden_states.describe(), format == DispatchFormat::kNone ? "bf16[0, 256]" : "f8e4m3[0, 256]",
               "rows");
      check_eq(result.topk_ids.describe(), "i32[0, 1]", "ids");
      check_eq(result.topk_weights.describe(), "f32[0, 1]", "weights");
      check_lists_eq(result.counts.rows_per_expert, std::vector<std::int64_t>{0, 0}, "rows per expert");
    })) << name(format);
  }
}

// Two of three ranks have work; the third combines nothing, and poisoned memory does not show (C11).
TEST_P(RankWithoutRows, CombineOfNothingChangesNothing) {
  CaseWorld made{.ids = std::vector<IdTable>(3, repeated(3, {1}))};
  made.params.num_experts = 3;
  made.ids[1] = repeated(3, {0});
  EXPECT_NO_THROW(play_worlds(GetParam(), std::vector<World>(5, made.make())));
}

// n rows for expert 1 and 5 - n for expert 0, with several alignments (C13).
TEST_P(RankWithoutRows, TinyCounts) {
  std::vector<World> worlds;
  for (std::int64_t n = 0; n <= 5; ++n) {
    CaseWorld made;
    made.params.num_experts = 2;
    IdTable table = repeated(5, {0});
    for (std::int64_t i = 0; i < n; ++i)
      table[static_cast<std::size_t>(i)] = {1};
    made.ids = {table, {}};
    worlds.push_back(made.make());
  }
  for (const int alignment : {1, 8, 16}) {
    RoundPlan plan;
    if (find_backend(GetParam()).contract.takes_expert_alignment) plan.expert_alignment = alignment;
    EXPECT_NO_THROW(play_worlds(GetParam(), worlds, plan)) << alignment;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         RankWithoutRows,
                         ::testing::ValuesIn(moving_backends_that(takes_any_number_of_experts)),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
