// SPDX-License-Identifier: Apache-2.0
// Combine of rows in a space per source: the half of the owners, who stage expert output that does not lie in the
// window and tell the origins; and where an origin finds the rows of a token.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/combine_steps.cuh"
#include "engine/cuda/copies.cuh"
#include "engine/cuda/routes.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/sums.cuh"
#include "protocol/casts.h"

namespace tokenyard::engine::cuda {

// The rows of a source's chunk that are here; none where the source has no such token.
__device__ inline std::uint64_t rows_of_chunk(const CombineTask& task, int source, std::int64_t chunk) {
  const protocol::WindowLayout& layout = task.common.layout;
  if (chunk * layout.shape().tokens_per_chunk >= task.route.tokens_of[source]) return 0;
  return task.route.masks[source * layout.max_chunks() + chunk];
}

// By warps: the received rows of every source, chunk by chunk.
__device__ inline void stage_rows(const CombineTask& task) {
  const Common& common = task.common;
  const protocol::WindowShape& shape = common.layout.shape();
  const auto rows = static_cast<int>(shape.num_ranks * shape.max_tokens);
  const int first = warp_index() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  for (int row = first; row < rows; row += kWarps * static_cast<int>(gridDim.x)) {
    const auto source = static_cast<int>(row / shape.max_tokens);
    const std::int64_t token = row % shape.max_tokens;
    const std::uint64_t mask = rows_of_chunk(task, source, token / shape.tokens_per_chunk);
    if ((mask >> (token % shape.tokens_per_chunk) & 1U) == 0) continue;
    stage_row(task, window_of(common, common.rank) + common.layout.combine_row(row),
              task.from + source * task.from_block_stride + token * task.from_row_stride, {lane_index(), kWarp});
  }
}

// Walks over the received rows of a block: blocks take the chunks in turn, source by source.
class ReceivedRows {
 public:
  __device__ explicit ReceivedRows(const CombineTask& task)
      : task_(task),
        chunks_(
            protocol::num_chunks(task.common.layout.shape().max_tokens, task.common.layout.shape().tokens_per_chunk)),
        chunk_(blockIdx.x) {
    ahead_ = mask_of(chunk_);
    enter_chunk();
  }

  __device__ bool there() const { return mask_ != 0; }

  __device__ const std::byte* from() const {
    return task_.from + source_ * task_.from_block_stride + token() * task_.from_row_stride;
  }

  __device__ std::byte* to() const {
    const protocol::WindowLayout& layout = task_.common.layout;
    return window_of(task_.common, task_.common.rank) +
           layout.combine_row(source_ * layout.shape().max_tokens + token());
  }

  __device__ void advance() {
    mask_ &= mask_ - 1;
    if (mask_ != 0) return;
    chunk_ += gridDim.x;
    enter_chunk();
  }

 private:
  __device__ std::int64_t token() const { return first_token_ + __ffsll(static_cast<long long>(mask_)) - 1; }

  __device__ std::uint64_t mask_of(std::int64_t chunk) const {
    if (chunk >= chunks_ * task_.common.num_ranks) return 0;
    return rows_of_chunk(task_, static_cast<int>(chunk / chunks_), chunk % chunks_);
  }

  // The next one that has rows; the mask of the one after is loaded ahead.
  __device__ void enter_chunk() {
    for (; chunk_ < chunks_ * task_.common.num_ranks; chunk_ += gridDim.x) {
      mask_ = ahead_;
      ahead_ = mask_of(chunk_ + gridDim.x);
      if (mask_ == 0) continue;
      source_ = chunk_ / chunks_;
      first_token_ = chunk_ % chunks_ * task_.common.layout.shape().tokens_per_chunk;
      return;
    }
  }

  const CombineTask& task_;
  std::int64_t chunks_;  // of a source
  std::int64_t chunk_;
  std::int64_t source_ = 0;
  std::int64_t first_token_ = 0;
  std::uint64_t mask_ = 0;  // rows of the chunk that are still to come
  std::uint64_t ahead_ = 0;
};

// stage() by all blocks, if rows are staged at all; false when it ended before.
template <class Stage>
__device__ void send_rows(const CombineTask& task, std::uint32_t epoch, const Stage& stage) {
  const Common& common = task.common;
  if (task.ends_views && blockIdx.x == 0) release_views(common, common.board->epochs[protocol::kDispatchPhase]);
  if (!task.staged) {
    if (blockIdx.x == 0) write_headers(task, epoch);
    return;
  }
  if (!wait_for_section(common, epoch)) return;
  if (!stage()) return;
  if (!last_block(&common.board->blocks_staged)) return;
  if (threadIdx.x == 0) common.board->blocks_staged = 0;
  if (task.reads_views) release_views(common, common.board->epochs[protocol::kDispatchPhase]);
  write_headers(task, epoch);
}

// The rows that a token's owners have for it, by ascending rank; `load` is called ahead of them.
class OwnersRows {
 public:
  struct Known {
    int token = 0;
    std::uint32_t word = 0;  // of the ranks in it, those that are still to come
    int index = 0;
  };

  __device__ explicit OwnersRows(const CombineTask& task)
      : task_(task), first_row_(task.common.rank * task.common.layout.shape().max_tokens) {}

  __device__ Known load(int token) const { return {token, word_of(token, 0), 0}; }

  // Null when there are no more.
  __device__ const std::byte* next(Known& known) const {
    while (known.word == 0) {
      if (++known.index >= task_.route.words) return nullptr;
      known.word = word_of(known.token, known.index);
    }
    const int owner = known.index * kWordBits + __ffs(static_cast<int>(known.word)) - 1;
    known.word &= known.word - 1;
    return window_of(task_.common, owner) + task_.common.layout.combine_row(first_row_ + known.token);
  }

 private:
  __device__ std::uint32_t word_of(int token, int index) const {
    return task_.route.ranks_of_token[std::int64_t{token} * task_.route.words + index];
  }

  const CombineTask& task_;
  std::int64_t first_row_;
};

__device__ inline void find_owners(const CombineTask& task, std::int64_t token, OwnersOfToken& owners) {
  const OwnersRows rows(task);
  OwnersRows::Known known = rows.load(static_cast<int>(token));
  int count = 0;
  while (const std::byte* row = rows.next(known))
    owners.rows[count++] = row;
  owners.count = count;
}

// By all blocks.
template <class From, class To>
__device__ void sum_by_blocks(const CombineTask& task) {
  sum_tokens<From, To>(task, [&task](std::int64_t token, OwnersOfToken& owners) {
    if (threadIdx.x == 0) find_owners(task, token, owners);
  });
}

}  // namespace tokenyard::engine::cuda
