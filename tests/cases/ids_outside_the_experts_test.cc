// SPDX-License-Identifier: Apache-2.0
// C16, C26: ids outside [0, num_experts) are rejected with their place, never looked up; the configured invalid id,
// also num_experts itself, is skipped.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class IdsOutsideTheExperts : public EachBackend {};

// Wrong ids in turn: an error on the rank that has them, naming token and slot; as cargo they just travel (C16).
TEST_P(IdsOutsideTheExperts, AreNeverIndexed) {
  CaseWorld made{.ids = std::vector<IdTable>(2, repeated(4, {1, 6})), .id_dtype = Dtype::kI32};
  made.params.num_experts = 8;
  made.params.top_k = 2;
  const World right = made.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), right.spec);
    const bool cargo = communication.contract().id_space == IdSpace::kCargo;
    DispatchResult result;
    for (const std::int64_t id : {8L, 9L, 2'147'483'647L, -2L, -2'147'483'648L}) {
      World wrong = right;
      wrong.rank(1).ids[2 * 3 + 1] = id;
      if (cargo) {
        dispatch_and_check(communication, wrong, {}, result);
        continue;
      }
      const RankTensors tensors(wrong, group.rank(), false);
      if (group.rank() == 1) {
        check_throws(ErrorCode::kInvalidArgument, {std::to_string(id), "3", "1"},
                     [&] { (void)communication.dispatch(tensors.input(), {}, result); });
      } else {
        check_fault(communication.dispatch(tensors.input(), {}, result), StatusCode::kAborted, 1, Phase::kDispatch);
      }
      tensors.check_unchanged();
    }
    moe_round(communication, right, {}, result);
  }));
}

// The sentinel num_experts next to a live id is skipped (C26).
TEST(IdsOutsideTheExpertsOfOneSided, SentinelIsSkipped) {
  CaseWorld made{.ids = {repeated(3, {3, 8}), repeated(2, {8, 8})}};
  made.params.num_experts = 8;
  made.params.top_k = 2;
  made.params.invalid_expert_id = 8;
  EXPECT_NO_THROW(play_worlds("one_sided", std::vector<World>(3, made.make())));
}

INSTANTIATE_TEST_SUITE_P(Backends, IdsOutsideTheExperts, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
