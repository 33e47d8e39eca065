// SPDX-License-Identifier: Apache-2.0
// Sums of rows that lie with several ranks, by plain loads: for few tokens, rows of any width, and any device. Shares
// of tokens go round the warps of all blocks, as many as there are warps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "engine/cuda/combine_steps.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kPacksAtOnce = 4;   // of a lane, and of each of
inline constexpr int kOwnersAtOnce = 2;  // this many rows: loads that cross the link together

// Packs of one token's sum that a warp makes.
struct Share {
  int token = 0;
  int begin = 0;
  int end = 0;
};

// Adds what is left of the token's rows to the packs first, first + kWarp, ..., two rows at a time.
template <class From, int N, class Rows>
__device__ void add_rows(
    const Rows& rows, typename Rows::Known known, int first, int end, float (&sums)[kPacksAtOnce][N]) {
  const std::byte* row = rows.next(known);
  while (row != nullptr) {
    const std::byte* both[kOwnersAtOnce] = {row, rows.next(known)};
    Pack<From, N> packs[kOwnersAtOnce][kPacksAtOnce];
#pragma unroll
    for (int o = 0; o < kOwnersAtOnce; ++o) {
#pragma unroll
      for (int k = 0; k < kPacksAtOnce; ++k) {
        const int index = first + k * kWarp;
        if (both[o] != nullptr && index < end) packs[o][k] = reinterpret_cast<const Pack<From, N>*>(both[o])[index];
      }
    }
#pragma unroll
    for (int o = 0; o < kOwnersAtOnce; ++o) {
#pragma unroll
      for (int k = 0; k < kPacksAtOnce; ++k) {
        if (both[o] != nullptr && first + k * kWarp < end) add_pack<From, N>(sums[k], packs[o][k]);
      }
    }
    row = both[kOwnersAtOnce - 1] == nullptr ? nullptr : rows.next(known);
  }
}

// ((+0 + first row) + next row) + ... + biases, each addition rounded, then one rounding.
template <class From, class To, int N, class Rows>
__device__ void sum_share(const CombineTask& task,
                          const Rows& rows,
                          const typename Rows::Known& known,
                          const Share& share) {
  for (int begin = share.begin; begin < share.end; begin += kPacksAtOnce * kWarp) {
    const int first = begin + lane_index();
    float sums[kPacksAtOnce][N] = {};
    add_rows<From, N>(rows, known, first, share.end, sums);
#pragma unroll
    for (int k = 0; k < kPacksAtOnce; ++k) {
      const int index = first + k * kWarp;
      if (index >= share.end) continue;
      for (unsigned b = 0; b < task.bias.size(); ++b) {
        if (task.bias[b] == nullptr) continue;
        const std::byte* bias = task.bias[b] + share.token * task.bias_stride[b];
        add_pack<To, N>(sums[k], reinterpret_cast<const Pack<To, N>*>(bias)[index]);
      }
      reinterpret_cast<Pack<To, N>*>(task.output + share.token * task.output_stride)[index] =
          round_sums<To, N>(sums[k]);
    }
  }
}

// By warps of all blocks: those with an index of their own begin with the share of that index, and all go on with the
// next that is free.
template <class From, class To, int N, class Rows>
__device__ void sum_shares(const CombineTask& task, const Rows& rows, Crew warps) {
  const auto tokens = static_cast<int>(task.route.state[kRouteTokens]);
  const auto packs = static_cast<int>(task.hidden / N);
  const int most_slices = (packs + kWarp - 1) / kWarp;
  const int slices = max(1, min(most_slices, kWarps * static_cast<int>(gridDim.x) / max(tokens, 1)));
  const int per_slice = (packs + slices - 1) / slices;
  const auto next_free = [&] {
    std::uint32_t taken = 0;
    if (lane_index() == 0) taken = add_relaxed_device(&task.common.board->shares_taken, 1);
    return static_cast<int>(__shfl_sync(kAllLanes, taken, 0)) + warps.count;
  };
  int item = warps.index >= 0 ? warps.index : next_free();
  while (item < tokens * slices) {
    const int slice = item % slices;
    const Share share{item / slices, slice * per_slice, min(packs, (slice + 1) * per_slice)};
    const typename Rows::Known known = rows.load(share.token);
    if (!rows.in_place() && !rows.wait(known)) return;
    item = next_free();
    sum_share<From, To, N>(task, rows, known, share);
  }
}

template <class Placement, class From, class To>
class Plainly {
 public:
  using Task = typename Placement::Task;

  __device__ explicit Plainly(const Task& task) : task_(task) {}

  __device__ void stage(std::uint32_t epoch, Crew warps) const { stage_plainly<Placement>(task_, epoch, warps); }

  __device__ void sum(std::uint32_t epoch, Crew warps) const {
    const CombineTask& rows = Placement::rows_of(task_);
    typename Placement::Rows owed(task_);
    owed.begin(epoch);
    if (rows.vectors) return sum_shares<From, To, kPackOf<From, To>>(rows, owed, warps);
    sum_shares<From, To, 1>(rows, owed, warps);
  }

 private:
  const Task& task_;
};

}  // namespace tokenyard::engine::cuda
