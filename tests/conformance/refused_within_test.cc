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

// Which ranks refuse, and how many dispatches each.
struct Refusals {
  std::function<bool(int rank)> by;
  int in_a_row = 1;
};

const std::vector<Refusals>& all_refusals() {
  static const std::vector<Refusals> all{{[](int rank) { return rank == 1; }},
                                         {[](int rank) { return rank != 1; }},
                                         {[](int /*rank*/) { return true; }},
                                         {[](int rank) { return rank == 0; }, 2}};
  return all;
}

class RefusedWithin : public ::testing::TestWithParam<std::tuple<std::string_view, Where>> {
 protected:
  static void refuse(Communication& communication, const Refusals& refusals) {
    if (!refusals.by(communication.rank())) return;
    for (int time = 0; time < refusals.in_a_row; ++time) {
      DispatchResult nothing;
      bool refused = false;
      try {
        (void)communication.dispatch({}, {}, nothing);
      } catch (const Error&) {
        refused = true;
      }
      check(refused, "a dispatch of nothing was not refused");
    }
  }

  // The others' dispatches that the refusals end.
  static void meet_refusals(Communication& communication, const World& world, const Refusals& refusals) {
    if (refusals.by(communication.rank())) return;
    const RankTensors tensors(world, communication.rank(), false);
    for (int time = 0; time < refusals.in_a_row; ++time) {
      DispatchResult result;
      const Status status = communication.dispatch(tensors.input(), {}, result);
      check_fault(status, StatusCode::kAborted, status.fault.peer, Phase::kDispatch);
      check(refusals.by(status.fault.peer), "a rank is named that has not refused: " + status.message());
    }
  }

  static void play(Communication& communication, Where where, const Refusals& refusals, std::uint64_t seed) {
    const World world = make_world(small_spec(kRanks, seed));
    int times = 0;
    RoundPlan plan;
    if (where == Where::kBetweenHalves) {
      plan.between_halves = [&] {
        if (times++ == 0) refuse(communication, refusals);
      };
    }
    DispatchResult result;
    dispatch_and_check(communication, world, plan, result);
    if (where == Where::kBeforeCombine) refuse(communication, refusals);
    combine_and_check(communication, world, plan, result, result.handle);
    meet_refusals(communication, world, refusals);
    play_round(communication, world, {}, result);
  }
};

TEST_P(RefusedWithin, TheRoundThatIsOpenGoesOn) {
  const auto [backend, where] = GetParam();
  EXPECT_NO_THROW(run_ranks(kRanks, [name = backend, where = where](const Group& group) {
    Communication communication = communication_for(group, name, small_spec(kRanks));
    std::uint64_t seed = 1;
    // Twice, because places in the window go by epochs.
    for (int time = 0; time < 2; ++time) {
      for (const Refusals& refusals : all_refusals()) {
        // The second one would have the place of the round that is open, so that the peers are not told of it.
        if (communication.contract().max_in_flight > 1 && refusals.in_a_row > 1) continue;
        play(communication, where, refusals, ++seed);
      }
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
