// SPDX-License-Identifier: Apache-2.0
// The origin's side of a combine, for devices with bulk copies: rows of a token come from their owners through a ring
// of stages in shared memory, so that what is on its way does not depend on how many warps wait for it. The warps of a
// block have roles:
//
//   puller   one warp: finds where the rows of tokens are, and loads their pieces, owner by owner
//   summers  adds each piece to sums in registers, and writes what is complete
//
// What is left over of the block does as it likes. Sums and their order are those of row_sums.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/cuda/batches.cuh"
#include "engine/cuda/combine_steps.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kSumWarps = 14;
inline constexpr int kSumThreads = kSumWarps * kWarp;
inline constexpr int kPacks = 2;  // of a thread, 16 bytes of a piece each
inline constexpr int kPieceBytes = kSumThreads * kPacks * 16;
inline constexpr int kPullStages = 14;
inline constexpr int kPullRingBytes = kPullStages * kPieceBytes;
inline constexpr std::int64_t kLeastPulledBytes = 512;

inline constexpr int kPullerWarp = 0;
inline constexpr int kFirstSummer = kWarps - kSumWarps;

// What is in a stage: of a token's row, from `offset` bytes on. A token without rows has one piece, of no bytes, for
// each part of its output.
struct Piece {
  std::int64_t token;
  std::int32_t offset;
  std::int32_t bytes;
  std::int32_t width;  // bytes of the part, whether there are any here or not; 0: there are no more pieces
  bool ends_part;      // no owner's bytes of it follow
};

struct PullShared {
  std::uint64_t loaded[kPullStages];
  std::uint64_t summed[kPullStages];
  Piece pieces[kPullStages];
  OwnersOfToken owners;
};

// By one thread.
class Puller {
 public:
  __device__ Puller(PullShared& shared, std::byte* ring, std::int64_t row_bytes)
      : shared_(shared), ring_(ring), row_bytes_(static_cast<std::int32_t>(row_bytes)) {}

  __device__ void pull(std::int64_t token, const OwnersOfToken& owners) {
    for (std::int32_t offset = 0; offset < row_bytes_; offset += kPieceBytes) {
      const std::int32_t width = min(row_bytes_ - offset, kPieceBytes);
      if (owners.count == 0) put({token, offset, 0, width, true}, nullptr);
      for (int owner = 0; owner < owners.count; ++owner)
        put({token, offset, width, width, owner == owners.count - 1}, owners.rows[owner] + offset);
    }
  }

  __device__ void finish() { put({0, 0, 0, 0, false}, nullptr); }

 private:
  // The summers always come, for loads from a GPU's memory do not fail to.
  __device__ void put(const Piece& piece, const std::byte* from) {
    const unsigned stage = next_ % kPullStages;
    const unsigned turn = next_ / kPullStages;
    while (turn > 0 && !bytes_arrived(&shared_.summed[stage], (turn - 1) % 2)) {
    }
    shared_.pieces[stage] = piece;
    expect_bytes(&shared_.loaded[stage], static_cast<std::uint32_t>(piece.bytes));
    if (piece.bytes > 0) {
      load_bulk(ring_ + stage * kPieceBytes, from, static_cast<std::uint32_t>(piece.bytes), &shared_.loaded[stage]);
    }
    ++next_;
  }

  PullShared& shared_;
  std::byte* ring_;
  std::int32_t row_bytes_;
  unsigned next_ = 0;
};

// Stored as often as it takes in accesses of 16 bytes at most.
template <class To, int N>
__device__ void store_sums(std::byte* to, const float (&sums)[N]) {
  constexpr int kEach = std::min(N, static_cast<int>(16 / sizeof(typename To::Bits)));
#pragma unroll
  for (int part = 0; part < N / kEach; ++part) {
    Pack<To, kEach> pack;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      pack.bits[i] = protocol::encode<To>(sums[part * kEach + i]);
    reinterpret_cast<Pack<To, kEach>*>(to)[part] = pack;
  }
}

template <class To, int N>
__device__ void add_bias(float (&sums)[N], const std::byte* from) {
  constexpr int kEach = std::min(N, static_cast<int>(16 / sizeof(typename To::Bits)));
#pragma unroll
  for (int part = 0; part < N / kEach; ++part) {
    const Pack<To, kEach> pack = reinterpret_cast<const Pack<To, kEach>*>(from)[part];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      sums[part * kEach + i] = __fadd_rn(sums[part * kEach + i], protocol::decode<To>(pack.bits[i]));
  }
}

