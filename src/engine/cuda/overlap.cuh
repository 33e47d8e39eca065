// SPDX-License-Identifier: Apache-2.0
// Kernels that start while the one before them on the stream still runs, so that their launch, and what they do before
// they wait for its end, cost nothing (CudaEngine::may_overlap).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "engine/cuda/kernels.h"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/tasks.h"
#include "engine/cuda/verbs.cuh"

namespace tokenyard::engine::cuda {

// By all threads, first. Parameters are read through a cache that is empty when a kernel starts: one word of each of
// its lines, asked for at once by several warps, costs about one miss; lines as the code comes to them cost one each.
// Nobody needs what is read.
template <class Task>
__device__ __forceinline__ void fetch_parameters(const Task& task) {
  constexpr unsigned kSharers = 4;  // warps of the smallest block
  constexpr unsigned kLine = 64 / sizeof(std::uint32_t);
  constexpr unsigned kWords = sizeof(Task) / sizeof(std::uint32_t);
  const auto* words = reinterpret_cast<const std::uint32_t*>(&task);
  const unsigned first = threadIdx.x / kWarp % kSharers * kLine;
  std::uint32_t all = 0;
#pragma unroll
  for (unsigned i = 0; i < kWords; i += kSharers * kLine)
    all |= words[min(i + first, kWords - 1)];
  // Keeps the loads, and does nothing. Threads do not part here, which would make what follows longer.
  if (__reduce_or_sync(kAllLanes, all) == 1) __nanosleep(0);
}

struct Launch {
  int blocks = 1;
  int threads = kThreads;
  std::size_t shared_bytes = 0;
  bool overlaps = false;
};

// The kernel calls wait_for_kernels_before.
template <class... Parameters>
void launch_overlapping(void (*kernel)(Parameters...),
                        const Launch& launch,
                        cudaStream_t stream,
                        const Parameters&... parameters) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = launch.overlaps ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, parameters...), "launching a kernel");
}

}  // namespace tokenyard::engine::cuda
