// SPDX-License-Identifier: Apache-2.0
// Small kernels of one block: what a rank tells its peers when it does not take part in an operation, or ends a round
// without a combine.
#include "engine/cuda/combine_rounds.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/plain_headers.cuh"
#include "engine/cuda/routes.cuh"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"

namespace tokenyard::engine::cuda {
namespace {

__device__ void stamp_aborted(const Common& common, int to, int phase, std::uint32_t epoch) {
  protocol::HeaderLine* header = header_of(common, to, phase, epoch, common.rank);
  header->status = protocol::HeaderStatus::kAborted;
  store_release_system(&header->stamp, protocol::encode_stamp(epoch, 0));
}

// Who has seen a peer's sign of a dispatch knows that the peer ended the one before (small_layout.h).
__device__ void await_all_signs(const Common& common, const SmallLayout& small, std::uint32_t epoch) {
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    if (peer != common.rank) await_any_sign(common, small, peer, epoch);
  }
}

__global__ void __launch_bounds__(kThreads)
    abort_dispatch(const __grid_constant__ Common common, const __grid_constant__ SmallLayout small) {
  if (load_relaxed_device(&common.board->failed) != 0) return;
  Board& board = *common.board;
  const std::uint32_t before = board.epochs[protocol::kDispatchPhase];
  const std::uint32_t epoch = before + 1;
  // The slot is free: the header that each peer sent in the operation before came after it had read this one.
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads)
    stamp_aborted(common, peer, protocol::kDispatchPhase, epoch);
  await_all_signs(common, small, epoch);
  // An older result that is still a view keeps its rows.
  const std::uint32_t released = board.rows_released == before ? epoch : board.rows_released;
  __syncthreads();
  write_epochs(common, protocol::kDispatchPhase, epoch, 0);
  __syncthreads();
  release_views(common, released);
}

__global__ void __launch_bounds__(kThreads)
    abort_combine(const __grid_constant__ Common common, const __grid_constant__ RouteMemory route, bool small) {
  if (load_relaxed_device(&common.board->failed) != 0 || load_relaxed_device(route.state + kRouteAborted) != 0) return;
  const std::uint32_t dispatch = common.board->epochs[protocol::kDispatchPhase];
  if (load_relaxed_device(route.state + kSmallRouteAborted) == mark_of(dispatch)) return;
  const std::uint32_t epoch = common.board->epochs[protocol::kCombinePhase] + 1;
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kCombinePhase, peer);
    const bool there = wait_until(common, {peer, Phase::kCombine, epoch}, [&] {
      return protocol::reached(protocol::rows_released(load_acquire_system(word)), common.owed[peer]);
    });
    if (there && route.rows_received[peer] > 0) {
      stamp_aborted(common, peer, protocol::kCombinePhase, epoch);
      // Combine of small rounds releases nothing: the peer's sign of the dispatch that follows says as much.
      if (!small) common.owed[peer] = epoch;
    }
    store_release_system(progress_of(common, peer, protocol::kCombinePhase, common.rank),
                         protocol::encode_progress(epoch, epoch));
  }
  __syncthreads();
  write_epochs(common, protocol::kCombinePhase, epoch, 0);
  clear_route(route, common.num_ranks);
}

__global__ void __launch_bounds__(kThreads)
    await_dispatch(const __grid_constant__ Common common, const __grid_constant__ SmallLayout small) {
  if (load_relaxed_device(&common.board->failed) != 0) return;
  await_all_signs(common, small, common.board->epochs[protocol::kDispatchPhase]);
}

__global__ void __launch_bounds__(kThreads) release(const __grid_constant__ Common common, bool combine) {
  if (load_relaxed_device(&common.board->failed) != 0) return;
  if (!combine) return release_views(common, common.board->epochs[protocol::kDispatchPhase]);
  const std::uint32_t epoch = common.board->epochs[protocol::kCombinePhase];
  for (int owner = static_cast<int>(threadIdx.x); owner < common.num_ranks; owner += kThreads) {
    store_release_system(progress_of(common, owner, protocol::kCombinePhase, common.rank),
                         protocol::encode_progress(epoch, epoch));
  }
}

__global__ void __launch_bounds__(kThreads)
    clear(const __grid_constant__ Common common, const __grid_constant__ RouteMemory route) {
  clear_route(route, common.num_ranks);
}

__global__ void __launch_bounds__(kThreads) await_section(const __grid_constant__ Common common) {
  if (__syncthreads_or(static_cast<int>(load_relaxed_device(&common.board->failed))) != 0) return;
  static_cast<void>(wait_for_section(common, common.board->epochs[protocol::kCombinePhase] + 1));
}

}  // namespace

void load_notices() {
  cudaFuncAttributes attributes{};
  for (const void* kernel :
       {reinterpret_cast<const void*>(abort_dispatch), reinterpret_cast<const void*>(abort_combine),
        reinterpret_cast<const void*>(await_dispatch), reinterpret_cast<const void*>(release),
        reinterpret_cast<const void*>(clear), reinterpret_cast<const void*>(await_section)}) {
    check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  }
}

void launch_abort_dispatch(const Common& common, const SmallLayout& small, cudaStream_t stream) {
  abort_dispatch<<<1, kThreads, 0, stream>>>(common, small);
  check(cudaGetLastError(), "launching the end of a dispatch");
}

void launch_await_dispatch(const Common& common, const SmallLayout& small, cudaStream_t stream) {
  await_dispatch<<<1, kThreads, 0, stream>>>(common, small);
  check(cudaGetLastError(), "launching the end of a dispatch");
}

void launch_abort_combine(const Common& common, const RouteMemory& route, bool small, cudaStream_t stream) {
  abort_combine<<<1, kThreads, 0, stream>>>(common, route, small);
  check(cudaGetLastError(), "launching the end of a combine");
}

void launch_release(const Common& common, bool combine, cudaStream_t stream) {
  release<<<1, kThreads, 0, stream>>>(common, combine);
  check(cudaGetLastError(), "launching a release");
}

void launch_await_section(const Common& common, cudaStream_t stream) {
  await_section<<<1, kThreads, 0, stream>>>(common);
  check(cudaGetLastError(), "launching a wait");
}

void launch_clear(const Common& common, const RouteMemory& route, cudaStream_t stream) {
  clear<<<1, kThreads, 0, stream>>>(common, route);
  check(cudaGetLastError(), "launching the clearing of a route");
}

}  // namespace tokenyard::engine::cuda
