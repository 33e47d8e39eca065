// SPDX-License-Identifier: Apache-2.0
// The sum of a token's rows, wherever they lie, by the threads of a crew.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/cuda/copies.cuh"
#include "engine/cuda/sums.cuh"
#include "engine/cuda/tasks.h"

namespace tokenyard::engine::cuda {

inline constexpr int kRowsAtOnce = 8;

// The ranks that owe a row of the token, ascending, for the threads of a block.
struct OwnersOfToken {
  const std::byte* rows[kMaxTopK];
  int count;
};

// One pack of a token's sum: ((+0 + lowest rank) + next rank) + ... + biases, each addition rounded, then one rounding.
template <class From, class To, int N>
__device__ void sum_pack(const CombineTask& task, const OwnersOfToken& owners, std::int64_t token, int index) {
  float sums[N] = {};
  for (int first = 0; first < owners.count; first += kRowsAtOnce) {
    Pack<From, N> packs[kRowsAtOnce];
    // All loads before the first addition: they cross the link.
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (first + k < owners.count) packs[k] = reinterpret_cast<const Pack<From, N>*>(owners.rows[first + k])[index];
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (first + k < owners.count) add_pack<From, N>(sums, packs[k]);
    }
  }
  for (unsigned b = 0; b < task.bias.size(); ++b) {
    if (task.bias[b] == nullptr) continue;
    const std::byte* bias = task.bias[b] + token * task.bias_stride[b];
    add_pack<To, N>(sums, reinterpret_cast<const Pack<To, N>*>(bias)[index]);
  }
  reinterpret_cast<Pack<To, N>*>(task.output + token * task.output_stride)[index] = round_sums<To, N>(sums);
}

template <class From, class To>
__device__ void sum_token(const CombineTask& task, const OwnersOfToken& owners, std::int64_t token, Crew crew) {
  constexpr int kPack = kPackOf<From, To>;
  const auto n = static_cast<int>(task.hidden);
  if (task.vectors) {
    for (int i = crew.index; i < n / kPack; i += crew.count)
      sum_pack<From, To, kPack>(task, owners, token, i);
  } else {
    for (int i = crew.index; i < n; i += crew.count)
      sum_pack<From, To, 1>(task, owners, token, i);
  }
}

}  // namespace tokenyard::engine::cuda
