// SPDX-License-Identifier: Apache-2.0
// The two halves of a combine by expert whose rows cross in lines: a warp makes a piece of a row at a time, and sums
// one of a token.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/cuda/expert_combine.cuh"
#include "engine/cuda/expert_lines.cuh"

namespace tokenyard::engine::cuda {

// Values [first, first + count) of a row.
struct PieceOfRow {
  int first;
  int count;
};

// Rows four at a time, and of each two packs of a lane, so that enough is on its way without long code: each
// instruction runs only once or twice, and takes as long to fetch as to run.
template <class Wire, class From, int N>
__device__ __forceinline__ void reduce_packs(const WeighedRows& rows, const PieceOfRow& at, Piece& piece) {
  constexpr int kRows = 4;
  constexpr int kPacks = 2;
  const int packs = at.count / N;
#pragma unroll 1
  for (int i = lane_index(); i < packs; i += kPacks * kWarp) {
    const int second = min(i + kWarp, packs - 1);  // where there is none, one of another lane's for nothing
    float sums[kPacks][N] = {};                    // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll 1
    for (int begin = 0; begin < rows.count; begin += kRows) {
      Pack<From, N> packs_of[kRows][kPacks];  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        if (begin + k >= rows.count) continue;
        const auto* row = reinterpret_cast<const Pack<From, N>*>(
            reinterpret_cast<const typename From::Bits*>(rows.rows[begin + k]) + at.first);
        packs_of[k][0] = row[i];
        packs_of[k][1] = row[second];
      }
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        if (begin + k >= rows.count) continue;
        const float weight = rows.weights[begin + k];
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
#pragma unroll
          for (int v = 0; v < N; ++v)
            sums[p][v] = __fmaf_rn(weight, protocol::decode<From>(packs_of[k][p].bits[v]), sums[p][v]);
        }
      }
    }
    store_pack<Wire, N>(piece.bytes, i, sums[0]);
    if (i + kWarp < packs) store_pack<Wire, N>(piece.bytes, i + kWarp, sums[1]);
  }
}

// As reduce_packs, where rows do not lie so.
template <class Wire, class From>
__device__ __noinline__ void reduce_values(const WeighedRows& rows, PieceOfRow at, Piece& piece) {
#pragma unroll 1
  for (int i = lane_index(); i < at.count; i += kWarp) {
    float sum[1] = {};  // NOLINT(modernize-avoid-c-arrays): device code
    add_weighed<From, 1>(sum, rows, at.first + i);
    reinterpret_cast<typename Wire::Bits*>(piece.bytes)[i] = protocol::encode<Wire>(sum[0]);
  }
}

// What is behind the row's end does not matter.
template <class Wire, class From, bool kInPacks>
__device__ __forceinline__ void reduce_piece(const ExpertCombineTask& task,
                                             const WeighedRows& rows,
                                             int index,
                                             Piece& piece) {
  constexpr int kWire = static_cast<int>(sizeof(typename Wire::Bits));
  constexpr int kValues = 16 / std::max(kWire, static_cast<int>(sizeof(typename From::Bits)));
  const auto n = static_cast<int>(task.hidden);
  const int values = task.piece_lines * static_cast<int>(kLineData) / kWire;
  const PieceOfRow at{index * values, min(n - index * values, values)};
  if (kInPacks || (task.from_vectors && n % kValues == 0)) return reduce_packs<Wire, From, kValues>(rows, at, piece);
  reduce_values<Wire, From>(rows, at, piece);
}

// `kUniform`: experts gave the wire's dtype, as packs.
template <class Wire, bool kUniform>
__device__ __forceinline__ void reduce_piece_of(const ExpertCombineTask& task,
                                                const WeighedRows& rows,
                                                int index,
                                                Piece& piece) {
  if (kUniform || task.from_dtype == task.wire_dtype)
    return reduce_piece<Wire, Wire, kUniform>(task, rows, index, piece);
  if (task.from_dtype == Dtype::kBf16) return reduce_piece<Wire, protocol::Bf16, false>(task, rows, index, piece);
  if (task.from_dtype == Dtype::kF16) return reduce_piece<Wire, protocol::F16, false>(task, rows, index, piece);
  reduce_piece<Wire, protocol::F32, false>(task, rows, index, piece);
}

// A piece of a row, or of a token's sum: which one a warp is at.
struct PieceOfWork {
  __device__ PieceOfWork(const ExpertCombineTask& task, unsigned item)
      : row(task.pieces.divide(item)), index(static_cast<int>(item - row * task.pieces.value())) {}

