// SPDX-License-Identifier: Apache-2.0
// Combine of rows that were reduced over this rank's experts, in one launch: expert output that does not lie in the
// window is staged there, a header tells each origin, and the origin pulls its tokens' rows and sums them in the order
// of ranks. By plain loads, of any width.
#include "engine/cuda/combine_kernels.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/rank_major_combine.cuh"

namespace tokenyard::engine::cuda {
namespace {

template <class From, class To>
__global__ void __launch_bounds__(kThreads) combine(const __grid_constant__ CombineTask task) {
  const auto stage = [&task] {
    stage_rows(task);
    return true;
  };
  run_combine(
      task, [&](std::uint32_t epoch) { send_rows(task, epoch, stage); },
      [&task](std::uint32_t /*epoch*/) { sum_by_blocks<From, To>(task); },
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
