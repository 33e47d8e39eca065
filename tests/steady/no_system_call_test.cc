// SPDX-License-Identifier: Apache-2.0
// A steady-state round asks nothing of the system but to wait: yield, sleep, futex, clock.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "steady/steady_rank.h"
#include "steady/system_call_watch.h"
#include "support/backends.h"

namespace tokenyard::steady_tests {

namespace {

constexpr int kWarmUpRounds = 3;
constexpr int kWatchedRounds = 5;
constexpr std::chrono::milliseconds kPatience{20'000};

using Record = SystemCallWatch::Record;

// Ends `_exit`: what a destructor asks of the system is none of the round's doing.
int run_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      body();
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "%s\n", failure.what());
      ::_exit(EXIT_FAILURE);
    }
    ::_exit(EXIT_SUCCESS);
  }
  return child;
}

void expect_clean_end(pid_t child) {
  int state = 0;
  ASSERT_EQ(::waitpid(child, &state, 0), child);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == EXIT_SUCCESS) << "wait status " << state;
}

void expect_only_waiting(const Record& record, int num_ranks) {
  EXPECT_FALSE(record.failed) << "a round failed";
  EXPECT_EQ(record.num_finished, num_ranks);
  EXPECT_EQ(record.num_calls, 0) << "the first was " << SystemCallWatch::name_of(record.first_call);
}

// Waits for all ranks by allowed calls only.
void await_ranks(const Record& record, int num_ranks) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (record.num_finished < num_ranks && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void play_watched(SteadyRank& rank, Record& record) {
  bool ok = true;
  for (int round = 0; round < kWatchedRounds; ++round)
    ok = rank.play() && ok;
  if (!ok) record.failed = true;
  ++record.num_finished;
}

// In a child: rank threads of one group under one filter for all threads, workers too.
void run_threads(const SteadyCase& value, Record& record) {
  const std::vector<Group> groups = Group::in_process(value.num_ranks);
  std::barrier together(value.num_ranks);
  for (const Group& group : groups) {
    std::thread([&] {
      SteadyRank rank(group, value);
      for (int round = 0; round < kWarmUpRounds; ++round)
        if (!rank.play()) record.failed = true;
      together.arrive_and_wait();
      if (group.rank() == 0) SystemCallWatch::begin(record, SystemCallWatch::Scope::kAllThreads);
      together.arrive_and_wait();
      play_watched(rank, record);
      await_ranks(record, value.num_ranks + 1);  // the process ends under it
    }).detach();
  }
  await_ranks(record, value.num_ranks);
  ::_exit(EXIT_SUCCESS);
}

// In a child of its own each: only the rank's thread is watched, for rank 0 also serves the group's store.
void run_process(const SteadyCase& value, const std::string& group_name, int index, Record& record) {
  const Group group = Group::on_host(group_name, index, value.num_ranks);
  SteadyRank rank(group, value);
  for (int round = 0; round < kWarmUpRounds; ++round)
    if (!rank.play()) record.failed = true;
  SystemCallWatch::begin(record, SystemCallWatch::Scope::kThisThread);
  play_watched(rank, record);
  await_ranks(record, value.num_ranks);
  ::_exit(EXIT_SUCCESS);
}

class NoSystemCall : public testing::TestWithParam<SteadyCase> {
 protected:
  void SetUp() override {
    std::string reason;
    if (!SystemCallWatch::permitted(reason)) GTEST_SKIP() << reason;
  }
};

class NoSystemCallOfThreads : public NoSystemCall {};

class NoSystemCallOfProcesses : public NoSystemCall {};

TEST_P(NoSystemCallOfThreads, ButWaiting) {
  Record& record = SystemCallWatch::make_record();
  expect_clean_end(run_child([&] { run_threads(GetParam(), record); }));
  expect_only_waiting(record, GetParam().num_ranks);
}

TEST_P(NoSystemCallOfProcesses, ButWaiting) {
  Record& record = SystemCallWatch::make_record();
  std::random_device device;
  const std::string group_name = "tokenyard-steady-" + std::to_string(::getpid()) + "-" + std::to_string(device());
  std::vector<pid_t> children;
  children.reserve(static_cast<std::size_t>(GetParam().num_ranks));
  for (int index = 0; index < GetParam().num_ranks; ++index)
    children.push_back(run_child([&] { run_process(GetParam(), group_name, index, record); }));
  for (const pid_t child : children)
    expect_clean_end(child);
  expect_only_waiting(record, GetParam().num_ranks);
}

// Worker threads are watched only where ranks are threads.
std::vector<SteadyCase> cases(const std::vector<int>& thread_counts) {
  std::vector<SteadyCase> all;
  for (const std::string_view backend : support::kMovingBackends) {
    for (const Variant variant :
         {Variant::kViews, Variant::kZeroCopy, Variant::kSplit, Variant::kReplay, Variant::kTurns}) {
      for (const int num_threads : thread_counts) {
        const SteadyCase value{.backend = backend, .variant = variant, .num_threads = num_threads};
        if (possible(value)) all.push_back(value);
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Backends, NoSystemCallOfThreads, testing::ValuesIn(cases({1, 2})), [](const auto& tested) {
  return name(tested.param);
});

INSTANTIATE_TEST_SUITE_P(Backends, NoSystemCallOfProcesses, testing::ValuesIn(cases({1})), [](const auto& tested) {
  return name(tested.param);
});

// The watch itself can see.
TEST(SystemCallWatchTest, WritesDownTheFirstCall) {
  std::string reason;
  if (!SystemCallWatch::permitted(reason)) GTEST_SKIP() << reason;
  Record& record = SystemCallWatch::make_record();
  expect_clean_end(run_child([&] {
    SystemCallWatch::begin(record, SystemCallWatch::Scope::kThisThread);
    std::this_thread::yield();
    (void)::getppid();
    (void)::getuid();
  }));
  EXPECT_EQ(record.num_calls, 2);
  EXPECT_EQ(SystemCallWatch::name_of(record.first_call).substr(0, 8), "getppid ");
}

}  // namespace
}  // namespace tokenyard::steady_tests