  // Bytes into the lines of a row.
  [[nodiscard]] __device__ int offset(const ExpertCombineTask& task) const {
    return index * task.piece_lines * static_cast<int>(kDataLineBytes);
  }

  [[nodiscard]] __device__ int lines(const ExpertCombineTask& task) const {
    return min(task.piece_lines, task.row_lines - index * task.piece_lines);
  }

  unsigned row;
  int index;
};

__device__ __forceinline__ unsigned first_item() {
  return threadIdx.x / kWarp * gridDim.x + blockIdx.x;
}

// What a warp loads before it knows the epoch: of its first row, and what each lane sees of the room at one origin;
// most often there is some long before.
struct LoadedCombine {
  __device__ __forceinline__ void load(const ExpertCombineTask& task) {
    const Common& common = task.common;
    const unsigned most = static_cast<unsigned>(task.experts.rows) - 1;
    record.load(task, min(task.pieces.divide(first_item()), most));
    const int peer = min(lane_index(), common.num_ranks - 1);
    progress = load_acquire_system(progress_of(common, common.rank, protocol::kCombinePhase, peer));
  }

  RecordOfLanes record;
  std::uint64_t progress;
};

// By one warp.
__device__ __noinline__ inline bool wait_for_room_of_rows(const Common& common, std::uint32_t epoch, int origin) {
  return __all_sync(kAllLanes, static_cast<int>(wait_for_combine_space(common, epoch, origin, true, false))) != 0;
}

// By the warps of all blocks.
template <class Wire, bool kUniform>
__device__ __forceinline__ void reduce_into_lines(const ExpertCombineTask& task,
                                                  std::uint32_t epoch,
                                                  unsigned rows,
                                                  LoadedCombine& loaded) {
  __shared__ OwedRow owed[kWarps];                   // NOLINT(modernize-avoid-c-arrays): device code
  __shared__ std::uint32_t given[kWarps][kMaxTopK];  // NOLINT(modernize-avoid-c-arrays): device code
  __shared__ Piece pieces[kWarps];                   // NOLINT(modernize-avoid-c-arrays): device code
  const Common& common = task.common;
  const unsigned items = rows * task.pieces.value();
  OwedRow& row = owed[warp_index()];
  Piece& piece = pieces[warp_index()];
#pragma unroll 1
  for (unsigned item = first_item(); item < items; item += kWarps * gridDim.x) {
    const PieceOfWork at(task, item);
    if (item != first_item()) loaded.record.load(task, at.row);
    __syncwarp();
    prepare_owed_row(task, epoch, loaded.record, given[warp_index()], row);
    __syncwarp();
    if (!row.needed) continue;
    reduce_piece_of<Wire, kUniform>(task, row.from, at.index, piece);
    const std::uint64_t seen = __shfl_sync(kAllLanes, loaded.progress, row.origin % kWarp);
    if (row.origin >= kWarp || !protocol::reached(protocol::rows_released(seen), epoch - kExpertDepth)) {
      if (!wait_for_room_of_rows(common, epoch, row.origin)) return;
    }
    __syncwarp();
    std::byte* to = window_of(common, row.origin) + task.extra.back(epoch, common.rank, row.token) + at.offset(task);
    store_piece(to, at.lines(task), piece, line_flag(epoch));
  }
}

// By one lane, when it waits long: whether the combine ends here.
__device__ __noinline__ inline bool is_pointless(const Common& common, std::uint32_t* given_up, Awaited awaited) {
  if (gave_combine_up(common, awaited.epoch, awaited.peer)) give_up(common, given_up, NoticeKind::kAborted, awaited);
  return load_relaxed_device(given_up) != 0;
}

// By one warp: an owner's lines of a token. False when the combine ends here.
__device__ __forceinline__ bool await_lines(
    const ExpertCombineTask& task, const Awaited& awaited, const std::byte* from, int lines, PartOfPiece& part) {
  const Common& common = task.common;
  std::uint32_t* given_up = task.route.state + kCombineGivenUp;
  const auto ready = [&] {
    return __all_sync(kAllLanes, static_cast<int>(load_piece(from, lines, line_flag(awaited.epoch), part))) != 0;
  };
  return wait_as_warp(common, awaited, ready, [&] { return is_pointless(common, given_up, awaited); });
}

template <class Wire, int N>
__device__ __forceinline__ void add_word(float (&sums)[N], std::uint64_t word) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    constexpr int kBits = 8 * static_cast<int>(sizeof(typename Wire::Bits));
    const auto code = static_cast<typename Wire::Bits>(word >> (i * kBits));
    sums[i] = __fadd_rn(sums[i], protocol::decode<Wire>(code));
  }
}

