// SPDX-License-Identifier: Apache-2.0
// How a combine whose origins pull begins and ends, whatever its rows are.
#pragma once

#include <cstdint>

#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"

namespace tokenyard::engine::cuda {

// The origins have read the rows of the combine before; only then may staging write over them.
__device__ inline bool wait_for_section(const Common& common, std::uint32_t epoch) {
  bool there = true;
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kCombinePhase, peer);
    there = there && wait_until(common, {peer, Phase::kCombine, epoch}, [&] {
              return protocol::reached(protocol::rows_released(load_acquire_system(word)), common.owed[peer]);
            });
  }
  return __syncthreads_and(there) != 0;
}

// Tells the owners that nothing of their rows up to this combine will be read any more.
__device__ inline void release_section(const Common& common, std::uint32_t epoch) {
  for (int owner = static_cast<int>(threadIdx.x); owner < common.num_ranks; owner += kThreads) {
    store_release_system(progress_of(common, owner, protocol::kCombinePhase, common.rank),
                         protocol::encode_progress(epoch, epoch));
  }
}

}  // namespace tokenyard::engine::cuda
