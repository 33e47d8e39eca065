// SPDX-License-Identifier: Apache-2.0
// One rank's part of a bench: rounds of one backend, and between them `memcpy` of the same rows.
// Thread rule: one thread per rank; BenchBoard is shared by all.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "tokenyard/communication.h"

#include "cli/bench_routing.h"
#include "system/segment.h"

namespace tokenyard::cli {

// Microseconds of one rank in one round.
struct BenchRound {
  double dispatch_us = 0;
  double combine_us = 0;
  double memcpy_us = 0;
};

struct BenchVolume {
  std::int64_t dispatch_bytes = 0;  // that left this rank: rows, ids and weights
  std::int64_t combine_bytes = 0;   // that left this rank on their way back
};

// What ranks share, as threads or as forked processes: a barrier that is cheap enough to start a round with, and the
// times.
class BenchBoard {
 public:
  BenchBoard(int num_ranks, int num_rounds);

  void barrier();

  [[nodiscard]] BenchRound& round(int rank, int index) const;
  [[nodiscard]] BenchVolume& volume(int rank) const;

 private:
  struct Head {
    std::atomic<std::uint32_t> arrived;
    std::atomic<std::uint32_t> generation;
  };

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
};

// Collective. Throws Error when an answer is wrong.
void run_bench_rank(const BenchJob& job, const Group& group, BenchBoard& board);

}  // namespace tokenyard::cli
