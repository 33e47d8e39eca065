// SPDX-License-Identifier: Apache-2.0
// What blocks that send parts of one chunk agree on: who of them ends it.
#pragma once

#include <cstdint>

#include "engine/cuda/tasks.h"
#include "engine/cuda/verbs.cuh"

namespace tokenyard::engine::cuda {

__device__ inline std::uint32_t tokens_of_chunk(const Common& common, std::int64_t chunk, std::int64_t tokens) {
  const std::int64_t size = common.layout.shape().tokens_per_chunk;
  return static_cast<std::uint32_t>(min(size, tokens - chunk * size));
}

// By one thread, when `count` more of the chunk's `all` parts are on their way: whether they end it. It has then
// acquired what was done before for the others.
__device__ inline bool ends_chunk(const Common& common, std::int64_t chunk, std::uint32_t count, std::uint32_t all) {
  if (add_acq_rel_device(common.arrivals + chunk, count) + count != all) return false;
  common.arrivals[chunk] = 0;
  return true;
}

// By the last block of an operation that was given up: blocks may differ in whether they saw that before they sent.
__device__ inline void forget_arrivals(const Common& common) {
  for (std::int64_t chunk = threadIdx.x; chunk < common.layout.max_chunks(); chunk += kThreads)
    common.arrivals[chunk] = 0;
}

}  // namespace tokenyard::engine::cuda
