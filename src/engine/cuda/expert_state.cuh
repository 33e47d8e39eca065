// SPDX-License-Identifier: Apache-2.0
// How operations of expert-major rounds begin, and what they wait for. No operation ends with a word to the peers or a
// meeting of its blocks: the next one tells what this one has read, and kernels on a stream are in order anyway.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/expert_tasks.h"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"

namespace tokenyard::engine::cuda {

// What every kernel starts with, in one load.
struct ExpertStart {
  std::uint32_t epochs[protocol::kNumPhases];  // of the last operations; NOLINT(modernize-avoid-c-arrays): device code
  std::uint32_t failed;
};

static_assert(offsetof(Board, epochs) == 0 && offsetof(Board, failed) == 12 && sizeof(ExpertStart) == 16);

__device__ __forceinline__ ExpertStart read_expert_start(const Common& common) {
  const uint4 words = __ldcg(reinterpret_cast<const uint4*>(common.board));
  return {{words.x, words.y, words.z}, words.w};
}

// A unit of the layout's: 8 bytes are seen as a whole or not at all, 16 are not.
struct TaggedUnit {
  std::uint32_t words[kTaggedWords];  // NOLINT(modernize-avoid-c-arrays): device code
};

__device__ __forceinline__ void store_tagged(std::byte* to, const TaggedUnit& unit, std::uint32_t tag) {
  const std::uint64_t high = static_cast<std::uint64_t>(tag) << 32;
  store_pair_system(to, {high | unit.words[0], high | unit.words[1]});
}

// Whether the unit is there.
__device__ __forceinline__ bool load_tagged(const std::byte* from, std::uint32_t tag, TaggedUnit& unit) {
  const Pair pair = load_pair_system(from);
  unit = {{static_cast<std::uint32_t>(pair.first), static_cast<std::uint32_t>(pair.second)}};
  return static_cast<std::uint32_t>(pair.first >> 32) == tag && static_cast<std::uint32_t>(pair.second >> 32) == tag;
}

struct ExpertStep {
  int phase = protocol::kDispatchPhase;
  std::uint32_t epoch = 0;
  bool sends = false;
  bool closes = false;  // receives, and nothing will be received again
};

__device__ __forceinline__ bool is_clerk() {
  return blockIdx.x == gridDim.x - 1;  // which has the fewest tokens to send
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
// wait_for_combine_space). Of combine: rows that came back, and weights given by others.
__device__ inline void publish_progress(const Common& common, const ExpertBoard& board, const ExpertStart& start) {
  const std::uint32_t dispatched = last_ended(board, protocol::kDispatchPhase, start.epochs[protocol::kDispatchPhase]);
  const std::uint32_t combined = last_ended(board, protocol::kCombinePhase, start.epochs[protocol::kCombinePhase]);
  for (int peer = lane_index(); peer < common.num_ranks; peer += kWarp) {
    store_release_system(progress_of(common, peer, protocol::kDispatchPhase, common.rank),
                         protocol::encode_progress(dispatched, dispatched));
    store_release_system(progress_of(common, peer, protocol::kCombinePhase, common.rank),
                         protocol::encode_progress(combined, start.epochs[protocol::kCombinePhase]));
  }
}

// By one thread, when every block has read what it needs of the board.
__device__ inline void settle(const Common& common, ExpertBoard& board, const ExpertStep& step) {
  for (auto& phase : {protocol::kDispatchPhase, protocol::kCombinePhase}) {
    for (int slot = 0; slot < kExpertDepth; ++slot) {
      if (board.closing[phase][slot] != 0) board.open[phase][slot] = board.closing[phase][slot] = 0;
    }
  }
  const int slot = protocol::slot_of(step.epoch, kExpertDepth);
  if (step.sends) common.board->epochs[step.phase] = step.epoch;
  if (step.sends) board.open[step.phase][slot] = 1;
  if (step.closes) board.closing[step.phase][slot] = 1;
  board.started = 0;
  common.host->invalid_ids = common.board->invalid_ids;
}

// By all threads, after a barrier behind all that the block reads of the boards and of words that `more` sets. The last
// warp does it; the others go on.
template <class More>
__device__ void begin_operation(
    const Common& common, ExpertBoard& board, const ExpertStart& start, const ExpertStep& step, const More& more) {
  if (warp_index() != kWarps - 1) return;
  if (is_clerk()) publish_progress(common, board, start);
  __syncwarp();
  if (lane_index() != kWarp - 1 || add_acq_rel_device(&board.started, 1) != gridDim.x - 1) return;
  settle(common, board, step);
  more();
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
