// SPDX-License-Identifier: Apache-2.0
// A thousand rounds of eight ranks that come early and late as they like: nobody hangs, nothing drifts.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "protocol/scripted_rank.h"
#include "support/backends.h"
#include "support/rng.h"
#include "support/run_ranks.h"

namespace tokenyard::steady_tests {
namespace {

using protocol_tests::Formula;
using protocol_tests::Operation;
using protocol_tests::ScriptedRank;

constexpr int kNumRanks = 8;
constexpr int kRounds = 1000;
constexpr int kMaxTokens = 6;
constexpr std::uint32_t kInitialEpoch = 0xFFFFFFF0;  // wraps in passing
constexpr std::uint64_t kSeed = 20'240'607;
// One rank in sixteen sleeps before a round, and now and then in the middle of one.
constexpr std::int64_t kSleepsOnceIn = 16;
constexpr std::int64_t kLongestSleep = 2000;  // microseconds

// 0, a few or all tokens; formulas draw counts below and above a chunk, here all fit one.
class SoakTest : public testing::TestWithParam<std::string_view> {};

TEST_P(SoakTest, EveryResultOfAThousandRoundsIsRight) {
  const Formula formula = protocol_tests::make_formula(std::string(GetParam()), kNumRanks, kSeed, kMaxTokens);
  const std::vector<Operation> script = protocol_tests::draw_script(formula, kRounds);
  support::run_ranks(kNumRanks,
                     [&](const Group& group) {
                       support::Rng rng(kSeed + static_cast<std::uint64_t>(group.rank()));
                       const auto dawdle = [&](std::int64_t once_in) {
                         if (rng.below(once_in) != 0) return;
                         std::this_thread::sleep_for(std::chrono::microseconds(rng.below(kLongestSleep + 1)));
                       };
                       ScriptedRank rank(group, formula, {.initial_epoch = kInitialEpoch},
                                         [&] { dawdle(64 * kSleepsOnceIn); });
                       for (const Operation& operation : script) {
                         dawdle(kSleepsOnceIn);
                         rank.play(operation);
                       }
                       rank.destroy();
                     },
                     {.limit = std::chrono::seconds(100)});
}

INSTANTIATE_TEST_SUITE_P(Backends, SoakTest, testing::ValuesIn(support::kMovingBackends), [](const auto& tested) {
  return std::string(tested.param);
});

}  // namespace
}  // namespace tokenyard::steady_tests
