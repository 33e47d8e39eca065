// SPDX-License-Identifier: Apache-2.0
// C31, C49: counts per expert equal what the received ids say; aligned counts are their own list, in which an expert
// without rows stays at 0.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

// Rows of each local expert, counted from the ids of a compact result.
std::vector<std::int64_t> count_ids(const DispatchResult& result, const MoeParams& params, std::size_t num_local) {
  std::vector<std::int64_t> counted(num_local, 0);
  for (std::int64_t row = 0; row < result.counts.num_rows; ++row) {
    const auto* ids = reinterpret_cast<const std::int32_t*>(row_of(result.topk_ids, row));
    for (std::size_t expert = 0; expert < num_local; ++expert) {
      bool chosen = false;
      for (int slot = 0; slot < params.top_k; ++slot)
        chosen = chosen || ids[slot] == static_cast<int>(expert);
      counted[expert] += chosen ? 1 : 0;
    }
  }
  return counted;
}

TEST(CountsAgreeWithIds, OfRandomRoutes) {
  WorldSpec spec;
  spec.params = {.num_experts = 8, .top_k = 3, .hidden_size = 16, .max_tokens_per_rank = 9};
  spec.num_ranks = 4;
  spec.num_tokens = {9, 9, 9, 9};
  for (const int alignment : {1, 16}) {
    EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
      Communication communication = communication_for(group, "high_throughput", spec);
      DispatchResult result;
      for (std::uint64_t round = 0; round < 5; ++round) {
        WorldSpec now = spec;
        now.seed = round;
        const World world = make_world(now);
        const RoundPlan plan{.expert_alignment = alignment};
        dispatch_and_check(communication, world, plan, result);
        std::vector<std::int64_t> counted = count_ids(result, spec.params, 2);
        check_lists_eq(result.counts.rows_per_expert, counted, "rows per expert");
        for (std::int64_t& rows : counted)
          rows = (rows + alignment - 1) / alignment * alignment;
        check_lists_eq(result.counts.aligned_rows_per_expert, counted, "aligned rows per expert");
        combine_and_check(communication, world, plan, result, result.handle);
      }
    }));
  }
}

// True counts 3, 0, 8, 9 with alignment 8 (C49).
TEST(CountsAgreeWithIds, AlignedCountsKeepTheTrueOnes) {
  CaseWorld made;
  made.params.max_tokens_per_rank = 20;
  IdTable table = repeated(3, {0});
  for (int i = 0; i < 8; ++i)
    table.push_back({2});
  for (int i = 0; i < 9; ++i)
    table.push_back({3});
  made.ids = {table};
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(1, [&](const Group& group) {
    Communication communication = communication_for(group, "high_throughput", world.spec);
    DispatchResult result;
    moe_round(communication, world, {.expert_alignment = 8}, result);
    check_lists_eq(result.counts.rows_per_expert, std::vector<std::int64_t>{3, 0, 8, 9}, "rows per expert");
    check_lists_eq(result.counts.aligned_rows_per_expert, std::vector<std::int64_t>{8, 0, 8, 16}, "aligned");
    check_eq(result.counts.num_rows, 20, "rows");
  }));
}

}  // namespace
}  // namespace tokenyard::support
