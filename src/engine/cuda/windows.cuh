// SPDX-License-Identifier: Apache-2.0
// Windows seen through the layout, by kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/tasks.h"
#include "engine/cuda/verbs.cuh"
#include "protocol/layout.h"
#include "protocol/stamp.h"

namespace tokenyard::engine::cuda {

__device__ __forceinline__ std::byte* window_of(const Common& common, int rank) {
  return rank < kNearRanks ? common.near[static_cast<unsigned>(rank)] : common.windows[rank];
}

// What the blocks of a small round start with: two loads that do not wait for each other.
struct Start {
  std::uint32_t epoch;  // of the last operation of the phase
  std::uint32_t failed;
};

__device__ __forceinline__ Start read_start(const Common& common, int phase) {
  return {__ldcg(&common.board->block_epochs[static_cast<unsigned>(phase)][blockIdx.x]), __ldcg(&common.board->failed)};
}

// By the threads of one block, for operations that follow: `first` and later blocks of theirs.
__device__ inline void write_epochs(const Common& common, int phase, std::uint32_t epoch, unsigned first) {
  if (threadIdx.x == 0) common.board->epochs[static_cast<unsigned>(phase)] = epoch;
  for (unsigned block = first + threadIdx.x; block < kMaxBlocks; block += blockDim.x)
    common.board->block_epochs[static_cast<unsigned>(phase)][block] = epoch;
}

// By each block of a small round, when all its threads have read the epoch before.
__device__ inline void advance_block(const Common& common, int phase, std::uint32_t epoch) {
  if (threadIdx.x == 0) common.board->block_epochs[static_cast<unsigned>(phase)][blockIdx.x] = epoch;
  if (blockIdx.x == 0) write_epochs(common, phase, epoch, gridDim.x);
}

__device__ __forceinline__ std::uint64_t* progress_of(const Common& common, int window, int phase, int peer) {
  return reinterpret_cast<std::uint64_t*>(window_of(common, window) + common.layout.released(phase, peer));
}

__device__ __forceinline__ protocol::HeaderLine* header_of(
    const Common& common, int window, int phase, std::uint32_t epoch, int source) {
  return reinterpret_cast<protocol::HeaderLine*>(window_of(common, window) +
                                                 common.layout.header(phase, protocol::header_slot(epoch), source));
}

__device__ __forceinline__ protocol::ChunkLine* chunk_of(const Common& common,
                                                         int window,
                                                         int source,
                                                         std::int64_t index) {
  return reinterpret_cast<protocol::ChunkLine*>(window_of(common, window) + common.layout.chunk(source, index));
}

// True for all threads of the block that is the last to come here, when all that the others did before is seen by it.
__device__ inline bool last_block(std::uint32_t* counter) {
  __syncthreads();
  const bool last = threadIdx.x == 0 && add_acq_rel_device(counter, 1) == gridDim.x - 1;
  return __syncthreads_or(static_cast<int>(last)) != 0;
}

}  // namespace tokenyard::engine::cuda