template <class From, class To, int N>
__device__ void end_part(const CombineTask& task, const Piece& piece, float (&sums)[kPacks][N]) {
  constexpr auto kFrom = static_cast<std::int64_t>(sizeof(typename From::Bits));
  constexpr auto kTo = static_cast<std::int64_t>(sizeof(typename To::Bits));
  const auto thread = static_cast<int>(threadIdx.x) - kFirstSummer * kWarp;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int at = (thread + k * kSumThreads) * 16;
    if (at >= piece.width) continue;
    const std::int64_t place = (piece.offset + at) / kFrom * kTo;
    for (unsigned b = 0; b < task.bias.size(); ++b) {
      if (task.bias[b] != nullptr) add_bias<To>(sums[k], task.bias[b] + piece.token * task.bias_stride[b] + place);
    }
    store_sums<To>(task.output + piece.token * task.output_stride + place, sums[k]);
#pragma unroll
    for (int i = 0; i < N; ++i)
      sums[k][i] = 0.0F;
  }
}

// By the threads of the summers.
template <class From, class To>
__device__ void sum_pieces(const CombineTask& task, PullShared& shared, const std::byte* ring) {
  constexpr int kCount = static_cast<int>(16 / sizeof(typename From::Bits));
  const auto thread = static_cast<int>(threadIdx.x) - kFirstSummer * kWarp;
  float sums[kPacks][kCount] = {};
  for (unsigned next = 0;; ++next) {
    const unsigned stage = next % kPullStages;
    while (!bytes_arrived(&shared.loaded[stage], next / kPullStages % 2)) {
    }
    const Piece piece = shared.pieces[stage];
    if (piece.width == 0) return;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int at = (thread + k * kSumThreads) * 16;
      if (at >= piece.bytes) continue;
      add_pack<From, kCount>(sums[k], *reinterpret_cast<const Pack<From, kCount>*>(ring + stage * kPieceBytes + at));
    }
    __syncwarp();
    if (lane_index() == 0) arrive_at_counter(&shared.summed[stage]);
    if (piece.ends_part) end_part<From, To>(task, piece, sums);
  }
}

// By all threads of a block, when the owners' rows are there. `Find` makes the places of the tokens of a batch:
// prepare(batch's first token) is called ahead, find(token, owners) for each, both by one warp. `rest` by the warps
// without a role.
template <class From, class To, class Find, class Rest>
__device__ void pull_tokens(
    const CombineTask& task, std::int64_t tokens, std::byte* ring, Find&& find, const Rest& rest) {
  __shared__ PullShared shared;
  const Batches batches = batches_of(tokens, task.common.layout.shape().tokens_per_chunk);
  if (threadIdx.x == kPullerWarp * kWarp) {
    for (int stage = 0; stage < kPullStages; ++stage) {
      init_byte_counter(&shared.loaded[stage]);
      init_arrival_counter(&shared.summed[stage], kSumWarps);
    }
    // Of the counters, and of the headers that said that the rows are there.
    fence_before_bulk_copies();
  }
  __syncthreads();
  if (warp_index() >= kFirstSummer) return sum_pieces<From, To>(task, shared, ring);
  if (warp_index() != kPullerWarp) return rest(batches);
  Puller puller(shared, ring, task.row_bytes);
  if (blockIdx.x < batches.count) find.prepare(batches.first(blockIdx.x));
  for (std::int64_t batch = blockIdx.x; batch < batches.count; batch += gridDim.x) {
    find.begin();
    if (batch + gridDim.x < batches.count) find.prepare(batches.first(batch + gridDim.x));
    for (int i = 0; i < batches.tokens_of(batch); ++i) {
      const std::int64_t token = batches.first(batch) + i;
      find.find(token, shared.owners);
      __syncwarp();
      if (lane_index() == 0) puller.pull(token, shared.owners);
      __syncwarp();
    }
  }
  find.end();
  if (lane_index() == 0) puller.finish();
  __syncwarp();
}

}  // namespace tokenyard::engine::cuda
