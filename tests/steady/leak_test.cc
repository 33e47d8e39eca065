// SPDX-License-Identifier: Apache-2.0
// Communications come and go and leave nothing behind: no descriptor, no mapping, no thread.
#include <gtest/gtest.h>

#include <string>

#include "steady/holdings.h"
#include "steady/steady_rank.h"
#include "support/backends.h"
#include "support/check.h"
#include "support/run_ranks.h"

namespace tokenyard::steady_tests {
namespace {

constexpr int kNumRanks = 2;
constexpr int kCommunications = 200;

MoeParams params() {
  return {.num_experts = 4, .top_k = 2, .hidden_size = 64, .max_tokens_per_rank = 16};
}

// While a communication lives, there is something to count.
TEST(HoldingsTest, LiveCommunicationsAreSeen) {
  const Holdings before = holdings();
  support::run_ranks(kNumRanks, [&](const Group& group) {
    Communication communication = create_communication(group, params(), "one_sided");
    group.barrier();
    if (group.rank() == 0) support::check(holdings().memfd_mappings > before.memfd_mappings, "no window is mapped");
    group.barrier();
    (void)communication.destroy();
  });
}

void create_many(const Group& group, bool politely) {
  for (int i = 0; i < kCommunications; ++i) {
    const std::string_view backend = support::kMovingBackends[static_cast<std::size_t>(i) % 3];
    CommunicationOptions options = support::test_options();
    options.num_threads = 1 + i % 2;
    {
      Communication communication = create_communication(group, params(), backend, options);
      if (politely) {
        support::check_ok(communication.destroy(), "destroy");
      } else {
        group.barrier();  // until every rank has the windows
      }
    }
  }
}

// Rounds too: SteadyRank's results, and so their handles, outlive the end of the communication.
void play_and_drop(const Group& group) {
  for (int i = 0; i < 20; ++i) {
    SteadyRank rank(group, {.backend = support::kMovingBackends[static_cast<std::size_t>(i) % 3], .num_threads = 2});
    support::check(rank.play() && rank.play(), "a round failed");
    rank.destroy();
  }
}

void expect_no_leak(support::RankKind kind, const support::RankFunction& fn) {
  if (kind == support::RankKind::kThreads) {
    support::run_ranks(kNumRanks, fn);  // what the first use of anything keeps for good
    const Holdings before = holdings();
    support::run_ranks(kNumRanks, fn);
    EXPECT_EQ(holdings(), before);
    return;
  }
  support::run_processes(kNumRanks, [&](const Group& group) {
    fn(group);
    group.barrier();
    const Holdings before = holdings();
    fn(group);
    group.barrier();
    const Holdings after = holdings();
    support::check(after == before,
                   "before: " + testing::PrintToString(before) + "; after: " + testing::PrintToString(after));
    group.barrier();  // nobody leaves while another still counts
  });
}

class LeakTest : public testing::TestWithParam<support::RankKind> {};

TEST_P(LeakTest, DestroyedCommunicationsLeaveNothing) {
  expect_no_leak(GetParam(), [](const Group& group) { create_many(group, true); });
}

TEST_P(LeakTest, DroppedCommunicationsLeaveNothing) {
  expect_no_leak(GetParam(), [](const Group& group) { create_many(group, false); });
}

TEST_P(LeakTest, UsedCommunicationsLeaveNothing) {
  expect_no_leak(GetParam(), play_and_drop);
}

INSTANTIATE_TEST_SUITE_P(RankKinds,
                         LeakTest,
                         testing::Values(support::RankKind::kThreads, support::RankKind::kProcesses),
                         [](const auto& tested) { return std::string(support::name(tested.param)); });

}  // namespace
}  // namespace tokenyard::steady_tests
