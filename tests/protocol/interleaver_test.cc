// SPDX-License-Identifier: Apache-2.0
// The real engine under hundreds of seeded interleavings of its ranks: whatever the order of steps, every output is
// the one that was sent, and nobody waits in vain.
#include "protocol/interleaver.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "engine/host/word.h"
#include "protocol/scripted_rank.h"
#include "support/rng.h"
#include "support/run_ranks.h"

namespace tokenyard::protocol_tests {
namespace {

using engine::host::TestHooks;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSeeds = 10;  // a sanitizer looks at accesses, which few orders show
#else
constexpr int kSeeds = 300;
#endif
constexpr int kOperations = 7;
constexpr int kMaxTokens = 70;  // two chunks
constexpr std::uint32_t kInitialEpoch = 0xFFFFFFFD;
constexpr std::chrono::milliseconds kDeadline{15'000};

class Hooked {
 public:
  Hooked() { TestHooks::before_step = &Interleaver::step; }

  Hooked(const Hooked&) = delete;
  Hooked& operator=(const Hooked&) = delete;
  Hooked(Hooked&&) = delete;
  Hooked& operator=(Hooked&&) = delete;

  ~Hooked() { TestHooks::before_step = nullptr; }
};

struct Case {
  std::string backend;
  int num_ranks = 2;
};

std::ostream& operator<<(std::ostream& out, const Case& value) {
  return out << value.backend << ", " << value.num_ranks << " ranks";
}

// Returns how often the turn changed hands.
std::int64_t play(const Formula& formula, const std::vector<Operation>& script, std::uint64_t schedule) {
  Interleaver interleaver(formula.num_ranks, schedule);
  support::run_ranks(formula.num_ranks, [&](const Group& group) {
    CommunicationOptions options;
    options.deadline = options.first_round_deadline = kDeadline;
    options.initial_epoch = kInitialEpoch;
    ScriptedRank rank(group, formula, options, [] { Interleaver::step(); });
    {
      const Interleaver::Turn turn(interleaver, group.rank());
      for (const Operation& operation : script)
        rank.play(operation);
    }
    rank.destroy();
  });
  return interleaver.num_switches();
}

class InterleavedRounds : public testing::TestWithParam<Case> {};

TEST_P(InterleavedRounds, GiveWhatWasSentUnderEverySeed) {
  const Hooked hooked;
  std::int64_t switches = 0;
  std::set<Act> played;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const Formula formula = make_formula(GetParam().backend, GetParam().num_ranks, seed, kMaxTokens);
    const std::vector<Operation> script = draw_script(formula, kOperations);
    for (const Operation& operation : script)
      played.insert(operation.act);
    try {
      switches += play(formula, script, seed);
    } catch (const std::exception& failure) {
      FAIL() << "seed " << seed << ": " << failure.what();
    }
  }
  EXPECT_EQ(played.size(), acts_of(make_formula(GetParam().backend, 2, 1, 1)).size());
  // Ranks that ran one after the other would prove nothing.
  EXPECT_GT(switches, std::int64_t{kSeeds} * kOperations * GetParam().num_ranks);
}

// Every act after every other act: what one leaves behind, the next one finds.
TEST_P(InterleavedRounds, FollowEachOtherInEveryOrder) {
  const Hooked hooked;
  const std::vector<Act> acts = acts_of(make_formula(GetParam().backend, 2, 1, 1));
  std::uint64_t seed = 10'000;
  for (const Act first : acts) {
    for (const Act second : acts) {
      const Formula formula = make_formula(GetParam().backend, GetParam().num_ranks, ++seed, kMaxTokens);
      const int last = GetParam().num_ranks - 1;
      const std::vector<Operation> script{{.act = first, .culprit = 0, .number = 0},
                                          {.act = second, .culprit = last, .number = 4},
                                          {.act = first, .culprit = last, .number = 8}};
      try {
        (void)play(formula, script, seed);
      } catch (const std::exception& failure) {
        FAIL() << name(first) << ", " << name(second) << ", seed " << seed << ": " << failure.what();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         InterleavedRounds,
                         testing::Values(Case{"all_gather", 2},
                                         Case{"all_gather", 3},
                                         Case{"high_throughput", 2},
                                         Case{"high_throughput", 3},
                                         Case{"low_latency", 2},
                                         Case{"low_latency", 3},
                                         Case{"one_sided", 2},
                                         Case{"one_sided", 3},
                                         Case{"two_sided", 2},
                                         Case{"two_sided", 3}),
                         [](const testing::TestParamInfo<Case>& tested) {
                           return tested.param.backend + "_" + std::to_string(tested.param.num_ranks);
                         });

// Three communications on the same queues, with rows of different widths: an operation of one, whatever its act, then
// one of another, in an order that is drawn.
void play_in_turns(int num_ranks, std::uint64_t seed) {
  std::vector<Formula> formulas;
  std::vector<std::vector<Operation>> scripts;
  for (const int hidden_size : {16, 4, 40}) {
    formulas.push_back(make_formula("two_sided", num_ranks, seed * 4 + formulas.size(), kMaxTokens));
    formulas.back().params.hidden_size = hidden_size;
    scripts.push_back(draw_script(formulas.back(), kOperations));
  }
  Interleaver interleaver(num_ranks, seed);
  support::run_ranks(num_ranks, [&](const Group& group) {
    CommunicationOptions options;
    options.deadline = options.first_round_deadline = kDeadline;
    options.initial_epoch = kInitialEpoch;
    std::vector<std::unique_ptr<ScriptedRank>> ranks;
    for (const Formula& formula : formulas)
      ranks.push_back(std::make_unique<ScriptedRank>(group, formula, options, [] { Interleaver::step(); }));
    std::vector<std::size_t> played(ranks.size());
    {
      const Interleaver::Turn turn(interleaver, group.rank());
      support::Rng rng(seed);
      for (int i = 0; i < kOperations; ++i) {
        const auto which = static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(ranks.size())));
        ranks[which]->play(scripts[which][played[which]++]);
      }
    }
    for (const auto& rank : ranks)
      rank->destroy();
  });
}

TEST(InterleavedTurns, GiveWhatWasSentUnderEverySeed) {
  const Hooked hooked;
  for (const int num_ranks : {2, 3}) {
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
      try {
        play_in_turns(num_ranks, seed);
      } catch (const std::exception& failure) {
        FAIL() << num_ranks << " ranks, seed " << seed << ": " << failure.what();
      }
    }
  }
}

TEST(InterleaverTest, SameSeedGivesTheSameInterleaving) {
  const Hooked hooked;
  const Formula formula = make_formula("one_sided", 3, 5, kMaxTokens);
  const std::vector<Operation> script(3, Operation{.act = Act::kPlain, .culprit = 0, .number = 8});
  std::set<std::int64_t> switches;
  for (int run = 0; run < 3; ++run)
    switches.insert(play(formula, script, 77));
  EXPECT_EQ(switches.size(), 1U);
  EXPECT_NE(play(formula, script, 78), *switches.begin());
}

TEST(InterleaverTest, OneRankRunsAtATimeAndALeaverHoldsNobodyUp) {
  const Hooked hooked;
  Interleaver interleaver(3, 9);
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  support::run_ranks(3, [&](const Group& group) {
    const Interleaver::Turn turn(interleaver, group.rank());
    for (int i = 0; i < 50 * (group.rank() + 1); ++i) {
      most = std::max(most.load(), ++inside);
      --inside;
      Interleaver::step();
    }
  });
  EXPECT_EQ(most.load(), 1);
  EXPECT_GT(interleaver.num_switches(), 0);
}

}  // namespace
}  // namespace tokenyard::protocol_tests
