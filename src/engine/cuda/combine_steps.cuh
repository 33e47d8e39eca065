// SPDX-License-Identifier: Apache-2.0
// The combine of ranks that owe each token one row, whose origins pull: rows as they are staged, their headers, and the
// sum over the ranks that owe a token's rows.
#pragma once

#include <cstdint>

#include "engine/cuda/combine_rounds.cuh"
#include "engine/cuda/copies.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/row_sums.cuh"
#include "engine/cuda/sums.cuh"
#include "engine/cuda/tasks.h"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"
#include "protocol/casts.h"

namespace tokenyard::engine::cuda {

// A row of expert output as it crosses: each element rounded once.
__device__ inline void stage_row(const CombineTask& task, std::byte* to, const std::byte* from, Crew crew) {
  if (task.from_dtype == task.rows_dtype) return copy_row(to, from, task.row_bytes, task.unit, crew);
  switch (task.rows_dtype) {
    case Dtype::kBf16:
      return cast_row_of<protocol::Bf16>(task.from_dtype, to, from, task.hidden, crew);
    case Dtype::kF16:
      return cast_row_of<protocol::F16>(task.from_dtype, to, from, task.hidden, crew);
    case Dtype::kF32:
      return cast_row_of<protocol::F32>(task.from_dtype, to, from, task.hidden, crew);
    default:
      return cast_row_of<protocol::F8e4m3>(task.from_dtype, to, from, task.hidden, crew);
  }
}

// By one block, after all rows are in place: releases them to their origins (pairs with wait_for_owners).
__device__ inline void write_headers(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  for (int origin = static_cast<int>(threadIdx.x); origin < common.num_ranks; origin += kThreads) {
    const std::uint32_t rows = load_relaxed_device(task.route.rows_received + origin);
    if (rows == 0) continue;
    protocol::HeaderLine* header = header_of(common, origin, protocol::kCombinePhase, epoch, common.rank);
    header->agreed = task.hidden;
    header->row_limit = task.row_limit;
    header->status = protocol::HeaderStatus::kOk;
    store_release_system(&header->stamp, protocol::encode_stamp(epoch, rows));
    common.owed[origin] = epoch;
  }
}

__device__ inline bool wait_for_owners(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  bool there = true;
  for (int owner = static_cast<int>(threadIdx.x); owner < common.num_ranks; owner += kThreads) {
    if (task.route.rows_sent[owner] == 0) continue;
    const Awaited awaited{owner, Phase::kCombine, epoch};
    const protocol::HeaderLine* header = header_of(common, common.rank, protocol::kCombinePhase, epoch, owner);
    const auto stamped = [&] { return protocol::stamp_is(load_acquire_system(&header->stamp), epoch); };
    if (!wait_until(common, awaited, stamped)) {
      there = false;
    } else if (header->status == protocol::HeaderStatus::kAborted || header->agreed != task.hidden) {
      const bool aborted = header->status == protocol::HeaderStatus::kAborted;
      give_up(common, task.route.state + kCombineAborted, aborted ? NoticeKind::kAborted : NoticeKind::kMismatch,
              awaited);
      there = false;
    }
  }
  return __syncthreads_and(there) != 0;
}

// By all blocks. `find(token, owners)` is called by all threads of the block.
template <class From, class To, class Find>
__device__ void sum_tokens(const CombineTask& task, const Find& find) {
  __shared__ OwnersOfToken owners;
  const std::int64_t tokens = task.route.state[kRouteTokens];
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    __syncthreads();
    find(token, owners);
    __syncthreads();
    sum_token<From, To>(task, owners, token, {static_cast<int>(threadIdx.x), kThreads});
  }
}

// `send(epoch)` and `receive(epoch, ready)` by all blocks, each with the half that is asked for; `ready()` waits for
// the owners; `end` by the last block.
template <class Send, class Receive, class End>
__device__ void run_unready_combine(const CombineTask& task, const Send& send, const Receive& receive, const End& end) {
  const Common& common = task.common;
  // Loaded together, before anything waits for one of them.
  const std::uint32_t failed = load_relaxed_device(&common.board->failed);
  const std::uint32_t last = load_relaxed_device(&common.board->epochs[protocol::kCombinePhase]);
  const bool aborted = load_relaxed_device(task.route.state + kRouteAborted) != 0;
  if (__syncthreads_or(static_cast<int>(failed)) != 0) return;
  // No rank combines a round that was given up, so it uses up no epoch.
  const std::uint32_t epoch = task.sends && !aborted ? last + 1 : last;
  if (!aborted) {
    if (task.sends) send(epoch);
    if (task.receives) receive(epoch, [&] { return wait_for_owners(task, epoch); });
  }
  if (!last_block(&common.board->blocks_done)) return;
  end_combine(task, epoch);
  if (task.receives) end();
}

// With `receive(epoch)` where the owners are ready.
template <class Send, class Receive, class End>
__device__ void run_combine(const CombineTask& task, const Send& send, const Receive& receive, const End& end) {
  const auto receive_ready = [&](std::uint32_t epoch, const auto& ready) {
    if (ready()) receive(epoch);
  };
  run_unready_combine(task, send, receive_ready, end);
}

}  // namespace tokenyard::engine::cuda
