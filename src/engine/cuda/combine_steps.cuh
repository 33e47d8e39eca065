// SPDX-License-Identifier: Apache-2.0
// What combines share whose origins pull: the section where rows wait, their headers, and the sum over the ranks that
// owe a token's rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/cuda/copies.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/tasks.h"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"
#include "protocol/casts.h"

namespace tokenyard::engine::cuda {

inline constexpr int kOwnersAtOnce = 8;

// The origins have read the rows of the combine before; only then may staging write over them.
__device__ inline bool wait_for_section(const Common& common, std::uint32_t epoch) {
  bool there = true;
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kCombinePhase, peer);
    there = there && wait_until(common, {peer, Phase::kCombine, epoch}, [&] {
              return protocol::reached(protocol::rows_released(load_acquire_system(word)), common.owed[peer]);
            });
  }
  return __syncthreads_and(there) != 0;
}

template <class Wire, class From>
__device__ void cast_row(std::byte* to, const std::byte* from, std::int64_t n, Crew crew) {
  for (std::int64_t i = crew.index; i < n; i += crew.count) {
    const float value = protocol::decode<From>(reinterpret_cast<const typename From::Bits*>(from)[i]);
    reinterpret_cast<typename Wire::Bits*>(to)[i] = protocol::encode<Wire>(value);
  }
}

template <class Wire>
__device__ void cast_row_to(const CombineTask& task, std::byte* to, const std::byte* from, Crew crew) {
  switch (task.from_dtype) {
    case Dtype::kBf16:
      return cast_row<Wire, protocol::Bf16>(to, from, task.hidden, crew);
    case Dtype::kF16:
      return cast_row<Wire, protocol::F16>(to, from, task.hidden, crew);
    default:
      return cast_row<Wire, protocol::F32>(to, from, task.hidden, crew);
  }
}

// A row of expert output as it crosses: each element rounded once.
__device__ inline void stage_row(const CombineTask& task, std::byte* to, const std::byte* from, Crew crew) {
  if (task.from_dtype == task.rows_dtype) return copy_row(to, from, task.row_bytes, task.unit, crew);
  switch (task.rows_dtype) {
    case Dtype::kBf16:
      return cast_row_to<protocol::Bf16>(task, to, from, crew);
    case Dtype::kF16:
      return cast_row_to<protocol::F16>(task, to, from, crew);
    case Dtype::kF32:
      return cast_row_to<protocol::F32>(task, to, from, crew);
    default:
      return cast_row_to<protocol::F8e4m3>(task, to, from, crew);
  }
}

// By one block, after all rows are in place: releases them to their origins (pairs with wait_for_owners).
__device__ inline void write_headers(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  for (int origin = static_cast<int>(threadIdx.x); origin < common.num_ranks; origin += kThreads) {
    const std::uint32_t rows = load_relaxed_device(task.route.rows_received + origin);
    if (rows == 0) continue;
    protocol::HeaderLine* header = header_of(common, origin, protocol::kCombinePhase, epoch, common.rank);
    header->agreed = task.hidden;
    header->row_limit = task.row_limit;
    header->status = protocol::HeaderStatus::kOk;
    store_release_system(&header->stamp, protocol::encode_stamp(epoch, rows));
    common.owed[origin] = epoch;
  }
}

__device__ inline bool wait_for_owners(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  bool there = true;
  for (int owner = static_cast<int>(threadIdx.x); owner < common.num_ranks; owner += kThreads) {
    if (task.route.rows_sent[owner] == 0) continue;
    const Awaited awaited{owner, Phase::kCombine, epoch};
    const protocol::HeaderLine* header = header_of(common, common.rank, protocol::kCombinePhase, epoch, owner);
    const auto stamped = [&] { return protocol::stamp_is(load_acquire_system(&header->stamp), epoch); };
    if (!wait_until(common, awaited, stamped)) {
      there = false;
    } else if (header->status == protocol::HeaderStatus::kAborted || header->agreed != task.hidden) {
      const bool aborted = header->status == protocol::HeaderStatus::kAborted;
      give_up(common, task.route.state + kCombineAborted, aborted ? NoticeKind::kAborted : NoticeKind::kMismatch,
              awaited);
      there = false;
    }
  }
  return __syncthreads_and(there) != 0;
}

// The ranks that owe a row of the token, ascending, for the threads of a block.
struct OwnersOfToken {
  const std::byte* rows[kMaxTopK];
  int count;
};

