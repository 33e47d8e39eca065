// SPDX-License-Identifier: Apache-2.0
// Combine of rows that were reduced over this rank's experts, in one launch: expert output that does not lie in the
// window is staged there, a header tells each origin, and the origin pulls its tokens' rows and sums them in the order
// of ranks.
#include <algorithm>

#include "engine/cuda/combine_kernels.cuh"
#include "engine/cuda/combine_rounds.cuh"
#include "engine/cuda/copies.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/routes.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/row_sums.cuh"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"
#include "protocol/casts.h"

namespace tokenyard::engine::cuda {
namespace {

__device__ void stage_row(const CombineTask& task, std::byte* to, const std::byte* from, Crew crew) {
  if (task.from_dtype == task.rows_dtype) return copy_row(to, from, task.row_bytes, task.unit, crew);
  switch (task.from_dtype) {
    case Dtype::kBf16:
      return cast_row<protocol::F8e4m3, protocol::Bf16>(to, from, task.hidden, crew);
    case Dtype::kF16:
      return cast_row<protocol::F8e4m3, protocol::F16>(to, from, task.hidden, crew);
    default:
      return cast_row<protocol::F8e4m3, protocol::F32>(to, from, task.hidden, crew);
  }
}

// By warps: the received rows of every source, chunk by chunk.
__device__ void stage_rows(const CombineTask& task) {
  const Common& common = task.common;
  const protocol::WindowShape& shape = common.layout.shape();
  const auto rows = static_cast<int>(shape.num_ranks * shape.max_tokens);
  const int first = warp_index() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  for (int row = first; row < rows; row += kWarps * static_cast<int>(gridDim.x)) {
    const auto source = static_cast<int>(row / shape.max_tokens);
    const std::int64_t token = row % shape.max_tokens;
    if (token >= task.route.tokens_of[source]) continue;
    const std::uint64_t mask = task.route.masks[source * common.layout.max_chunks() + token / shape.tokens_per_chunk];
    if ((mask >> (token % shape.tokens_per_chunk) & 1U) == 0) continue;
    stage_row(task, window_of(common, common.rank) + common.layout.combine_row(row),
              task.from + source * task.from_block_stride + token * task.from_row_stride, {lane_index(), kWarp});
  }
}

// By one block, after all rows are in place: releases them to their origins (pairs with wait_for_owners).
__device__ void write_headers(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  for (int origin = static_cast<int>(threadIdx.x); origin < common.num_ranks; origin += kThreads) {
    const std::uint32_t rows = load_relaxed_device(task.route.rows_received + origin);
    if (rows == 0) continue;
    protocol::HeaderLine* header = header_of(common, origin, protocol::kCombinePhase, epoch, common.rank);
    header->agreed = task.hidden;
    header->status = protocol::HeaderStatus::kOk;
    store_release_system(&header->stamp, protocol::encode_stamp(epoch, rows));
    common.owed[origin] = epoch;
  }
}

__device__ void send(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  if (task.ends_views && blockIdx.x == 0) release_views(common, common.board->epochs[protocol::kDispatchPhase]);
  if (!task.staged) {
    if (blockIdx.x == 0) write_headers(task, epoch);
    return;
  }
  if (!wait_for_section(common, epoch)) return;
  stage_rows(task);
  if (!last_block(&common.board->blocks_staged)) return;
  if (threadIdx.x == 0) common.board->blocks_staged = 0;
  if (task.reads_views) release_views(common, common.board->epochs[protocol::kDispatchPhase]);
  write_headers(task, epoch);
}

__device__ bool wait_for_owners(const CombineTask& task, std::uint32_t epoch) {
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

__device__ void find_owners(const CombineTask& task, std::int64_t token, OwnersOfToken& owners) {
  const Common& common = task.common;
  int count = 0;
  const std::int64_t row = common.rank * common.layout.shape().max_tokens + token;
  for (int w = 0; w < task.route.words; ++w) {
    for (std::uint32_t word = task.route.ranks_of_token[token * task.route.words + w]; word != 0; word &= word - 1) {
      const int owner = w * kWordBits + __ffs(static_cast<int>(word)) - 1;
      owners.rows[count++] = window_of(common, owner) + common.layout.combine_row(row);
    }
  }
  owners.count = count;
}

template <class From, class To>
__device__ void sum_tokens(const CombineTask& task) {
  __shared__ OwnersOfToken owners;
  const std::int64_t tokens = task.route.state[kRouteTokens];
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    __syncthreads();
    if (threadIdx.x == 0) find_owners(task, token, owners);
    __syncthreads();
    sum_token<From, To>(task, owners, token, {static_cast<int>(threadIdx.x), kThreads});
  }
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads) combine(const __grid_constant__ CombineTask task) {
  const Common& common = task.common;
  if (load_relaxed_device(&common.board->failed) != 0) return;
  const bool aborted = load_relaxed_device(task.route.state + kRouteAborted) != 0;
  const std::uint32_t last = common.board->epochs[protocol::kCombinePhase];
  // No rank combines a round that was given up, so it uses up no epoch.
  const std::uint32_t epoch = task.sends && !aborted ? last + 1 : last;
  if (!aborted) {
    if (task.sends) send(task, epoch);
    if (task.receives && wait_for_owners(task, epoch)) sum_tokens<From, To>(task);
  }
  if (last_block(&common.board->blocks_done)) finish_combine(task, epoch);
}

struct Kernels {
  template <class From, class To>
  static CombineKernel get() {
    return combine<From, To>;
  }
};

}  // namespace

void load_combine() {
  load_combine_kernels<Kernels>();
}

void launch_combine(const CombineTask& task, int blocks, cudaStream_t stream) {
  combine_kernel<Kernels>(task.rows_dtype, task.output_dtype)<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a combine");
}

}  // namespace tokenyard::engine::cuda
