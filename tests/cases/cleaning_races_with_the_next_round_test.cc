// SPDX-License-Identifier: Apache-2.0
// C112: a rank that is slow to clean up loses no flag of ranks that have cleaned and dispatch at once.
#include <chrono>
#include <thread>

#include "cases/case_round.h"
#include "support/rng.h"

namespace tokenyard::support {
namespace {

class CleaningRacesWithTheNextRound : public EachBackend {
 protected:
  static World world() {
    CaseWorld made{.ids = std::vector<IdTable>(4, IdTable{{0}, {1}, {2}, {3}, {3}})};
    return made.make();
  }
};

void pause(Rng& rng, bool long_one) {
  std::this_thread::sleep_for(std::chrono::microseconds(long_one ? 1'000 : rng.below(300)));
}

// `reset` cleans on every rank; rank 3 comes late to it, and every rank dispatches as soon as its own is done.
TEST_P(CleaningRacesWithTheNextRound, Reset) {
  const World made = world();
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), made.spec);
    DispatchResult result;
    Rng rng(static_cast<std::uint64_t>(group.rank()));
    for (int round = 0; round < 50; ++round) {
      pause(rng, group.rank() == 3);
      check_ok(communication.reset(), "reset");
      moe_round(communication, made, {}, result, Experts::kIdentity);
    }
  }));
}

// A reset in the middle of a round, which it forgets.
TEST_P(CleaningRacesWithTheNextRound, ResetOfAnOpenRound) {
  const World made = world();
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), made.spec);
    DispatchResult result;
    Rng rng(static_cast<std::uint64_t>(group.rank()) + 10);
    for (int round = 0; round < 50; ++round) {
      dispatch_and_check(communication, made, {}, result);
      pause(rng, group.rank() == round % 4);
      check_ok(communication.reset(), "reset");
      moe_round(communication, made, {}, result, Experts::kIdentity);
    }
  }));
}

// What each rank cleans by itself is the rows of a handle that dies; nobody waits for it.
TEST_P(CleaningRacesWithTheNextRound, HandlesThatDie) {
  const World made = world();
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), made.spec);
    DispatchResult result;
    Rng rng(static_cast<std::uint64_t>(group.rank()) + 20);
    for (int round = 0; round < 50; ++round) {
      dispatch_and_check(communication, made, {}, result);
      pause(rng, group.rank() == 3);
      result.handle = Handle();
    }
    moe_round(communication, made, {}, result, Experts::kIdentity);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, CleaningRacesWithTheNextRound, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