// N values of consecutive elements, at most 16 bytes of the wire.
template <class Format, int N>
struct alignas(sizeof(typename Format::Bits) * N) Pack {
  typename Format::Bits bits[N];
};

template <class Format, int N>
__device__ void add_pack(float (&sums)[N], const Pack<Format, N>& pack) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    sums[i] = __fadd_rn(sums[i], protocol::decode<Format>(pack.bits[i]));
}

// One pack of a token's sum: ((+0 + lowest rank) + next rank) + ... + biases, each addition rounded, then one rounding.
template <class From, class To, int N>
__device__ void sum_pack(const CombineTask& task, const OwnersOfToken& owners, std::int64_t token, int index) {
  float sums[N] = {};
  for (int first = 0; first < owners.count; first += kOwnersAtOnce) {
    Pack<From, N> packs[kOwnersAtOnce];
    // All loads before the first addition: they cross the link.
#pragma unroll
    for (int k = 0; k < kOwnersAtOnce; ++k) {
      if (first + k < owners.count) packs[k] = reinterpret_cast<const Pack<From, N>*>(owners.rows[first + k])[index];
    }
#pragma unroll
    for (int k = 0; k < kOwnersAtOnce; ++k) {
      if (first + k < owners.count) add_pack<From, N>(sums, packs[k]);
    }
  }
  for (unsigned b = 0; b < task.bias.size(); ++b) {
    if (task.bias[b] == nullptr) continue;
    const std::byte* bias = task.bias[b] + token * task.bias_stride[b];
    add_pack<To, N>(sums, reinterpret_cast<const Pack<To, N>*>(bias)[index]);
  }
  Pack<To, N> output;
#pragma unroll
  for (int i = 0; i < N; ++i)
    output.bits[i] = protocol::encode<To>(sums[i]);
  reinterpret_cast<Pack<To, N>*>(task.output + token * task.output_stride)[index] = output;
}

// By all blocks. `find(token, owners)` is called by all threads of the block.
template <class From, class To, class Find>
__device__ void sum_tokens(const CombineTask& task, const Find& find) {
  __shared__ OwnersOfToken owners;
  // As many values as make 16 bytes of the wider of the two.
  constexpr int kSize = static_cast<int>(std::max(sizeof(typename From::Bits), sizeof(typename To::Bits)));
  constexpr int kPack = 16 / kSize;
  const std::int64_t tokens = task.route.state[kRouteTokens];
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    __syncthreads();
    find(token, owners);
    __syncthreads();
    const auto n = static_cast<int>(task.hidden);
    if (task.vectors) {
      for (int i = static_cast<int>(threadIdx.x); i < n / kPack; i += kThreads)
        sum_pack<From, To, kPack>(task, owners, token, i);
    } else {
      for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads)
        sum_pack<From, To, 1>(task, owners, token, i);
    }
  }
}

// By the last block of the operation, for the next one.
__device__ inline void end_combine(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  if (threadIdx.x == 0) common.board->blocks_done = 0;
  if (task.sends) write_epochs(common, protocol::kCombinePhase, epoch, 0);
  if (!task.receives) return;
  for (int owner = static_cast<int>(threadIdx.x); owner < common.num_ranks; owner += kThreads) {
    store_release_system(progress_of(common, owner, protocol::kCombinePhase, common.rank),
                         protocol::encode_progress(epoch, epoch));
  }
  __syncthreads();
}

// `send(epoch)` and `receive(epoch)` by all blocks, each with the half that is asked for; `end` by the last one.
template <class Send, class Receive, class End>
__device__ void run_combine(const CombineTask& task, const Send& send, const Receive& receive, const End& end) {
  const Common& common = task.common;
  if (__syncthreads_or(static_cast<int>(load_relaxed_device(&common.board->failed))) != 0) return;
  const bool aborted = load_relaxed_device(task.route.state + kRouteAborted) != 0;
  const std::uint32_t last = common.board->epochs[protocol::kCombinePhase];
  // No rank combines a round that was given up, so it uses up no epoch.
  const std::uint32_t epoch = task.sends && !aborted ? last + 1 : last;
  if (!aborted) {
    if (task.sends) send(epoch);
    if (task.receives && wait_for_owners(task, epoch)) receive(epoch);
  }
  if (!last_block(&common.board->blocks_done)) return;
  end_combine(task, epoch);
  if (task.receives) end();
}

}  // namespace tokenyard::engine::cuda
