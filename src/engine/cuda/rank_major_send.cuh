// SPDX-License-Identifier: Apache-2.0
// What sends rows into a space per source: the wait for space, ids, the stamps.
#pragma once

#include <cstdint>

#include "engine/cuda/plain_headers.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/row_send.cuh"
#include "engine/cuda/tasks.h"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"

namespace tokenyard::engine::cuda {

__device__ inline int num_chunks_of(const DispatchTask& task, std::int64_t tokens) {
  return static_cast<int>(protocol::num_chunks(tokens, task.common.layout.shape().tokens_per_chunk));
}

// By one thread: whether this rank has given the dispatch up, or does now because the peer has, or takes it for a small
// round.
__device__ inline bool dispatch_given_up(const DispatchTask& task, const Awaited& awaited) {
  const Common& common = task.common;
  std::uint32_t* state = task.route.state + kRouteAborted;
  if (load_relaxed_device(state) != 0) return true;
  const protocol::HeaderLine* header =
      header_of(common, common.rank, protocol::kDispatchPhase, awaited.epoch, awaited.peer);
  const bool aborted = protocol::stamp_is(load_acquire_system(&header->stamp), awaited.epoch) &&
                       header->status == protocol::HeaderStatus::kAborted;
  const bool small = task.small.tokens > 0 && small_dispatch_began(common, task.small, awaited.peer, awaited.epoch);
  if (!aborted && !small) return false;
  give_up(common, state, aborted ? NoticeKind::kAborted : NoticeKind::kMismatch, awaited);
  return true;
}

// Waits until every peer has released the rows of the last operation. The headers of the one before that have been
// read: each peer's header of the last came after that.
__device__ inline bool wait_for_space(const DispatchTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  bool there = true;
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kDispatchPhase, peer);
    const Awaited awaited{peer, Phase::kDispatch, epoch};
    const auto released = [&] {
      return protocol::reached(protocol::rows_released(load_acquire_system(word)), epoch - 1);
    };
    there = there && wait_unless(common, awaited, released, [&] { return dispatch_given_up(task, awaited); });
  }
  return __syncthreads_and(there) != 0;
}

__device__ inline void send_ids(const DispatchTask& task, std::int64_t token, const TokenOfBlock& shared, Crew crew) {
  const Common& common = task.common;
  const int top_k = task.ids.top_k;
  const std::int64_t place = common.layout.payload(common.rank) + task.ids.offset + token * task.ids.stride;
  for (int d = 0; d < shared.num_destinations; ++d) {
    auto* to = reinterpret_cast<std::int32_t*>(window_of(common, shared.destinations[d]) + place);
    for (int slot = crew.index; slot < top_k; slot += crew.count)
      to[slot] = shared.wire_ids[slot];
  }
}

// Chunk 0 also says what must agree; it goes to every rank, with its tokens or without. The other fields are written
// before the stamp, which releases them (pairs with wait_chunk).
__device__ inline void stamp_header(
    const DispatchTask& task, int to, std::uint32_t epoch, std::int64_t tokens, std::uint64_t mask) {
  const Common& common = task.common;
  for (std::int64_t i = 0; i < task.num_stats; ++i) {
    reinterpret_cast<std::int32_t*>(window_of(common, to) + common.layout.stats(common.rank))[i] = task.stats[i];
  }
  protocol::HeaderLine* header = header_of(common, to, protocol::kDispatchPhase, epoch, common.rank);
  header->mask = mask;
  header->digest = task.digest;
  header->agreed = task.agreed;
  header->num_tokens = static_cast<std::int32_t>(tokens);
  header->status = protocol::HeaderStatus::kOk;
  store_release_system(&header->stamp, protocol::encode_stamp(epoch, __popcll(mask)));
}

// By one warp, for all ranks; what the blocks that sent the chunk's tokens did has been acquired. Lanes read the ranks
// of a token each, and votes turn them into the tokens of a rank: read in turn, they would take as many round trips to
// memory as the chunk has tokens.
__device__ inline void stamp_chunk(const DispatchTask& task, int chunk, std::uint32_t epoch, std::int64_t tokens) {
  const Common& common = task.common;
  const int size = common.layout.shape().tokens_per_chunk;
  const std::int64_t first = static_cast<std::int64_t>(chunk) * size;
  const int count = static_cast<int>(min(static_cast<std::int64_t>(size), tokens - first));
  const int lane = lane_index();
  const int words = task.route.words;
  for (int w = 0; w < words; ++w) {
    const std::uint32_t* word = task.route.ranks_of_token + (first + lane) * words + w;
    const std::uint32_t low = lane < count ? load_relaxed_device(word) : 0;
    const std::uint32_t high = lane + kWarp < count ? load_relaxed_device(word + std::int64_t{kWarp} * words) : 0;
    const int ranks = min(kWordBits, common.num_ranks - w * kWordBits);
    std::uint64_t mask = 0;
    for (int r = 0; r < ranks; ++r) {
      const std::uint64_t first_half = __ballot_sync(kAllLanes, static_cast<int>(low >> r & 1U));
      const std::uint64_t second_half = __ballot_sync(kAllLanes, static_cast<int>(high >> r & 1U));
      if (lane == r) mask = second_half << kWarp | first_half;
    }
    if (lane >= ranks) continue;
    const int to = w * kWordBits + lane;
    if (mask != 0) atomicAdd(task.route.rows_sent + to, static_cast<std::uint32_t>(__popcll(mask)));
    if (chunk == 0) {
      stamp_header(task, to, epoch, tokens, mask);
    } else {
      protocol::ChunkLine* line = chunk_of(common, to, common.rank, chunk);
      line->mask = mask;
      store_release_system(&line->stamp, protocol::encode_stamp(epoch, __popcll(mask)));
    }
  }
}

// For the senders of rows (row_send.cuh).
struct RankMajorSend {
  using Task = DispatchTask;
  using Token = TokenOfBlock;

  static __device__ __forceinline__ const Common& common(const Task& task) { return task.common; }

  static __device__ __forceinline__ int tokens_at_once(const Task& /*task*/) { return 1; }

  static __device__ __forceinline__ int num_destinations(const Task& /*task*/, const Token& route) {
    return route.num_destinations;
  }

  static __device__ __forceinline__ int destination(const Task& /*task*/, const Token& route, int index) {
    return route.destinations[index];
  }

  static __device__ __forceinline__ void find_route(const Task& task, std::int64_t token, Token& route) {
    route_token(task.common, task.route, task.ids, token, route);
  }

  // The same at every rank.
  static __device__ __forceinline__ std::int64_t base(const Task& task, const Lane& lane, std::int64_t token) {
    return task.common.layout.payload(task.common.rank) + lane.offset + token * lane.stride;
  }

  static __device__ __forceinline__ std::int64_t place(std::int64_t base,
                                                       const Lane& /*lane*/,
                                                       const Token& /*route*/,
                                                       int /*destination*/) {
    return base;
  }

  static __device__ __forceinline__ void send_rest(const Task& task,
                                                   std::int64_t token,
                                                   const Token& route,
                                                   Crew crew) {
    send_ids(task, token, route, crew);
  }

  static __device__ __forceinline__ void stamp(const Task& task, int chunk, std::uint32_t epoch, std::int64_t tokens) {
    stamp_chunk(task, chunk, epoch, tokens);
  }

  // The header goes to every rank all the same.
  static __device__ __forceinline__ void stamp_nothing(const Task& task, std::uint32_t epoch) {
    stamp_chunk(task, 0, epoch, 0);
  }
};

}  // namespace tokenyard::engine::cuda
