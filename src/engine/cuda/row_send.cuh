// SPDX-License-Identifier: Apache-2.0
// The plain sender of rows: a block a token. What placements differ in is a `Send`:
//
//   Task, Token                          the task has lanes and num_lanes; a token is what is known of its route, in
//                                        shared memory
//   common(task)
//   tokens_at_once(task)                 tokens that a warp may send as one; it divides a chunk
//   find_route(task, token, Token&)      by one warp
//   num_destinations(task, Token)
//   destination(task, Token, d)          a rank
//   base(task, lane, token)              in a window, what a row's place is made of once for all destinations
//   place(base, lane, Token, d)          of the row at destination d
//   send_rest(task, token, Token, crew)  what is in no lane
//   stamp(task, chunk, epoch, tokens)    by one warp: the chunk is there
//   stamp_nothing(task, epoch)           by one warp: a call without tokens
#pragma once

#include <cstdint>

#include "engine/cuda/chunks.cuh"
#include "engine/cuda/copies.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/tasks.h"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/windows.cuh"

namespace tokenyard::engine::cuda {

// One lane's row of the token to each of its ranks.
template <class Send>
__device__ void send_row(const typename Send::Task& task,
                         const Lane& lane,
                         std::int64_t token,
                         const typename Send::Token& route,
                         Crew crew) {
  const std::int64_t base = Send::base(task, lane, token);
  move_row(lane.from + token * lane.from_stride, lane.row_bytes, lane.unit, crew, [&](int i, auto value) {
    for (int d = 0; d < Send::num_destinations(task, route); ++d) {
      std::byte* window = window_of(Send::common(task), Send::destination(task, route, d));
      reinterpret_cast<decltype(value)*>(window + Send::place(base, lane, route, d))[i] = value;
    }
  });
}

template <class Send>
__device__ void send_by_blocks(const typename Send::Task& task, std::uint32_t epoch, std::int64_t tokens) {
  __shared__ typename Send::Token shared;
  __shared__ bool ends;
  const Common& common = Send::common(task);
  const Crew crew{static_cast<int>(threadIdx.x), kThreads};
  if (tokens == 0 && blockIdx.x == 0 && warp_index() == 0) Send::stamp_nothing(task, epoch);
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    if (warp_index() == 0) Send::find_route(task, token, shared);
    __syncthreads();
    for (int index = 0; index < task.num_lanes; ++index)
      send_row<Send>(task, task.lanes[static_cast<unsigned>(index)], token, shared, crew);
    Send::send_rest(task, token, shared, crew);
    __syncthreads();
    const auto chunk = static_cast<int>(token / common.layout.shape().tokens_per_chunk);
    if (threadIdx.x == 0) ends = ends_chunk(common, chunk, 1, tokens_of_chunk(common, chunk, tokens));
    __syncthreads();
    if (ends && warp_index() == 0) Send::stamp(task, chunk, epoch, tokens);
  }
}

}  // namespace tokenyard::engine::cuda
