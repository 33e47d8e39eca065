// SPDX-License-Identifier: Apache-2.0
// C02, C05: a rank that sends nothing still receives, in any number of ranks; its tensors may have null pointers, and
// only then.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class RankWithoutTokens : public EachBackend {};

// Rank 0 sends nothing and receives everything (C02).
TEST_P(RankWithoutTokens, StillReceives) {
  CaseWorld made;
  made.params = {.num_experts = 24, .top_k = 6, .hidden_size = 8, .max_tokens_per_rank = 4, .dtype = Dtype::kF32};
  made.ids.assign(4, repeated(4, {0, 1, 2, 3, 4, 5}));
  made.ids[0].clear();
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    moe_round(communication, world, {}, result);
    if (communication.contract().id_space == IdSpace::kCargo) return;
    const bool first = group.rank() == 0;
    check_eq(result.counts.num_rows, first ? 12 : 0, "rows received");
    check_lists_eq(result.counts.rows_per_expert, std::vector<std::int64_t>(6, first ? 12 : 0), "rows per expert");
  }));
}

// One token in sixteen ranks (C02).
TEST_P(RankWithoutTokens, OneTokenInSixteenRanks) {
  CaseWorld made;
  made.params = {.num_experts = 32, .top_k = 8, .hidden_size = 8, .max_tokens_per_rank = 4, .dtype = Dtype::kF32};
  made.ids.assign(16, {});
  made.ids[0] = {{31, 0, 5, 9, 17, 16, 2, 30}};
  EXPECT_NO_THROW(play_worlds(GetParam(), std::vector<World>(4, made.make())));
}

// Views of no rows whose data is null, in every entry point (C05).
TEST_P(RankWithoutTokens, NullPointersOfEmptyTensors) {
  CaseWorld made{.ids = {repeated(2, {0}), {}}};
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    moe_round(communication, world, {}, result);
    const RankTensors tensors(world, group.rank(), false);
    DispatchInput input = tensors.input();
    if (group.rank() == 1) {
      for (TensorView* view : {&input.hidden_states, &input.topk_ids, &input.topk_weights})
        view->data = nullptr;
      if (auto* query = communication.get<RouteQuery>()) {
        check_lists_eq(query->layout(input.topk_ids).num_tokens_per_rank, std::vector<std::int32_t>{0, 0}, "layout");
      }
    }
    check_ok(communication.dispatch(input, {}, result), "dispatch");
    check_result(communication, world, {}, result);
    Tensor rows(Dtype::kF32, {num_flat_rows(result.hidden_states), 16});
    Tensor output(Dtype::kF32, {2, 16});
    TensorView view = group.rank() == 1 ? TensorView(nullptr, Dtype::kF32, {0, 16}) : output.view();
    TensorView given = rows.view();
    if (rows.num_rows() == 0) given.data = nullptr;
    check_ok(communication.combine(result.handle, {.expert_output = given}, {}, view), "combine");
  }));
}

// A null pointer with one row is an argument error of that rank (C05).
TEST_P(RankWithoutTokens, NullPointerWithRowsIsAnError) {
  const World world = CaseWorld{.ids = std::vector<IdTable>(2, repeated(1, {0}))}.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    DispatchInput input = tensors.input();
    if (group.rank() == 1) {
      input.topk_weights.data = nullptr;
      check_throws(ErrorCode::kInvalidArgument, {"topk_weights"},
                   [&] { (void)communication.dispatch(input, {}, result); });
    } else {
      check_fault(communication.dispatch(input, {}, result), StatusCode::kAborted, 1, Phase::kDispatch);
    }
    moe_round(communication, world, {}, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, RankWithoutTokens, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
