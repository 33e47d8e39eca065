// SPDX-License-Identifier: Apache-2.0
// Staging of expert output as it is, for devices with bulk copies: one thread of a block moves rows through the ring of
// stages, so that what is on its way does not depend on how many warps there are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/bulk_ring.cuh"

namespace tokenyard::engine::cuda {

// Walks over the pieces of rows that fit a stage. `Rows` walks over the block's rows: there(), from(), to(), advance().
template <class Rows>
class RowPieces {
 public:
  __device__ RowPieces(const Rows& rows, std::int64_t row_bytes) : rows_(rows), row_bytes_(row_bytes) {}

  __device__ bool there() const { return rows_.there(); }

  __device__ const std::byte* from() const { return rows_.from() + offset_; }

  __device__ std::byte* to() const { return rows_.to() + offset_; }

  __device__ std::uint32_t bytes() const {
    return static_cast<std::uint32_t>(min(row_bytes_ - offset_, std::int64_t{kStageBytes}));
  }

  __device__ void advance() {
    offset_ += kStageBytes;
    if (offset_ < row_bytes_) return;
    offset_ = 0;
    rows_.advance();
  }

 private:
  Rows rows_;
  std::int64_t row_bytes_;
  std::int64_t offset_ = 0;
};

// By one thread. What was stored is written on return; false when a wait ended first.
template <class Rows>
__device__ bool move_rows(BulkRing ring, const Rows& rows, std::int64_t row_bytes) {
  RowPieces<Rows> loads(rows, row_bytes);
  RowPieces<Rows> stores(rows, row_bytes);
  const auto load_next = [&] {
    if (!loads.there()) return;
    ring.load(loads.from(), loads.bytes());
    loads.advance();
  };
  for (int stage = 0; stage < kStages; ++stage)
    load_next();
  for (; stores.there(); stores.advance()) {
    if (!ring.wait_loaded()) return false;
    ring.store(stores.to(), stores.bytes());
    if (ring.close()) load_next();
  }
  wait_bulk_stores<0>();
  return true;
}

// By all threads of a block, when the section is free: its share of the rows.
template <class Rows>
__device__ bool stage_in_bulk(const CombineTask& task, const Rows& rows, std::byte* stages) {
  __shared__ std::uint64_t loaded[kStages];
  bool all = true;
  if (threadIdx.x == 0) {
    for (std::uint64_t& counter : loaded)
      init_byte_counter(&counter);
    // Of the counters, and of the words that said that the section is free.
    fence_before_bulk_copies();
    all = move_rows(BulkRing(task.common, loaded, stages), rows, task.row_bytes);
  }
  return __syncthreads_and(static_cast<int>(all)) != 0;
}

}  // namespace tokenyard::engine::cuda
