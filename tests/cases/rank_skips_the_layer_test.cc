// SPDX-License-Identifier: Apache-2.0
// C08: a rank that never calls leaves the busy ones with a bounded wait and an error that names it and the phase.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class RankSkipsTheLayer : public EachBackend {};

TEST_P(RankSkipsTheLayer, IsNamedWithinTheDeadline) {
  const World world = CaseWorld{.ids = std::vector<IdTable>(2, repeated(2, {3}))}.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    CommunicationOptions options = test_options();
    options.deadline = std::chrono::milliseconds(200);
    options.first_round_deadline = std::chrono::milliseconds(200);
    Communication communication = communication_for(group, GetParam(), world.spec, options);
    DispatchResult result;
    if (group.rank() == 0) {
      const RankTensors tensors(world, 0, false);
      const Stopwatch stopwatch;
      const Status status = communication.dispatch(tensors.input(), {}, result);
      stopwatch.check_below(std::chrono::milliseconds(1'000), "dispatch without rank 1");
      check_fault(status, StatusCode::kTimeout, 1, Phase::kDispatch);
      check_contains(status.message(), {"rank 1", "dispatch"});
    }
    group.barrier();
    check_ok(communication.reset(), "reset");
    moe_round(communication, world, {}, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, RankSkipsTheLayer, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
