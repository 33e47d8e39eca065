// SPDX-License-Identifier: Apache-2.0
// C118: other collectives between the phases are fine in the same order on all ranks; in another order every rank gets
// an error within its deadline that says what it waited in and for whom.
#include <chrono>
#include <latch>

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class CollectivesInAnotherOrder : public EachBackend {};

constexpr std::chrono::milliseconds kDeadline{300};

World two_ranks() {
  return CaseWorld{.ids = std::vector<IdTable>(2, IdTable{{0}, {3}})}.make();
}

TEST_P(CollectivesInAnotherOrder, TheSameOrderWorks) {
  const World world = two_ranks();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    for (int round = 0; round < 10; ++round) {
      group.barrier();
      dispatch_and_check(communication, world, {}, result);
      const std::byte mine{static_cast<unsigned char>(group.rank())};
      const std::vector<Bytes> all = group.all_gather({&mine, 1});
      check_eq(std::to_integer<int>(all[1][0]), 1, "what rank 1 gave");
      moe_combine(communication, world, {}, result);
    }
  }));
}

// Rank 0 dispatches and then meets the group, rank 1 the other way round.
TEST_P(CollectivesInAnotherOrder, AnotherOrderIsATimeoutOnBoth) {
  const World world = two_ranks();
  std::latch missed(1);  // rank 1 has given its barrier up
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    CommunicationOptions options = test_options();
    options.deadline = options.first_round_deadline = kDeadline;
    Communication communication = communication_for(group, GetParam(), world.spec, options);
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    const Stopwatch stopwatch;
    if (group.rank() == 0) {
      const Status status = communication.dispatch(tensors.input(), {}, result);
      check_fault(status, StatusCode::kTimeout, 1, Phase::kDispatch);
      check_contains(status.message(), {"dispatch"});
      check_fault(communication.poll(), StatusCode::kTimeout, 1, Phase::kDispatch);
    } else {
      try {
        check_throws(ErrorCode::kTimeout, {"rank 0"}, [&] { group.barrier(kDeadline); });
      } catch (...) {
        missed.count_down();
        throw;
      }
      missed.count_down();
    }
    stopwatch.check_below(2 * kDeadline + std::chrono::milliseconds(500), "the call out of order");
    // A collective that timed out counts as made on rank 1; rank 0 makes its own. Its results are there or gone.
    if (group.rank() == 0) {
      missed.wait();
      try {
        group.barrier(kDeadline);
      } catch (const Error& error) {
        check(error.code() == ErrorCode::kTimeout, error.what());
      }
    }
    check_ok(communication.reset(), "reset");
    for (int round = 0; round < 3; ++round)
      moe_round(communication, world, {}, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, CollectivesInAnotherOrder, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
