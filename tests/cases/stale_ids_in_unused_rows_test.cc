// SPDX-License-Identifier: Apache-2.0
// C17: rows beyond the count of a source carry the chosen invalid id, not the ids of an earlier round.
#include <cstring>

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class StaleIdsInUnusedRows : public ::testing::TestWithParam<int> {};

TEST_P(StaleIdsInUnusedRows, CarryTheSentinel) {
  CaseWorld first{.ids = std::vector<IdTable>(2, repeated(4, {1, 2}))};
  first.params = {.num_experts = 4,
                  .top_k = 2,
                  .hidden_size = 16,
                  .max_tokens_per_rank = 4,
                  .dtype = Dtype::kF32,
                  .invalid_expert_id = GetParam()};
  CaseWorld second = first;
  second.ids = {repeated(1, {1, 2}), repeated(2, {0, 3})};
  // The reference demands the sentinel in every unused row; here the unused ones are also counted by hand.
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, "one_sided", first.make().spec);
    DispatchResult result;
    for (int repeat = 0; repeat < 3; ++repeat) {
      moe_round(communication, first.make(), {}, result);
      dispatch_and_check(communication, second.make(), {}, result);
      int sentinels = 0;
      for (std::int64_t row = 0; row < 8; ++row) {
        std::int64_t id = 0;
        std::memcpy(&id, row_of(result.topk_ids, row), sizeof id);
        sentinels += id == GetParam() ? 1 : 0;
      }
      check_eq(sentinels, 5, "rows with the sentinel");
      combine_and_check(communication, second.make(), {.expert_dtype = Dtype::kF32}, result, result.handle);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Sentinels, StaleIdsInUnusedRows, ::testing::Values(-1, 4));

}  // namespace
}  // namespace tokenyard::support
