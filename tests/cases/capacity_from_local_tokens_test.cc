// SPDX-License-Identifier: Apache-2.0
// C67: ranks that compute a capacity from their own token count, and so disagree, are told or served; nobody hangs.
#include <cstring>

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class CapacityFromLocalTokens : public EachBackend {
 protected:
  // Eight and five tokens, capacity factor 1, every other token for the other rank's expert.
  static World world() {
    CaseWorld made;
    made.ids.resize(2);
    for (const std::int64_t tokens : {8, 5}) {
      for (std::int64_t token = 0; token < tokens; ++token)
        made.ids[tokens == 8 ? 0 : 1].push_back({token % 2 == 0 ? 0 : 2});
    }
    return made.make();
  }
};

class RowLimitFromLocalTokens : public CapacityFromLocalTokens {};

// A fixed number of result rows is a matter of the receiver alone: each keeps its first rows in source order, and the
// origins learn what was dropped.
TEST_P(RowLimitFromLocalTokens, MayDiffer) {
  const World made = world();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), made.spec);
    DispatchResult result;
    for (int round = 0; round < 5; ++round) {
      const RankTensors tensors(made, group.rank(), false);
      const std::int64_t capacity = made.rank(group.rank()).num_tokens;
      check_ok(communication.dispatch(tensors.input(), {.num_worst_tokens = capacity}, result), "dispatch");
      // Expert 0 gets 4 + 3 rows and expert 2 gets 4 + 2.
      const LayoutRule rule{.layout = OutputLayout::kCompact, .num_worst_tokens = capacity};
      const ExpectedDispatch expected = expect_dispatch(made, group.rank(), rule);
      check_eq(result.hidden_states.num_rows(), capacity, "rows of the result");
      check_eq(result.counts.num_rows, group.rank() == 0 ? 7 : 5, "rows kept");
      check_eq(result.counts.dropped_rows, group.rank() == 0 ? 0 : 1, "rows dropped");
      Tensor rows(Dtype::kF32, {capacity, 16}, {.poison = kNanPoison});
      for (const ExpectedRow& row : expected.rows) {
        check_bytes(row_of(result.hidden_states, row.position), made.rank(row.source).hidden.row(row.token), "row");
        std::memcpy(rows.row(row.position), row_of(result.hidden_states, row.position), 64);
      }
      Tensor output(Dtype::kF32, {capacity, 16});
      TensorView view = output.view();
      const Status status = communication.combine(result.handle, {.expert_output = rows.view()}, {}, view);
      check_ok(status, "combine");
      check_eq(status.missing_rows, group.rank() == 1 ? 1 : 0, "rows of this rank that were dropped");
      std::vector<std::byte> want = made.rank(group.rank()).hidden.bytes;
      if (group.rank() == 1) std::memset(want.data() + 3 * 64, 0, 64);  // the last of rank 1's tokens for expert 2
      check_elements(view, want, "y");
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         RowLimitFromLocalTokens,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.takes_num_worst_tokens;
                         })),
                         backend_name);

class BlockSizeFromLocalTokens : public CapacityFromLocalTokens {};

// Blocks of the result must be equally long on all ranks: a mismatch on both, at once, and the next round works.
TEST_P(BlockSizeFromLocalTokens, IsAMismatchOnEveryRank) {
  const World made = world();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), made.spec);
    DispatchResult result;
    for (int round = 0; round < 5; ++round) {
      const RankTensors tensors(made, group.rank(), false);
      const std::int64_t capacity = made.rank(group.rank()).num_tokens;
      const Stopwatch stopwatch;
      check_throws(ErrorCode::kMismatch, {"runtime_max_tokens_per_rank", "8", "5"}, [&] {
        (void)communication.dispatch(tensors.input(), {.runtime_max_tokens_per_rank = capacity}, result);
      });
      stopwatch.check_below(std::chrono::milliseconds(1'000), "the mismatch");
      moe_round(communication, made, {}, result);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         BlockSizeFromLocalTokens,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.takes_runtime_max_tokens;
                         })),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
