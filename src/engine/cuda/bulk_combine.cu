// SPDX-License-Identifier: Apache-2.0
// As combine.cu, with rows that are staged and pulled by bulk copies.
#include "engine/cuda/bulk_staging.cuh"
#include "engine/cuda/bulk_sums.cuh"
#include "engine/cuda/combine_kernels.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/rank_major_combine.cuh"

namespace tokenyard::engine::cuda {
namespace {

__device__ std::byte* ring() {
  extern __shared__ __align__(128) std::byte stages[];  // NOLINT(modernize-avoid-c-arrays): device code
  return stages;
}

// Compiled for an older device, and run on a newer one, both halves are those of combine.cu.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kBulk = true;
#else
constexpr bool kBulk = false;
#endif

__device__ bool stage(const CombineTask& task) {
  if constexpr (kBulk) {
    if (stages_in_bulk(task)) return stage_in_bulk(task, ReceivedRows(task), ring());
  }
  stage_rows(task);
  return true;
}

template <class From, class To, class Ready>
__device__ void receive(const CombineTask& task, const Ready& ready) {
  if constexpr (kBulk) {
    sum_in_bulk<From, To>(task, OwnersRows(task), ring(), ready);
  } else {
    if (ready()) sum_by_blocks<From, To>(task);
  }
}

// One block fills a multiprocessor: its stages do.
template <class From, class To>
__global__ void __launch_bounds__(kThreads, 1) bulk_combine(const __grid_constant__ CombineTask task) {
  run_unready_combine(
      task, [&task](std::uint32_t epoch) { send_rows(task, epoch, [&task] { return stage(task); }); },
      [&task](std::uint32_t /*epoch*/, const auto& ready) { receive<From, To>(task, ready); },
      [&task] { clear_route(task.route, task.common.num_ranks); });
}

struct Kernels {
  template <class From, class To>
  static CombineKernel get() {
    return bulk_combine<From, To>;
  }
};

}  // namespace

bool load_bulk_sums() {
  bool all = true;
  for_each_combine_kernel<Kernels>(
      [&all](const void* kernel) { all = make_room_for_ring(kernel, kSumRingBytes) && all; });
  return all;
}

void launch_bulk_sums(const CombineTask& task, int blocks, cudaStream_t stream) {
  combine_kernel<Kernels>(task.rows_dtype, task.output_dtype)<<<blocks, kThreads, kSumRingBytes, stream>>>(task);
  check(cudaGetLastError(), "launching a combine");
}

}  // namespace tokenyard::engine::cuda
