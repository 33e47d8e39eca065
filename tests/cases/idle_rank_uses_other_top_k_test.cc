// SPDX-License-Identifier: Apache-2.0
// C07: an idle rank that builds its empty ids with another top-k is told so, and the others do not hang.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class IdleRankOtherTopK : public EachBackend {};

TEST_P(IdleRankOtherTopK, IsAcceptedOrReportedQuickly) {
  CaseWorld made{.ids = {repeated(2, {0, 1, 6, 7}), {}}};
  made.params.num_experts = 8;
  made.params.top_k = 4;
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    DispatchInput input = tensors.input();
    const Stopwatch stopwatch;
    if (group.rank() == 1) {
      Tensor narrow(Dtype::kI64, {0, 3});
      input.topk_ids = narrow.view();
      check_throws(ErrorCode::kInvalidArgument, {"3", "4"}, [&] { (void)communication.dispatch(input, {}, result); });
    } else {
      check_fault(communication.dispatch(input, {}, result), StatusCode::kAborted, 1, Phase::kDispatch);
    }
    stopwatch.check_below(std::chrono::milliseconds(1'000), "the failed dispatch");
    moe_round(communication, world, {}, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, IdleRankOtherTopK, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
