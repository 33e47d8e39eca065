// SPDX-License-Identifier: Apache-2.0
// The senders of a dispatch to every rank: each rank's rows go to one stretch of every rank's result, and a chunk of
// tokens is stamped when all of its rows are there.
#pragma once

#include <cstdint>

#include "engine/cuda/chunks.cuh"
#include "engine/cuda/copies.cuh"
#include "engine/cuda/every_rank_tasks.h"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/row_send.cuh"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/windows.cuh"

namespace tokenyard::engine::cuda {

// Ranks in the order in which this one visits them: the next one first, itself last, so that not all crowd one.
template <class Visit>
__device__ void visit_ranks(const Common& common, const Visit& visit) {
  int rank = common.rank;
  for (int i = 0; i < common.num_ranks; ++i) {
    rank = rank + 1 == common.num_ranks ? 0 : rank + 1;
    visit(rank);
  }
}

// Where in a window the row of a token of this rank goes.
__device__ inline std::int64_t place_of(const EveryRankDispatchTask& task, const Lane& lane, std::int64_t token) {
  return task.said.common.layout.payload(0) + lane.offset + (task.first_row + token) * lane.stride;
}

// A slice of a row to every rank.
__device__ inline void send_slice(
    const EveryRankDispatchTask& task, const Lane& lane, std::int64_t token, int slice, Crew crew) {
  const Common& common = task.said.common;
  const std::int64_t units = lane.row_bytes / lane.unit;
  const std::int64_t share = protocol::ceil_div(units, task.slices);
  const std::int64_t begin = min(units, slice * share) * lane.unit;
  const std::int64_t bytes = min(lane.row_bytes, begin + share * lane.unit) - begin;
  if (bytes == 0) return;
  const std::int64_t place = place_of(task, lane, token) + begin;
  move_row(lane.from + token * lane.from_stride + begin, bytes, lane.unit, crew, [&](int i, auto value) {
    visit_ranks(common,
                [&](int rank) { reinterpret_cast<decltype(value)*>(window_of(common, rank) + place)[i] = value; });
  });
}

// By several threads, which are behind the one that ended the chunk (pairs with wait_chunk).
__device__ inline void stamp_chunk_of(
    const Common& common, std::int64_t chunk, std::uint32_t epoch, std::uint32_t rows, Crew crew) {
  for (int to = crew.index; to < common.num_ranks; to += crew.count) {
    store_release_system(&chunk_of(common, to, common.rank, chunk)->stamp, protocol::encode_stamp(epoch, rows));
  }
}

// For the sender by bulk copies. All ranks in the order of visit_ranks, so nothing is known of a token.
struct EveryRankSend {
  using Task = EveryRankDispatchTask;

  struct Token {};

  static __device__ __forceinline__ const Common& common(const Task& task) { return task.said.common; }

  static __device__ __forceinline__ int tokens_at_once(const Task& task) { return task.tokens_at_once; }

  static __device__ __forceinline__ void find_route(const Task& /*task*/, std::int64_t /*token*/, Token& /*route*/) {}

  static __device__ __forceinline__ int num_destinations(const Task& task, const Token& /*route*/) {
    return common(task).num_ranks;
  }

  static __device__ __forceinline__ int destination(const Task& task, const Token& /*route*/, int index) {
    const int rank = common(task).rank + 1 + index;
    return rank < common(task).num_ranks ? rank : rank - common(task).num_ranks;
  }

  static __device__ __forceinline__ std::int64_t base(const Task& task, const Lane& lane, std::int64_t token) {
    return place_of(task, lane, token);
  }

  static __device__ __forceinline__ std::int64_t place(std::int64_t base,
                                                       const Lane& /*lane*/,
                                                       const Token& /*route*/,
                                                       int /*destination*/) {
    return base;
  }

  static __device__ __forceinline__ void send_rest(const Task& /*task*/,
                                                   std::int64_t /*token*/,
                                                   const Token& /*route*/,
                                                   Crew /*crew*/) {}

  static __device__ __forceinline__ void stamp(const Task& task, int chunk, std::uint32_t epoch, std::int64_t tokens) {
    stamp_chunk_of(common(task), chunk, epoch, tokens_of_chunk(common(task), chunk, tokens), {lane_index(), kWarp});
  }

  static __device__ __forceinline__ void stamp_nothing(const Task& /*task*/, std::uint32_t /*epoch*/) {}
};

// By all threads of all blocks: a block a slice of a token.
__device__ inline void send_by_stores(const EveryRankDispatchTask& task, std::uint32_t epoch, std::int64_t tokens) {
  __shared__ bool ends;
  const Common& common = task.said.common;
  const Crew crew{static_cast<int>(threadIdx.x), kThreads};
  for (std::int64_t item = blockIdx.x; item < tokens * task.slices; item += gridDim.x) {
    const std::int64_t token = item / task.slices;
    for (int index = 0; index < task.num_lanes; ++index)
      send_slice(task, task.lanes[static_cast<unsigned>(index)], token, static_cast<int>(item % task.slices), crew);
    __syncthreads();
    const std::int64_t chunk = token / common.layout.shape().tokens_per_chunk;
    const std::uint32_t rows = tokens_of_chunk(common, chunk, tokens);
    if (threadIdx.x == 0) ends = ends_chunk(common, chunk, 1, rows * static_cast<std::uint32_t>(task.slices));
    __syncthreads();
    if (ends) stamp_chunk_of(common, chunk, epoch, rows, crew);
  }
}

}  // namespace tokenyard::engine::cuda
