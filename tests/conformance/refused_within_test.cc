// SPDX-License-Identifier: Apache-2.0
// A dispatch that some ranks refuse while a round of theirs is open: between its halves, before its combine or within
// it. It uses up an epoch and is told to the others; the open round gives the right rows all the same, and so do those
// that follow.
#include <gtest/gtest.h>

#include <functional>
#include <tuple>

#include "conformance/small_spec.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

constexpr int kRanks = 3;

enum class Where { kBetweenHalves, kBeforeCombine };

// Which ranks refuse: rank 1, all others, all.
constexpr int kCulprits = 3;

bool refuses(int culprits, int rank) {
  return culprits == 2 || (rank == 1) == (culprits == 0);
}

class RefusedWithin : public ::testing::TestWithParam<std::tuple<std::string_view, Where>> {
 protected:
  static void refuse(Communication& communication) {
    DispatchResult nothing;
    bool refused = false;
    try {
      (void)communication.dispatch({}, {}, nothing);
    } catch (const Error&) {
      refused = true;
    }
    check(refused, "a dispatch of nothing was not refused");
  }

  // Several rounds each, because places in the window go by epochs.
  static void play(Communication& communication, Where where, int culprits, std::uint64_t seed) {
    const int rank = communication.rank();
    const World world = make_world(small_spec(kRanks, seed));
    int times = 0;
    RoundPlan plan;
    if (where == Where::kBetweenHalves) {
      plan.between_halves = [&] {
        if (times++ == 0 && refuses(culprits, rank)) refuse(communication);
      };
    }
    DispatchResult result;
    dispatch_and_check(communication, world, plan, result);
    if (where == Where::kBeforeCombine && refuses(culprits, rank)) refuse(communication);
    combine_and_check(communication, world, plan, result, result.handle);
    if (!refuses(culprits, rank)) {
      const RankTensors tensors(world, rank, false);
      const Status status = communication.dispatch(tensors.input(), {}, result);
      check_fault(status, StatusCode::kAborted, status.fault.peer, Phase::kDispatch);
      check(refuses(culprits, status.fault.peer), "a rank is named that has not refused: " + status.message());
    }
    result.handle = Handle();
    play_round(communication, world, {}, result);
  }
};

TEST_P(RefusedWithin, TheRoundThatIsOpenGoesOn) {
  const auto [backend, where] = GetParam();
  EXPECT_NO_THROW(run_ranks(kRanks, [name = backend, where = where](const Group& group) {
    Communication communication = communication_for(group, name, small_spec(kRanks));
    std::uint64_t seed = 1;
    for (int time = 0; time < 2; ++time) {
      for (int culprits = 0; culprits < kCulprits; ++culprits)
        play(communication, where, culprits, ++seed);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Cases,
                         RefusedWithin,
                         ::testing::Combine(::testing::ValuesIn(kMovingBackends),
                                            ::testing::Values(Where::kBetweenHalves, Where::kBeforeCombine)),
                         [](const auto& of) {
                           return std::string(std::get<0>(of.param)) + (std::get<1>(of.param) == Where::kBetweenHalves
                                                                            ? "_between_halves"
                                                                            : "_before_combine");
                         });

}  // namespace
}  // namespace tokenyard::support
