// SPDX-License-Identifier: Apache-2.0
// Dispatches to final places without their rows: the counts alone, for a host that waits for them before it enqueues
// the rows, and what a rank says that gives a dispatch up.
#include "engine/cuda/compact_kernels.h"
#include "engine/cuda/compact_settle.cuh"

namespace tokenyard::engine::cuda {
namespace {

// By one thread: rows of all sources for one unit's experts.
__device__ bool take_expert_unit(const MoveTask& task, std::uint32_t epoch, int index) {
  const Common& common = task.common;
  const CompactHeaders& headers = task.counts.headers;
  std::int32_t rows[kTaggedWords] = {};  // NOLINT(modernize-avoid-c-arrays): device code
  for (int source = 0; source < common.num_ranks; ++source) {
    const std::byte* from =
        window_of(common, common.rank) + headers.unit(protocol::header_slot(epoch), source, headers.units + index);
    TaggedUnit unit{};
    const auto told = [&] { return load_tagged(from, tag_of(epoch), unit); };
    if (!wait_until(common, {source, Phase::kDispatch, epoch}, told)) return false;
    for (int k = 0; k < kTaggedWords; ++k)
      rows[k] += static_cast<std::int32_t>(unit.words[k]);
  }
  for (int k = 0; k < kTaggedWords && kTaggedWords * index + k < task.num_local_experts; ++k)
    task.counts.lists.rows_per_expert[kTaggedWords * index + k] = rows[k];
  return true;
}

// By one block. The ticket is stored last, for the host to find all of it.
__device__ void tell_host(const MoveTask& task, const Settled& settled) {
  bool there = settled.there;
  for (int source = static_cast<int>(threadIdx.x); there && source < task.common.num_ranks; source += kThreads) {
    task.counts.lists.rows_received[source] = static_cast<std::int32_t>(task.route.basic.rows_received[source]);
    task.counts.lists.tokens_of[source] = task.route.basic.tokens_of[source];
  }
  const int units = task.counts.headers.expert_units;
  for (int index = static_cast<int>(threadIdx.x); there && index < units; index += kThreads)
    there = take_expert_unit(task, settled.epoch, index);
  there = __syncthreads_and(static_cast<int>(there)) != 0;
  if (threadIdx.x != 0) return;
  task.counts.told->num_rows = static_cast<std::int32_t>(settled.rows);
  task.counts.told->there = there ? 1 : 0;
  __threadfence_system();
  *const_cast<volatile std::uint32_t*>(&task.counts.told->ticket) = task.counts.ticket;
}

__global__ void __launch_bounds__(kThreads) count(const __grid_constant__ MoveTask task) {
  const Settled settled = settle(task);
  if (!settled.failed && is_last_block()) tell_host(task, settled);
}

// One block. Peers have nothing on their way to this rank, because nobody sends rows before all have told their counts.
__global__ void __launch_bounds__(kThreads) abort_compact(const __grid_constant__ MoveTask task) {
  const Common& common = task.common;
  if (__syncthreads_or(static_cast<int>(load_relaxed_device(&common.board->failed))) != 0) return;
  const std::uint32_t epoch = common.board->epochs[protocol::kDispatchPhase] + 1;
  const bool there = warp_index() != 0 || open_headers(common, epoch);
  if (__syncthreads_and(static_cast<int>(there)) == 0) return;
  tell_headers(task, epoch, 0, protocol::HeaderStatus::kAborted, [](int /*rank*/) { return 0U; });
  if (threadIdx.x == 0 && common.board->rows_released == epoch - 1) common.board->rows_released = epoch;
  write_epochs(common, protocol::kDispatchPhase, epoch, 0);
}

}  // namespace

void load_count() {
  cudaFuncAttributes attributes{};
  for (const void* kernel : {reinterpret_cast<const void*>(count), reinterpret_cast<const void*>(abort_compact)})
    check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
}

void launch_count(const MoveTask& task, int blocks, cudaStream_t stream) {
  count<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching the counts of a dispatch");
}

void launch_abort_compact(const MoveTask& task, cudaStream_t stream) {
  abort_compact<<<1, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching the end of a dispatch");
}

}  // namespace tokenyard::engine::cuda
