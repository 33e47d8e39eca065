// SPDX-License-Identifier: Apache-2.0
// What small rounds look for among the plain ones' words, when they wait long: a peer that gave an operation up says so
// in its plain header, and one that takes the operation for a large round writes such a header too.
#pragma once

#include <cstdint>

#include "engine/cuda/small_layout.h"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"

namespace tokenyard::engine::cuda {

__device__ __forceinline__ int phase_index(Phase phase) {
  return phase == Phase::kDispatch ? protocol::kDispatchPhase : protocol::kCombinePhase;
}

// Words of a route that tell of a small round that was given up hold the mark of the operation's epoch, so nobody has
// to clear them.

// As give_up, of a small round.
__device__ inline void give_up_small(const Common& common,
                                     std::uint32_t* state,
                                     NoticeKind kind,
                                     const Awaited& awaited) {
  const std::uint32_t mark = mark_of(awaited.epoch);
  if (atomicExch(state, mark) != mark) leave_notice(common.host->aborted, kind, awaited, 0);
}

// By one thread. Whether this rank has given the operation up, or does now because of what the peer says. `state` is
// the word of the route that tells of it.
__device__ __noinline__ inline bool given_up_plainly(const Common& common,
                                                     std::uint32_t* state,
                                                     const Awaited& awaited) {
  if (load_relaxed_device(state) == mark_of(awaited.epoch)) return true;
  const protocol::HeaderLine* header =
      header_of(common, common.rank, phase_index(awaited.phase), awaited.epoch, awaited.peer);
  // Pairs with stamp_header, write_headers and stamp_aborted.
  if (!protocol::stamp_is(load_acquire_system(&header->stamp), awaited.epoch)) return false;
  const bool aborted = header->status == protocol::HeaderStatus::kAborted;
  give_up_small(common, state, aborted ? NoticeKind::kAborted : NoticeKind::kMismatch, awaited);
  return true;
}

// Whether the source's sign of the first token of a small round is there.
__device__ inline bool small_dispatch_began(const Common& common,
                                            const SmallLayout& small,
                                            int source,
                                            std::uint32_t epoch) {
  const std::byte* sign = window_of(common, common.rank) + small.sign(epoch, source, 0);
  return same_epoch(load_pair_system(sign).first, flag_of(epoch, 0));
}

// By one thread: returns when the source has begun the dispatch, in whatever way.
__device__ inline void await_any_sign(const Common& common, const SmallLayout& small, int source, std::uint32_t epoch) {
  const protocol::HeaderLine* plain = header_of(common, common.rank, protocol::kDispatchPhase, epoch, source);
  static_cast<void>(wait_until(common, {source, Phase::kDispatch, epoch}, [&] {
    return protocol::stamp_is(load_acquire_system(&plain->stamp), epoch) ||
           (small.tokens > 0 && small_dispatch_began(common, small, source, epoch));
  }));
}

}  // namespace tokenyard::engine::cuda
