// SPDX-License-Identifier: Apache-2.0
// Who has come to which collective, with what. Collectives are numbered from 1 by each rank for itself, and number n
// of one rank belongs to number n of every other; that is the whole agreement. A rank that gave up waiting for n has
// still contributed to it: late ranks complete n without it, and n + 1 is the next meeting of all.
// Thread rule: none of its own; the in-process hub locks around it, the store uses it from one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "tokenyard/group.h"

namespace tokenyard::group {

// A rank that keeps giving up may be this many collectives ahead of the slowest rank; more would be memory without
// bound on behalf of somebody who may never come.
inline constexpr std::uint64_t kMaxCollectivesAhead = 16;

class GatherLedger {
 public:
  explicit GatherLedger(int num_ranks);

  // The number that the rank's next contribution will have.
  [[nodiscard]] std::uint64_t next_sequence(int rank) const { return next_[static_cast<std::size_t>(rank)]; }

  [[nodiscard]] bool may_contribute(int rank) const;
  // Returns the contribution's number; the rank now waits for it.
  std::uint64_t contribute(int rank, Bytes bytes);
  [[nodiscard]] bool complete(std::uint64_t sequence) const;
  [[nodiscard]] std::vector<int> missing(std::uint64_t sequence) const;
  // The rank gives up; harmless when it does not wait for `sequence`.
  void stop_waiting(int rank, std::uint64_t sequence);

  // Of a complete collective: every rank's bytes in rank order. The last waiting rank gets them without a copy.
  [[nodiscard]] std::vector<Bytes> read(int rank, std::uint64_t sequence);

  struct Outcome {
    std::vector<Bytes> bytes;
    std::vector<int> waiting;
  };

  // Of a complete collective: everything at once, for one who distributes it.
  [[nodiscard]] Outcome take(std::uint64_t sequence);

 private:
  struct Round {
    std::vector<Bytes> bytes;
    std::vector<bool> arrived;
    std::vector<bool> waiting;
    int num_arrived = 0;
    int num_waiting = 0;
  };

  int num_ranks_;
  std::vector<std::uint64_t> next_;
  std::map<std::uint64_t, Round> rounds_;  // those that lack a contribution or a reader
};

}  // namespace tokenyard::group
