// SPDX-License-Identifier: Apache-2.0
// The suites' own tools must notice what they are there for: failures, hangs, stray writes.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "support/check.h"
#include "support/run_ranks.h"
#include "support/tensor.h"

namespace tokenyard::support {
namespace {

std::string failure_of(RankKind kind, const RankFunction& fn, const RunOptions& options = {}) {
  try {
    run(kind, 3, fn, options);
  } catch (const CheckFailure& failure) {
    return failure.what();
  }
  return "";
}

class RunRanks : public ::testing::TestWithParam<RankKind> {};

TEST_P(RunRanks, RethrowsAFailureWithItsRank) {
  EXPECT_EQ(failure_of(GetParam(), [](const Group& group) { check(group.rank() != 1, "broken"); }), "rank 1: broken");
  EXPECT_EQ(failure_of(GetParam(), [](const Group& group) { group.barrier(); }), "");
}

INSTANTIATE_TEST_SUITE_P(Kinds,
                         RunRanks,
                         ::testing::Values(RankKind::kThreads, RankKind::kProcesses),
                         [](const auto& kind) { return std::string(name(kind.param)); });

void hang_on_rank_one(const Group& group) {
  if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(30));
}

TEST(RunRanksWatchdog, NamesHungProcesses) {
  const std::string failure = failure_of(RankKind::kProcesses, hang_on_rank_one, {.limit = std::chrono::seconds(1)});
  EXPECT_NE(failure.find("these ranks hang: 1"), std::string::npos) << failure;
}

TEST(RunRanksWatchdog, EndsTheProgramForHungThreads) {
  EXPECT_EXIT(run_ranks(3, hang_on_rank_one, {.limit = std::chrono::seconds(1)}), ::testing::ExitedWithCode(1),
              "these ranks hang: 1");
}

TEST(RunProcesses, ReportsAKilledRank) {
  const std::string failure = failure_of(RankKind::kProcesses, [](const Group& group) {
    if (group.rank() == 2) std::_Exit(7);
  });
  EXPECT_NE(failure.find("rank 2: ended with wait status"), std::string::npos) << failure;
}

TEST(GuardedTensor, SeesWritesOutsideItsRows) {
  for (const std::int64_t offset : {-1, 6, 7, 8, 26}) {  // rows of 6 bytes, 4 bytes apart, 3 of them
    Tensor tensor(Dtype::kBf16, {3, 3}, {.padding_elements = 2});
    EXPECT_NO_THROW(tensor.check_guards("tensor"));
    *(static_cast<std::byte*>(tensor.view().data) + offset) = std::byte{0};
    EXPECT_THROW(tensor.check_guards("tensor"), CheckFailure) << offset;
  }
}

TEST(GuardedTensor, SeesChangedElements) {
  Tensor tensor(Dtype::kU8, {2, 3});
  tensor.fill(std::vector<std::byte>(6, std::byte{1}));
  EXPECT_NO_THROW(tensor.check_unchanged("tensor"));
  *tensor.row(1) = std::byte{2};
  EXPECT_NO_THROW(tensor.check_guards("tensor"));
  EXPECT_THROW(tensor.check_unchanged("tensor"), CheckFailure);
}

}  // namespace
}  // namespace tokenyard::support
