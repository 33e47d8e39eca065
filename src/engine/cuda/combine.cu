// SPDX-License-Identifier: Apache-2.0
// Combine of rows that were reduced over this rank's experts, in one launch: expert output that does not lie in the
// window is staged there, a header tells each origin, and the origin pulls its tokens' rows and sums them in the order
// of ranks.
#include "engine/cuda/combine_kernels.cuh"
#include "engine/cuda/combine_steps.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/routes.cuh"

namespace tokenyard::engine::cuda {
namespace {

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
__global__ void __launch_bounds__(kThreads) combine(const __grid_constant__ CombineTask task) {
  const auto find = [&task](std::int64_t token, OwnersOfToken& owners) {
    if (threadIdx.x == 0) find_owners(task, token, owners);
  };
  run_combine(
      task, [&task](std::uint32_t epoch) { send(task, epoch); },
      [&](std::uint32_t /*epoch*/) { sum_tokens<From, To>(task, find); },
      [&task] { clear_route(task.route, task.common.num_ranks); });
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
