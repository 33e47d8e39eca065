// SPDX-License-Identifier: Apache-2.0
// The kernels of a combine whose origins pull, by placement (combine_steps.cuh), and how they are loaded and launched.
#pragma once

#include "engine/cuda/bulk_sums.cuh"
#include "engine/cuda/combine_kernels.cuh"
#include "engine/cuda/combine_steps.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/plain_sums.cuh"

namespace tokenyard::engine::cuda {

template <class Placement, class From, class To>
__global__ void __launch_bounds__(kThreads) combine_plainly(const __grid_constant__ typename Placement::Task task) {
  Plainly<Placement, From, To> access(task);
  run_combine<Placement>(task, access);
}

// One block fills a multiprocessor: its stages do.
template <class Placement, class From, class To>
__global__ void __launch_bounds__(kThreads, 1) combine_in_bulk(const __grid_constant__ typename Placement::Task task) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte ring[];  // NOLINT(modernize-avoid-c-arrays): device code
  __shared__ Counters counters;
  InBulk<Placement, From, To> access(task, ring, counters);
#else
  Plainly<Placement, From, To> access(task);  // compiled for an older device, and run on a newer one
#endif
  run_combine<Placement>(task, access);
}

template <class Placement>
struct PlainKernels {
  template <class From, class To>
  static auto get() {
    return combine_plainly<Placement, From, To>;
  }
};

template <class Placement>
struct BulkKernels {
  template <class From, class To>
  static auto get() {
    return combine_in_bulk<Placement, From, To>;
  }
};

// False where the current device cannot combine in bulk.
template <class Placement>
bool load_pull_combine() {
  load_combine_kernels<PlainKernels<Placement>, Placement::kLowPrecision>();
  bool all = true;
  for_each_combine_kernel<BulkKernels<Placement>, Placement::kLowPrecision>(
      [&all](const void* kernel) { all = make_room_for_ring(kernel, kSumRingBytes) && all; });
  return all;
}

template <class Placement>
void launch_pull_combine(const typename Placement::Task& task, int blocks, bool in_bulk, cudaStream_t stream) {
  constexpr bool kLow = Placement::kLowPrecision;
  const CombineTask& rows = Placement::rows_of(task);
  const auto kernel = in_bulk ? combine_kernel<BulkKernels<Placement>, kLow>(rows.rows_dtype, rows.output_dtype)
                              : combine_kernel<PlainKernels<Placement>, kLow>(rows.rows_dtype, rows.output_dtype);
  kernel<<<blocks, kThreads, in_bulk ? kSumRingBytes : 0, stream>>>(task);
  check(cudaGetLastError(), "launching a combine");
}

}  // namespace tokenyard::engine::cuda
