// SPDX-License-Identifier: Apache-2.0
// Bounded waits, and who is to blame when one runs out (design.md part 8).
//
// A rank that waits tells its peers for whom, every deadline / 8. Each peer has a clock that starts with the call and
// restarts with every new word from that peer; a call waits at most two deadlines in all. Only time in which this rank
// really polled counts. When the clock runs out, the chain "x waits for y" is followed from the awaited rank to its end
// through ranks that still show life; the end is the culprit, and a chain that comes back has none.
// Thread rule: one thread at a time; peers write only their own life words.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tokenyard/error.h"

#include "engine/engine.h"
#include "protocol/life.h"

namespace tokenyard::engine::host {

class PeerWatch {
 public:
  // `life` is where each rank's signs of life begin, a line for each peer: in the window of the queues for those who
  // share them.
  PeerWatch(const Setup& setup, std::vector<std::byte*> life);

  // Starts the clocks of one call.
  void begin(Phase phase, std::uint32_t epoch, std::chrono::milliseconds deadline);

  // Returns when `ready()`, or with what `interrupted()` says while it is not, or with the fault that the wait ended
  // in, which is then sticky and told to the peers.
  template <class Ready, class Interrupted>
  Status wait(int peer, Ready&& ready, Interrupted&& interrupted) {
    for (int i = 0; i < kPauses; ++i) {
      if (ready()) return {};
      pause();
    }
    return wait_slowly(peer, ready, interrupted);
  }

  [[nodiscard]] const Status& fault() const { return fault_; }

  // A fault that was not found by waiting; it is not told to the peers.
  void fail(const Status& fault);

  // Forgets the fault, and that this rank's peers ever said anything.
  void clear();

  [[nodiscard]] const std::vector<std::chrono::nanoseconds>& waited() const { return waited_; }

  [[nodiscard]] Status make_status(StatusCode code, int peer) const;

 private:
  using Clock = std::chrono::steady_clock;
  using Duration = std::chrono::nanoseconds;

  static constexpr int kPauses = 200;
  static void pause();

  template <class Ready, class Interrupted>
  Status wait_slowly(int peer, Ready& ready, Interrupted& interrupted) {
    const Clock::time_point start = Clock::now();
    last_poll_ = start;
    Status status;
    while (!ready()) {
      status = interrupted();
      if (!status.ok()) break;
      if (!poll(peer)) {
        if (ready()) break;  // the word came while the clock ran out
        status = end_with_fault(peer);
        break;
      }
      rest(Clock::now() - start);
    }
    waited_[static_cast<std::size_t>(peer)] += Clock::now() - start;
    return status;
  }

  // Counts the time, exchanges signs of life; false when the wait is over for `peer`.
  bool poll(int peer);
  void scan();
  void publish(const protocol::Life& life);
  [[nodiscard]] std::uint64_t& life_word(std::size_t of, int by) const;
  // First yields, later sleeps: it stays quick when ranks outnumber cores.
  static void rest(Duration waited);
  Status end_with_fault(int peer);
  [[nodiscard]] bool alive(int peer) const;
  // The end of the chain of waiting ranks that starts at `peer`, or kCycle.
  [[nodiscard]] int culprit(int peer) const;
  // Whom ranks that gave up already blame: a rank, kCycle, kAccused when it is this rank, or kUnknown.
  [[nodiscard]] int reported_culprit() const;

  static constexpr int kCycle = -1;
  static constexpr int kAccused = -2;
  static constexpr int kUnknown = -3;

  int rank_;
  std::vector<std::byte*> life_;  // [num_ranks]
  SharedQueues* queues_;          // to which a fault is told; may be null
  Duration interval_;

  Phase phase_ = Phase::kNone;
  std::uint32_t epoch_ = 0;
  Duration deadline_{};
  Duration polled_{};  // time of this call in which this rank polled
  Duration published_{};
  Duration scanned_{};
  Clock::time_point last_poll_{};
  std::uint16_t heartbeat_ = 0;
  std::vector<std::uint64_t> seen_;  // [num_ranks] last life word
  std::vector<Duration> changed_;    // [num_ranks] when it changed, on the clock of `polled_`; 0: not in this call
  std::vector<Duration> waited_;
  Status fault_;
};

}  // namespace tokenyard::engine::host
