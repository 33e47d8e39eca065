// SPDX-License-Identifier: Apache-2.0
#include "engine/host/thread_team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tokenyard/error.h"

namespace tokenyard::engine::host {
namespace {

TEST(ThreadTeamTest, EveryItemIsDoneOnceByBalancedContiguousParts) {
  for (const int num_threads : {1, 2, 3, 8}) {
    ThreadTeam team(num_threads);
    EXPECT_EQ(team.num_threads(), num_threads);
    for (const std::int64_t num_items : {0, 1, 2, 7, 8, 9, 1000}) {
      std::vector<int> done(static_cast<std::size_t>(num_items));  // plain ints: the thread sanitizer sees overlap
      std::vector<std::int64_t> items_of_thread(static_cast<std::size_t>(num_threads));
      team.run(num_items, [&](std::int64_t begin, std::int64_t end, int thread_index) {
        items_of_thread.at(static_cast<std::size_t>(thread_index)) += end - begin;
        for (std::int64_t i = begin; i < end; ++i)
          ++done.at(static_cast<std::size_t>(i));
      });
      EXPECT_EQ(done, std::vector<int>(static_cast<std::size_t>(num_items), 1));
      for (const std::int64_t items : items_of_thread) {
        EXPECT_LE(items, num_items / num_threads + 1);
        EXPECT_GE(items, num_items > 1 ? num_items / num_threads : 0);
      }
    }
  }
}

TEST(ThreadTeamTest, PartsRunOnTheirOwnThreadsAndTheCallerIsThreadZero) {
  ThreadTeam team(3);
  std::vector<std::thread::id> ids(3);
  std::vector<std::thread::id> again(3);
  const auto note = [](std::vector<std::thread::id>& to) {
    return [&to](std::int64_t, std::int64_t, int index) {
      to[static_cast<std::size_t>(index)] = std::this_thread::get_id();
    };
  };
  team.run(3, note(ids));
  team.run(3, note(again));
  EXPECT_EQ(ids[0], std::this_thread::get_id());
  EXPECT_NE(ids[1], ids[0]);
  EXPECT_NE(ids[2], ids[0]);
  EXPECT_NE(ids[1], ids[2]);
  EXPECT_EQ(ids, again) << "threads are kept between runs";
}

TEST(ThreadTeamTest, RunsFollowEachOtherAwakeAndAsleep) {
  ThreadTeam team(4);
  std::vector<std::int64_t> sums(4);  // plain: each run must see the writes of the one before
  constexpr int kRuns = 2000;
  for (int run = 0; run < kRuns; ++run) {
    // Longer than the workers stay awake, now and then; and a worker that keeps the caller asleep.
    if (run % 400 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    team.run(4, [&](std::int64_t begin, std::int64_t, int index) {
      if (run % 400 == 1 && index == 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      sums[static_cast<std::size_t>((begin + run) % 4)] += begin + 1;
    });
  }
  std::int64_t total = 0;
  for (const std::int64_t sum : sums)
    total += sum;
  EXPECT_EQ(total, kRuns * (1 + 2 + 3 + 4));
}

TEST(ThreadTeamTest, TheLowestThreadsExceptionReachesTheCallerAfterAllAreDone) {
  ThreadTeam team(4);
  std::atomic<int> finished{0};
  const auto fail = [&](std::int64_t, std::int64_t, int index) {
    if (index == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ++finished;
    if (index == 1 || index == 3) throw std::runtime_error("thread " + std::to_string(index));
  };
  for (int repeat = 0; repeat < 3; ++repeat) {
    finished = 0;
    try {
      team.run(4, fail);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "thread 1");
      EXPECT_EQ(finished.load(), 4);
    }
  }
  int sum = 0;
  EXPECT_THROW(team.run(1, [](std::int64_t, std::int64_t, int) { throw std::logic_error("inline"); }),
               std::logic_error);
  team.run(1, [&](std::int64_t, std::int64_t end, int) { sum += static_cast<int>(end); });
  EXPECT_EQ(sum, 1);
  team.run(4, [&](std::int64_t, std::int64_t, int) { ++finished; });
  EXPECT_EQ(finished.load(), 8) << "the team works after an exception, and the old one is forgotten";
}

TEST(ThreadTeamTest, RefusesARunInsideARunAndTeamsOfNobody) {
  ThreadTeam team(2);
  try {
    team.run(2, [&](std::int64_t, std::int64_t, int) { team.run(2, [](std::int64_t, std::int64_t, int) {}); });
    ADD_FAILURE() << "a nested run was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidState);
  }
  for (const int num_threads : {0, -3}) {
    try {
      ThreadTeam none(num_threads);
      ADD_FAILURE() << num_threads;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(std::to_string(num_threads)), std::string::npos);
    }
  }
}

TEST(ThreadTeamTest, TeamsCanBeMovedAndDieWithoutARun) {
  for (int i = 0; i < 20; ++i)
    const ThreadTeam unused(4);
  ThreadTeam first(2);
  ThreadTeam second(std::move(first));
  first = ThreadTeam(3);
  std::atomic<int> parts{0};
  const auto count = [&parts](std::int64_t, std::int64_t, int) { ++parts; };
  first.run(3, count);
  second.run(2, count);
  EXPECT_EQ(parts.load(), 5);
}

}  // namespace
}  // namespace tokenyard::engine::host
