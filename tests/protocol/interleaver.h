// SPDX-License-Identifier: Apache-2.0
// Runs the rank threads of one group one at a time and lets a seed decide, at every step of the protocol, who goes on.
// A step is an access to a word of the protocol (engine/host/word.h, built with TOKENYARD_TEST_HOOKS), or a call of
// `step()` by the test itself. The same seed gives the same interleaving.
// Thread rule: made and destroyed by one thread; every rank thread holds one `Turn` while it is to be interleaved. A
// thread without a turn is never held up, so collective set-up goes on as usual.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "support/rng.h"

namespace tokenyard::protocol_tests {

class Interleaver {
 public:
  Interleaver(int num_ranks, std::uint64_t seed);
  Interleaver(const Interleaver&) = delete;
  Interleaver& operator=(const Interleaver&) = delete;
  Interleaver(Interleaver&&) = delete;
  Interleaver& operator=(Interleaver&&) = delete;
  ~Interleaver() = default;

  // Makes the calling thread a rank of the interleaving. Returns when all ranks are there and it is this one's turn.
  // The destructor lets the others go on without it.
  class Turn {
   public:
    Turn(Interleaver& interleaver, int rank);
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    Turn(Turn&&) = delete;
    Turn& operator=(Turn&&) = delete;
    ~Turn();

   private:
    Interleaver& interleaver_;
  };

  // The hook: may hand the turn to another rank and then waits for it to come back.
  static void step();

  // Times that the turn went from one rank to another.
  [[nodiscard]] std::int64_t num_switches() const { return num_switches_; }

 private:
  // How a seed schedules: short bursts find races within a few words, long ones and slow ranks let ranks run far ahead.
  enum class Style : std::uint8_t { kEveryStep, kBursts, kSlowRank };
  static constexpr int kNumStyles = 3;
  static constexpr int kNobody = -1;

  void enter(int rank);
  void leave(int rank);
  void take_step(int rank);
  // With the mutex held: draws who is next and for how many steps.
  void pick_next();
  [[nodiscard]] std::int64_t weight(int rank) const;

  std::mutex mutex_;
  std::vector<std::condition_variable> turn_came_;  // [num_ranks]
  std::vector<char> present_;                       // [num_ranks]
  int num_entered_ = 0;
  int running_ = kNobody;
  // Touched only by the thread whose turn it is.
  std::int64_t steps_left_ = 0;
  std::int64_t num_switches_ = 0;
  support::Rng rng_;
  Style style_;
  int slow_rank_ = 0;
};

}  // namespace tokenyard::protocol_tests