// The values of one word of a line, as far as the row goes.
template <class To, bool kWholeWords, int N>
__device__ __forceinline__ void store_sums(const ExpertCombineTask& task,
                                           std::int64_t token,
                                           int first,
                                           const float (&sums)[N]) {
  std::byte* row = task.output + token * task.output_stride;
  const auto n = static_cast<int>(task.hidden);
  if (kWholeWords) {
    if (first < n) store_pack<To, N>(row, first / N, sums);
    return;
  }
  if (task.output_vectors && first + N <= n) return store_pack<To, N>(row, first / N, sums);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (first + i < n) reinterpret_cast<typename To::Bits*>(row)[first + i] = protocol::encode<To>(sums[i]);
  }
}

// ((+0 + lowest rank) + next rank) + ..., each addition rounded, then one rounding. While one owner's lines are waited
// for, the next one's are on their way from memory. False when the combine ends here.
template <class Wire, class To, bool kWholeWords>
__device__ __forceinline__ bool sum_piece(const ExpertCombineTask& task, std::uint32_t epoch, const PieceOfWork& at) {
  constexpr int kValues = 8 / static_cast<int>(sizeof(typename Wire::Bits));  // of a word
  const std::byte* own = window_of(task.common, task.common.rank) + at.offset(task);
  const int lines = at.lines(task);
  RankWalk walk(task.route.ranks_of_token + at.row * task.route.words, task.route.words);
  float sums[kPieceAccesses][2][kValues] = {};  // NOLINT(modernize-avoid-c-arrays): device code
  PartOfPiece next{};
  bool there = false;
  const auto load = [&](int owner) {
    if (owner >= 0) there = load_piece(own + task.extra.back(epoch, owner, at.row), lines, line_flag(epoch), next);
  };
  int next_owner = walk.next();
  load(next_owner);
#pragma unroll 1
  while (next_owner >= 0) {
    const int owner = next_owner;
    const bool here = there;
    PartOfPiece part = next;
    next_owner = walk.next();
    load(next_owner);
    if (__all_sync(kAllLanes, static_cast<int>(here)) == 0 &&
        !await_lines(task, {owner, Phase::kCombine, epoch}, own + task.extra.back(epoch, owner, at.row), lines, part)) {
      return false;
    }
#pragma unroll
    for (int k = 0; k < kPieceAccesses; ++k) {
      add_word<Wire, kValues>(sums[k][0], part.pairs[k].first);
      add_word<Wire, kValues>(sums[k][1], part.pairs[k].second);  // of a flag's word nobody looks at the sum
    }
  }
#pragma unroll
  for (int k = 0; k < kPieceAccesses; ++k) {
    if (line_of_lane(k) >= lines) continue;
    const int word =
        (at.index * task.piece_lines + line_of_lane(k)) * kLineWords + 2 * static_cast<int>(place_in_line());
    store_sums<To, kWholeWords, kValues>(task, at.row, word * kValues, sums[k][0]);
    if (!holds_flag()) store_sums<To, kWholeWords, kValues>(task, at.row, (word + 1) * kValues, sums[k][1]);
  }
  return true;
}

// `kUniform`: the output has the wire's dtype, and its words are whole.
template <class Wire, bool kUniform>
__device__ __forceinline__ bool sum_piece_of(const ExpertCombineTask& task,
                                             std::uint32_t epoch,
                                             const PieceOfWork& at) {
  if (kUniform || task.output_dtype == task.wire_dtype) return sum_piece<Wire, Wire, kUniform>(task, epoch, at);
  if (task.output_dtype == Dtype::kBf16) return sum_piece<Wire, protocol::Bf16, false>(task, epoch, at);
  if (task.output_dtype == Dtype::kF16) return sum_piece<Wire, protocol::F16, false>(task, epoch, at);
  return sum_piece<Wire, protocol::F32, false>(task, epoch, at);
}

// By the warps of all blocks.
template <class Wire, bool kUniform>
__device__ __forceinline__ void sum_lines(const ExpertCombineTask& task, std::uint32_t epoch, std::int64_t tokens) {
  const unsigned items = static_cast<unsigned>(tokens) * task.pieces.value();
#pragma unroll 1
  for (unsigned item = first_item(); item < items; item += kWarps * gridDim.x) {
    const PieceOfWork at(task, item);
    if (!sum_piece_of<Wire, kUniform>(task, epoch, at)) return;
  }
}

}  // namespace tokenyard::engine::cuda
