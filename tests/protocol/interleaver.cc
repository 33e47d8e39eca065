// SPDX-License-Identifier: Apache-2.0
#include "protocol/interleaver.h"

namespace tokenyard::protocol_tests {
namespace {

// Who the calling thread is; null outside a turn.
struct Self {
  Interleaver* interleaver = nullptr;
  int rank = 0;
};

thread_local Self self;

constexpr std::int64_t kLongestBurst = 40;
constexpr std::int64_t kOrdinaryWeight = 12;  // of a slow rank: 1
constexpr std::int64_t kSlowRankChanges = 64;

}  // namespace

Interleaver::Interleaver(int num_ranks, std::uint64_t seed)
    : turn_came_(static_cast<std::size_t>(num_ranks)),
      present_(static_cast<std::size_t>(num_ranks), 0),
      rng_(seed),
      style_(static_cast<Style>(rng_.below(kNumStyles))),
      slow_rank_(static_cast<int>(rng_.below(num_ranks))) {}

Interleaver::Turn::Turn(Interleaver& interleaver, int rank) : interleaver_(interleaver) {
  interleaver_.enter(rank);
  self = {.interleaver = &interleaver, .rank = rank};
}

Interleaver::Turn::~Turn() {
  const int rank = self.rank;
  self = {};
  interleaver_.leave(rank);
}

void Interleaver::step() {
  if (self.interleaver != nullptr) self.interleaver->take_step(self.rank);
}

void Interleaver::enter(int rank) {
  std::unique_lock lock(mutex_);
  present_[static_cast<std::size_t>(rank)] = 1;
  ++num_entered_;
  if (num_entered_ == static_cast<int>(present_.size())) {
    pick_next();
    turn_came_[static_cast<std::size_t>(running_)].notify_one();
  }
  turn_came_[static_cast<std::size_t>(rank)].wait(lock, [&] { return running_ == rank; });
}

void Interleaver::leave(int rank) {
  const std::lock_guard lock(mutex_);
  present_[static_cast<std::size_t>(rank)] = 0;
  pick_next();
  if (running_ != kNobody) turn_came_[static_cast<std::size_t>(running_)].notify_one();
}

void Interleaver::take_step(int rank) {
  if (steps_left_-- > 0) return;
  std::unique_lock lock(mutex_);
  pick_next();
  if (running_ == rank) return;
  ++num_switches_;
  turn_came_[static_cast<std::size_t>(running_)].notify_one();
  turn_came_[static_cast<std::size_t>(rank)].wait(lock, [&] { return running_ == rank; });
}

std::int64_t Interleaver::weight(int rank) const {
  if (present_[static_cast<std::size_t>(rank)] == 0) return 0;
  return style_ == Style::kSlowRank && rank == slow_rank_ ? 1 : kOrdinaryWeight;
}

void Interleaver::pick_next() {
  const int num_ranks = static_cast<int>(present_.size());
  if (rng_.below(kSlowRankChanges) == 0) slow_rank_ = static_cast<int>(rng_.below(num_ranks));
  std::int64_t total = 0;
  for (int rank = 0; rank < num_ranks; ++rank)
    total += weight(rank);
  running_ = kNobody;
  if (total == 0) return;
  std::int64_t drawn = rng_.below(total);
  for (int rank = 0; running_ == kNobody; ++rank) {
    drawn -= weight(rank);
    if (drawn < 0) running_ = rank;
  }
  steps_left_ = style_ == Style::kEveryStep ? 0 : rng_.below(kLongestBurst);
}

}  // namespace tokenyard::protocol_tests
