// SPDX-License-Identifier: Apache-2.0
// How a combine whose origins pull begins and ends, whatever its rows are.
#pragma once

#include <cstdint>

#include "engine/cuda/routes.cuh"
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

// By the last block of a combine, for the next one. The route is the caller's to clear.
__device__ inline void end_combine(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  if (threadIdx.x == 0) common.board->blocks_done = common.board->slices_taken = 0;
  if (task.sends) write_epochs(common, protocol::kCombinePhase, epoch, 0);
  if (!task.receives) return;
  release_section(common, epoch);
  __syncthreads();
}

__device__ inline void finish_combine(const CombineTask& task, std::uint32_t epoch) {
  end_combine(task, epoch);
  if (task.receives) clear_route(task.route, task.common.num_ranks);
}

}  // namespace tokenyard::engine::cuda
