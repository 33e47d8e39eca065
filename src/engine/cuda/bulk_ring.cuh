// SPDX-License-Identifier: Apache-2.0
// A ring of stages in shared memory, through which one thread of a block moves pieces of rows by bulk copies: each is
// read once and stored wherever it goes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/tasks.h"
#include "engine/cuda/verbs.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kStageBytes = 16 << 10;  // the largest piece
inline constexpr int kStages = 12;
inline constexpr int kRingBytes = kStages * kStageBytes;
// Pieces whose stores may be on their way; the stages of the others load. A peer is further than memory.
inline constexpr int kStoring = 8;
static_assert(kStoring < kStages);

// Waits until the phase of this parity has ended. Nobody but GPUs' memory is waited for. One that does not answer is no
// case for a deadline of its own: the wait ends when another one of this rank has run out, and long after its load
// should have come, because stages must not be left while loads are on their way to them.
__device__ inline bool wait_for_bytes(const Common& common, std::uint64_t* counter, unsigned parity) {
  constexpr int kTriesPerLook = 1 << 14;
  while (true) {
#pragma unroll 1
    for (int i = 0; i < kTriesPerLook; ++i) {
      if (bytes_arrived(counter, parity)) return true;
    }
    if (load_relaxed_device(&common.board->failed) != 0) return false;
  }
}

// By one thread. Piece n goes through stage n % kStages, whose counter it is the phase n / kStages of. Each piece is
// loaded, and when it is there stored to any number of places, and closed.
class BulkRing {
 public:
  // `loaded`: kStages byte counters in shared memory.
  __device__ BulkRing(const Common& common, std::uint64_t* loaded, std::byte* stages)
      : common_(common), counters_(loaded), stages_(stages) {}

  // The next piece, whose stage must be free.
  __device__ void load(const std::byte* from, std::uint32_t bytes) {
    const unsigned stage = loaded_ % kStages;
    expect_bytes(&counters_[stage], bytes);
    load_bulk(stages_ + stage * kStageBytes, from, bytes, &counters_[stage]);
    ++loaded_;
  }

  // Waits for the oldest piece that is not closed.
  __device__ bool wait_loaded() {
    return wait_for_bytes(common_, &counters_[closed_ % kStages], closed_ / kStages % 2);
  }

  __device__ void store(std::byte* to, std::uint32_t bytes) const {
    store_bulk(to, stages_ + closed_ % kStages * kStageBytes, bytes);
  }

  // Ends the piece's stores. True when an older one is complete, whose stage is then free.
  __device__ bool close() {
    close_bulk_stores();
    ++closed_;
    wait_bulk_stores<kStoring>();
    return closed_ > kStoring;
  }

  // Pieces that are written, as far as `close` has found out.
  [[nodiscard]] __device__ unsigned complete() const { return closed_ - kStoring; }

 private:
  const Common& common_;
  std::uint64_t* counters_;
  std::byte* stages_;
  unsigned loaded_ = 0;
  unsigned closed_ = 0;
};

}  // namespace tokenyard::engine::cuda
