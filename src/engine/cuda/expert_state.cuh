// SPDX-License-Identifier: Apache-2.0
// How operations of expert-major rounds begin, and what they wait for. No operation ends with a word to the peers or a
// meeting of its blocks: the next one tells what this one has read, and kernels on a stream are in order anyway.
#pragma once

#include <cstdint>

#include "engine/cuda/expert_tasks.h"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/tagged_units.cuh"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"

namespace tokenyard::engine::cuda {

struct ExpertStep {
  int phase = protocol::kDispatchPhase;
  std::uint32_t epoch = 0;
  bool sends = false;
  bool closes = false;  // receives, and nothing will be received again
};

// The last blocks have the fewest tokens to send. One tells what this rank's tokens come to, another looks after the
// board.
__device__ __forceinline__ bool is_clerk() {
  return blockIdx.x == (gridDim.x > 1 ? gridDim.x - 2 : 0);
}

__device__ __forceinline__ bool is_warden() {
  return blockIdx.x == gridDim.x - 1;
}

// The last operation up to which all are received: at most the two last are not.
__device__ inline std::uint32_t last_ended(const ExpertBoard& board, int phase, std::uint32_t last) {
  const auto open = [&](std::uint32_t epoch) {
    const int slot = protocol::slot_of(epoch, kExpertDepth);
    return board.open[phase][slot] != 0 && board.closing[phase][slot] == 0;
  };
  if (open(last - 1)) return last - 2;
  return open(last) ? last - 1 : last;
}

// By one warp: tells every peer what the operations before have read (pairs with wait_for_space and
// wait_for_combine_space). Of combine: rows that came back, and weights given by others. `last`: of each phase.
__device__ inline void publish_progress(const Common& common,
                                        const ExpertBoard& board,
                                        const std::uint32_t (&last)[protocol::kNumPhases]) {
  const std::uint32_t dispatched = last_ended(board, protocol::kDispatchPhase, last[protocol::kDispatchPhase]);
  const std::uint32_t combined = last_ended(board, protocol::kCombinePhase, last[protocol::kCombinePhase]);
  __threadfence_system();  // with the stores behind it, a release
  for (int peer = lane_index(); peer < common.num_ranks; peer += kWarp) {
    store_relaxed_system(progress_of(common, peer, protocol::kDispatchPhase, common.rank),
                         protocol::encode_progress(dispatched, dispatched));
    store_relaxed_system(progress_of(common, peer, protocol::kCombinePhase, common.rank),
                         protocol::encode_progress(combined, last[protocol::kCombinePhase]));
  }
}

// By one thread.
__device__ inline void settle(const Common& common, ExpertBoard& board, const ExpertStep& step) {
  for (const int phase : {int{protocol::kDispatchPhase}, int{protocol::kCombinePhase}}) {
    for (int slot = 0; slot < kExpertDepth; ++slot) {
      if (board.closing[phase][slot] != 0) board.open[phase][slot] = board.closing[phase][slot] = 0;
    }
  }
  const int slot = protocol::slot_of(step.epoch, kExpertDepth);
  if (step.sends) board.open[step.phase][slot] = 1;
  if (step.closes) board.closing[step.phase][slot] = 1;
  if (common.board->invalid_told != common.board->invalid_ids)
    common.host->invalid_ids = common.board->invalid_told = common.board->invalid_ids;
}

// By all threads of a block, behind a barrier after they have read the epoch before. Each block leaves the epoch for
// its successor; the last warp of the warden does the rest, and the others go on.
__device__ inline void begin_operation(const Common& common, ExpertBoard& board, const ExpertStep& step) {
  std::uint32_t last[protocol::kNumPhases] = {};  // NOLINT(modernize-avoid-c-arrays): device code
  const bool looks_after = is_warden() && warp_index() == kWarps - 1;
  if (looks_after) {
    for (const int phase : {int{protocol::kDispatchPhase}, int{protocol::kCombinePhase}})
      last[phase] = __ldcg(&common.board->block_epochs[static_cast<unsigned>(phase)][blockIdx.x]);
    // The step's own may have been written by now.
    if (step.sends) last[step.phase] = step.epoch - 1;
  }
  if (step.sends) advance_block(common, step.phase, step.epoch);
  if (!looks_after) return;
  publish_progress(common, board, last);
  __syncwarp();
  if (lane_index() == 0) settle(common, board, step);
}

// By any threads: waits for the rows and units of dispatch n - 2 to be read by the peers of this thread.
__device__ inline bool wait_for_space(const Common& common, std::uint32_t epoch, int first, int step) {
  bool there = true;
  for (int peer = first; peer < common.num_ranks; peer += step) {
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kDispatchPhase, peer);
    there = there && wait_until(common, {peer, Phase::kDispatch, epoch}, [&] {
              return protocol::reached(protocol::rows_released(load_acquire_system(word)), epoch - kExpertDepth);
            });
  }
  return there;
}

}  // namespace tokenyard::engine::cuda
