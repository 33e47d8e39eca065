// SPDX-License-Identifier: Apache-2.0
// weakened_release SITE: plays rounds with one release of the protocol made relaxed, for the thread sanitizer to find
// the race that this release prevents. SITE is a number of ReleaseSite, or "none". Exits 0 when every output was right.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "engine/host/word.h"
#include "protocol/scripted_rank.h"
#include "support/run_ranks.h"

namespace tokenyard::protocol_tests {
namespace {

constexpr int kNumRanks = 2;
constexpr int kMaxTokens = 70;  // two chunks
// Whole blocks of the widest vectors: the compiler turns the copies of smaller parts into code that the sanitizer does
// not see. Too small for streaming stores, which it does not see either.
constexpr int kHiddenSize = 64;
constexpr int kRepeats = 6;
constexpr std::chrono::milliseconds kDeadline{30'000};

void play(const char* backend) {
  Formula formula = make_formula(backend, kNumRanks, 1, kMaxTokens);
  formula.params.hidden_size = kHiddenSize;
  support::run_ranks(kNumRanks, [&](const Group& group) {
    CommunicationOptions options;
    options.deadline = options.first_round_deadline = kDeadline;
    ScriptedRank rank(group, formula, options, [] {});
    std::uint64_t number = 0;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      for (const Act act : acts_of(formula)) {
        // Twice: what was read in one is written in the next, with nothing else in between.
        for (int i = 0; i < 2; ++i)
          rank.play({.act = act, .culprit = repeat % kNumRanks, .number = number += 4});
      }
    }
    rank.destroy();
  });
}

int run(const std::string& site) {
  int index = -1;
  if (site != "none") {
    index = std::atoi(site.c_str());
    if (site != std::to_string(index) || index < 0 || index >= engine::host::kNumReleaseSites) {
      std::fprintf(stderr, "there is no release site %s\n", site.c_str());
      return EXIT_FAILURE;
    }
  }
  engine::host::TestHooks::weakened_site = index;
  for (const char* backend : {"all_gather", "high_throughput", "low_latency", "one_sided", "two_sided"})
    play(backend);
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace tokenyard::protocol_tests

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: weakened_release SITE\n");
    return EXIT_FAILURE;
  }
  try {
    return tokenyard::protocol_tests::run(argv[1]);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return EXIT_FAILURE;
  }
}
