// SPDX-License-Identifier: Apache-2.0
// One rank's rounds: checked, measured with CUDA events, and, where the round is captured in a graph, replayed.
// Thread rule: one thread per rank; SpinBarrier is shared by all.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "exchange.h"

namespace tokenyard::bench {

// Lets ranks leave within a fraction of a microsecond of each other, which waiting in the kernel would not.
class SpinBarrier {
 public:
  explicit SpinBarrier(int num_threads) : num_threads_(num_threads) {}

  void wait();

 private:
  int num_threads_;
  std::atomic<int> arrived_{0};
  std::atomic<std::uint32_t> generation_{0};
};

struct RoundOptions {
  bool graph = false;
  int warmup = 5;
  int num_rounds = 30;
};

// Microseconds on one rank's GPU.
struct RankTimes {
  std::vector<double> dispatch{}, combine{}, round{};  // of each round
  std::vector<double> pipelined{};                     // of a round, in each train of num_rounds replays
};

// Collective. The answer is checked before the first measurement and after the last; throws std::runtime_error when it
// is wrong.
[[nodiscard]] RankTimes measure_rank(Exchange& exchange,
                                     const RoundOptions& options,
                                     cudaStream_t stream,
                                     SpinBarrier& barrier);

}  // namespace tokenyard::bench
