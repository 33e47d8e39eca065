// SPDX-License-Identifier: Apache-2.0
// How the blocks of a large operation share its tokens.
#pragma once

#include <cstdint>

#include "protocol/formats.h"

namespace tokenyard::engine::cuda {

inline constexpr int kMaxBatch = 16;
inline constexpr int kMinBatch = 2;

// The tokens of a call in batches, each inside one chunk; batch b is block b % blocks'.
struct Batches {
  std::int64_t tokens = 0;
  std::int64_t count = 0;
  int size = 1;

  __device__ std::int64_t first(std::int64_t batch) const { return batch * size; }

  __device__ int tokens_of(std::int64_t batch) const {
    return static_cast<int>(min(static_cast<std::int64_t>(size), tokens - first(batch)));
  }
};

// Small enough that each block has two or more. A chunk's size is a power of two, and so a batch divides it.
__device__ inline Batches batches_of(std::int64_t tokens, int tokens_per_chunk) {
  int size = min(kMaxBatch, tokens_per_chunk);
  while (size > kMinBatch && protocol::ceil_div(tokens, size) < 2 * std::int64_t{gridDim.x})
    size /= 2;
  return {tokens, protocol::ceil_div(tokens, size), size};
}

}  // namespace tokenyard::engine::cuda
