// SPDX-License-Identifier: Apache-2.0
// Twenty thousand rounds over ten communications at once, two of every moving backend: made, grown, ended and made
// again in between. Every answer of every round is checked against the plain reference, and at the end the process
// holds what it held before: no descriptor, mapping, thread or heap more.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "steady/allocation_counter.h"
#include "steady/holdings.h"
#include "steady/soak_line.h"
#include "support/check.h"
#include "support/run_ranks.h"

namespace tokenyard::steady_tests {
namespace {

using support::Rng;

constexpr int kNumRanks = 4;
constexpr std::uint64_t kSeed = 20'270'131;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
// Some ten times slower there; enough for every act of every line.
constexpr int kRounds = 1'000;
#else
constexpr int kRounds = 20'000;
#endif
constexpr int kWarmUpRounds = kRounds / 10;
constexpr std::int64_t kNewOnceIn = 200;  // rounds
// Lists that a later round fills further than any before it keep what they have.
constexpr std::int64_t kSpareBlocks = 4;
constexpr std::int64_t kSpareBytes = 16 * 1024;

// Sanitizers stand in front of the heap; the address sanitizer looks for leaks itself, when the program ends.
#ifndef TOKENYARD_COUNTS_HEAP
HeapInUse heap_in_use() {
  return {};
}
#endif

class MixedSoak {
 public:
  explicit MixedSoak(const Group& group) : group_(group), rng_(kSeed) {
    for (SoakLineSpec& spec : soak_lines(group.num_ranks()))
      lines_.emplace_back(std::move(spec));
  }

  void create() {
    for (SoakLine& line : lines_)
      line.create(group_);
  }

  void destroy() {
    for (SoakLine& line : lines_)
      line.end(group_, true);
  }

  // How many queues there are for lines that take turns depends on the order in which these were made.
  void settle() {
    for (SoakLine& line : lines_)
      if (line.takes_turns()) line.end(group_, true);
    for (SoakLine& line : lines_)
      if (!line.lives()) line.create(group_);
  }

  void play(int rounds) {
    for (const int end = round_ + rounds; round_ < end;)
      play_one();
  }

 private:
  // A round of another line may lie inside of one, and counts too.
  void play_one() {
    const auto at = static_cast<std::size_t>(rng_.below(std::ssize(lines_)));
    const SoakAct act = lines_[at].draw_act(rng_);
    const std::size_t other = draw_other(at, act);
    const int round = round_++;
    try {
      if (rng_.below(kNewOnceIn) == 0) {
        lines_[at].end(group_, rng_.below(2) == 0);
        lines_[at].create(group_);
      }
      lines_[at].play(act, rng_.next(), [&] {
        ++round_;
        lines_[other].play(SoakAct::kRound, rng_.next(), nullptr);
      });
    } catch (const std::exception& failure) {
      throw support::CheckFailure("seed " + std::to_string(kSeed) + ", round " + std::to_string(round) + ", " +
                                  lines_[at].name() + ", " + std::string(name(act)) +
                                  " (between, if any: " + lines_[other].name() + "): " + failure.what());
    }
  }

  std::size_t draw_other(std::size_t at, SoakAct act) {
    std::size_t other = (at + 1 + static_cast<std::size_t>(rng_.below(std::ssize(lines_) - 1))) % lines_.size();
    const bool turns = act == SoakAct::kStraddle && lines_[at].takes_turns();
    while (other == at || (turns && lines_[other].takes_turns()))
      other = (other + 1) % lines_.size();
    return other;
  }

  Group group_;
  Rng rng_;
  std::vector<SoakLine> lines_;
  int round_ = 0;
};

std::string text(const Holdings& held) {
  std::ostringstream out;
  out << held;
  return out.str();
}

std::string text(const HeapInUse& heap) {
  return std::to_string(heap.blocks) + " blocks of " + std::to_string(heap.bytes) + " bytes";
}

struct Count {
  Holdings held;
  HeapInUse heap;
};

// What is counted is the process's: ranks that are threads count in turn, while the others have come to wait.
void count(const Group& group, Count& counted) {
  for (int rank = 0; rank < group.num_ranks(); ++rank) {
    group.barrier();
    if (rank != group.rank()) continue;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    counted.heap = heap_in_use();
    counted.held = holdings();
  }
  group.barrier();
}

void check_no_more(const Count& before, const Count& after, const std::string& when) {
  const std::string where = "seed " + std::to_string(kSeed) + ", after round " + std::to_string(kRounds) + ", " + when;
  support::check(after.held == before.held, where + ": held " + text(before.held) + "; now " + text(after.held));
  const bool same =
      after.heap.blocks - before.heap.blocks <= kSpareBlocks && after.heap.bytes - before.heap.bytes <= kSpareBytes;
  support::check(same, where + ": the heap held " + text(before.heap) + "; now " + text(after.heap));
}

void soak(const Group& group) {
  Count without;
  count(group, without);
  Count with = without;
  Count after = without;  // all there, so that counting adds nothing to the heap
  MixedSoak soak(group);
  soak.create();
  soak.play(kWarmUpRounds);
  soak.destroy();
  count(group, without);  // what the first use of anything keeps for good is in it
  soak.create();
  soak.play(kWarmUpRounds);
  soak.settle();
  count(group, with);
  support::check(with.held.memfd_mappings > without.held.memfd_mappings, "no window is mapped");
  soak.play(kRounds - 2 * kWarmUpRounds);
  soak.settle();
  count(group, after);
  check_no_more(with, after, "with every communication alive");
  soak.destroy();
  count(group, after);
  check_no_more(without, after, "with every communication gone");
}

class MixedSoakTest : public testing::TestWithParam<support::RankKind> {};

TEST_P(MixedSoakTest, TwentyThousandRoundsLeaveNothing) {
  EXPECT_NO_THROW(support::run(GetParam(), kNumRanks, soak, {.limit = std::chrono::seconds(100)}));
}

INSTANTIATE_TEST_SUITE_P(RankKinds,
                         MixedSoakTest,
                         testing::Values(support::RankKind::kThreads, support::RankKind::kProcesses),
                         [](const auto& tested) { return std::string(support::name(tested.param)); });

}  // namespace
}  // namespace tokenyard::steady_tests
