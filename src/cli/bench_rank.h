// SPDX-License-Identifier: Apache-2.0
// One rank's part of a bench: rounds of one backend, and between them, on the host, `memcpy` of the same rows.
// Thread rule: one thread per rank; BenchBoard is shared by all.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "tokenyard/communication.h"

#include "cli/bench_routing.h"
#include "cli/engine_choice.h"
#include "system/segment.h"

namespace tokenyard::cli {

// Microseconds of one rank in one round.
struct BenchRound {
  double dispatch_us = 0;
  double combine_us = 0;
  double round_us = 0;
  double memcpy_us = 0;
};

// Trains of captured rounds, of which each is measured as a whole.
inline constexpr int kBenchTrains = 10;

// What ranks share, as threads or as forked processes: a barrier that is cheap enough to start a round with, and the
// times.
class BenchBoard {
 public:
  BenchBoard(int num_ranks, int num_rounds);

  // Throws kPeerFailed when a rank has given up.
  void barrier();
  void give_up();

  [[nodiscard]] BenchRound& round(int rank, int index) const;
  // Microseconds of a round in a train.
  [[nodiscard]] double& train(int rank, int index) const;

 private:
  struct Head {
    std::atomic<std::uint32_t> arrived;
    std::atomic<std::uint32_t> generation;
    std::atomic<std::uint32_t> given_up;
  };

  [[nodiscard]] Head& head() const;

  int num_ranks_;
  int num_rounds_;
  system::Segment segment_;
};

struct BenchJob {
  BenchShape shape{};
  Dtype dtype = Dtype::kBf16;
  DispatchCast cast = DispatchCast::kNone;  // where the backend takes one
  BackendConfig config{};
  std::vector<std::vector<std::int32_t>> ids{};  // of each rank
  int num_threads = 1;
  int warmup = 5;
  int num_rounds = 30;
  bool pin = false;  // rank r to core r modulo the cores
  EngineChoice engine{};
  int num_sms = 0;     // 0: the library chooses
  bool graph = false;  // CUDA: rounds are captured once and replayed
};

// Collective. Throws Error when an answer is wrong.
void run_bench_rank(const BenchJob& job, const Group& group, BenchBoard& board);

}  // namespace tokenyard::cli
