// SPDX-License-Identifier: Apache-2.0
#include "group/gather_ledger.h"

#include <algorithm>
#include <utility>

namespace tokenyard::group {

GatherLedger::GatherLedger(int num_ranks) : num_ranks_(num_ranks), next_(static_cast<std::size_t>(num_ranks), 1) {}

bool GatherLedger::may_contribute(int rank) const {
  const std::uint64_t slowest = *std::min_element(next_.begin(), next_.end());
  return next_sequence(rank) < slowest + kMaxCollectivesAhead;
}

std::uint64_t GatherLedger::contribute(int rank, Bytes bytes) {
  const auto index = static_cast<std::size_t>(rank);
  const std::uint64_t sequence = next_[index];
  Round& round = rounds_[sequence];
  if (round.bytes.empty()) {
    const auto size = static_cast<std::size_t>(num_ranks_);
    round.bytes.resize(size);
    round.arrived.resize(size, false);
    round.waiting.resize(size, false);
  }
  round.bytes[index] = std::move(bytes);
  round.arrived[index] = true;
  round.waiting[index] = true;
  ++round.num_arrived;
  ++round.num_waiting;
  ++next_[index];
  return sequence;
}

bool GatherLedger::complete(std::uint64_t sequence) const {
  const auto found = rounds_.find(sequence);
  return found != rounds_.end() && found->second.num_arrived == num_ranks_;
}

std::vector<int> GatherLedger::missing(std::uint64_t sequence) const {
  std::vector<int> result;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (next_sequence(rank) <= sequence) result.push_back(rank);
  }
  return result;
}

void GatherLedger::stop_waiting(int rank, std::uint64_t sequence) {
  const auto found = rounds_.find(sequence);
  if (found == rounds_.end() || !found->second.waiting[static_cast<std::size_t>(rank)]) return;
  Round& round = found->second;
  round.waiting[static_cast<std::size_t>(rank)] = false;
  --round.num_waiting;
  if (round.num_waiting == 0 && round.num_arrived == num_ranks_) rounds_.erase(found);
}

std::vector<Bytes> GatherLedger::read(int rank, std::uint64_t sequence) {
  const auto found = rounds_.find(sequence);
  std::vector<Bytes> result = found->second.num_waiting == 1 ? std::move(found->second.bytes) : found->second.bytes;
  stop_waiting(rank, sequence);
  return result;
}

GatherLedger::Outcome GatherLedger::take(std::uint64_t sequence) {
  const auto found = rounds_.find(sequence);
  Outcome result{.bytes = std::move(found->second.bytes), .waiting = {}};
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (found->second.waiting[static_cast<std::size_t>(rank)]) result.waiting.push_back(rank);
  }
  rounds_.erase(found);
  return result;
}

}  // namespace tokenyard::group
