// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_board.h"

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

#include "tokenyard/error.h"

namespace tokenyard::cli {
namespace {

// [head] [finished of each rank] [rounds of each variant and rank] [trains of each variant and rank]
constexpr std::int64_t kLineBytes = 64;

std::int64_t rounds_at(const BenchBoardSize& size) {
  const auto finished = std::int64_t{size.num_ranks} * static_cast<std::int64_t>(sizeof(std::int32_t));
  return kLineBytes + (finished + kLineBytes - 1) / kLineBytes * kLineBytes;
}

std::int64_t rounds_of_variant(const BenchBoardSize& size) {
  return std::int64_t{size.num_ranks} * size.num_rounds;
}

std::int64_t trains_at(const BenchBoardSize& size) {
  return rounds_at(size) + size.num_variants * rounds_of_variant(size) * static_cast<std::int64_t>(sizeof(BenchRound));
}

std::int64_t trains_of_variant(const BenchBoardSize& size) {
  return std::int64_t{size.num_ranks} * kBenchTrains;
}

std::int64_t board_bytes(const BenchBoardSize& size) {
  return trains_at(size) + size.num_variants * trains_of_variant(size) * static_cast<std::int64_t>(sizeof(double));
}

}  // namespace

BenchBoard::BenchBoard(const BenchBoardSize& size) : size_(size), segment_(system::Segment::create(board_bytes(size))) {
  new (segment_.data()) Head{};
  auto* finished = reinterpret_cast<std::atomic<std::int32_t>*>(segment_.data() + kLineBytes);
  std::uninitialized_value_construct_n(finished, size.num_ranks);
}

BenchBoard::Head& BenchBoard::head() const {
  return *std::launder(reinterpret_cast<Head*>(segment_.data()));
}

void BenchBoard::barrier() {
  Head& shared = head();
  const std::uint32_t generation = shared.generation.load(std::memory_order_acquire);
  if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(size_.num_ranks)) {
    shared.arrived.store(0, std::memory_order_relaxed);  // published by the next store
    shared.generation.store(generation + 1, std::memory_order_release);
    return;
  }
  while (shared.generation.load(std::memory_order_acquire) == generation) {
    if (shared.given_up.load(std::memory_order_relaxed) != 0)
      throw Error(ErrorCode::kPeerFailed, "another rank gave up");
    sched_yield();
  }
}

void BenchBoard::give_up() {
  head().given_up.store(1, std::memory_order_relaxed);  // carries no data
}

BenchBoard::Times BenchBoard::times(int variant) const {
  Times times;
  times.size_ = size_;
  times.rounds_ =
      reinterpret_cast<BenchRound*>(segment_.data() + rounds_at(size_)) + variant * rounds_of_variant(size_);
  times.trains_ = reinterpret_cast<double*>(segment_.data() + trains_at(size_)) + variant * trains_of_variant(size_);
  return times;
}

std::atomic<std::int32_t>& BenchBoard::finished(int rank) const {
  return std::launder(reinterpret_cast<std::atomic<std::int32_t>*>(segment_.data() + kLineBytes))[rank];
}

int BenchBoard::finished_by_all() const {
  int least = size_.num_variants;
  for (int rank = 0; rank < size_.num_ranks; ++rank)
    least = std::min(least, static_cast<int>(finished(rank).load(std::memory_order_acquire)));
  return least;
}

}  // namespace tokenyard::cli
