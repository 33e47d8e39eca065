// SPDX-License-Identifier: Apache-2.0
// What the ranks of a bench share, as threads or as forked processes: a barrier that is cheap enough to start a round
// with, and the times. Thread rule: shared by all ranks, each of which writes its own times.
#pragma once

#include <atomic>
#include <cstdint>

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

struct BenchBoardSize {
  int num_ranks = 1;
  int num_rounds = 1;
  int num_variants = 1;
};

class BenchBoard {
 public:
  explicit BenchBoard(const BenchBoardSize& size);

  // Throws kPeerFailed when a rank has given up.
  void barrier();
  void give_up();

  // Of one variant.
  class Times {
   public:
    [[nodiscard]] BenchRound& round(int rank, int index) const { return rounds_[rank * size_.num_rounds + index]; }

    // Microseconds of a round in a train.
    [[nodiscard]] double& train(int rank, int index) const { return trains_[rank * kBenchTrains + index]; }

   private:
    friend class BenchBoard;
    BenchBoardSize size_;
    BenchRound* rounds_ = nullptr;
    double* trains_ = nullptr;
  };

  [[nodiscard]] Times times(int variant) const;

  // How many variants a rank has measured, and found right.
  [[nodiscard]] std::atomic<std::int32_t>& finished(int rank) const;
  [[nodiscard]] int finished_by_all() const;

 private:
  struct Head {
    std::atomic<std::uint32_t> arrived;
    std::atomic<std::uint32_t> generation;
    std::atomic<std::uint32_t> given_up;
  };

  [[nodiscard]] Head& head() const;

  BenchBoardSize size_;
  system::Segment segment_;
};

}  // namespace tokenyard::cli
