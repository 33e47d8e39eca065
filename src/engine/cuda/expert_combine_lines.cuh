// SPDX-License-Identifier: Apache-2.0
// The two halves of a combine by expert whose rows cross in lines: a warp makes a piece of a row at a time, and sums a
// few lines of a token.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/cuda/expert_combine.cuh"
#include "engine/cuda/expert_lines.cuh"

namespace tokenyard::engine::cuda {

template <class Wire>
__device__ __forceinline__ int lines_of_row(const ExpertCombineTask& task) {
  return static_cast<int>(lines_of(task.hidden * static_cast<std::int64_t>(sizeof(typename Wire::Bits))));
}

// One piece of a row, 16 bytes of the wire at a time; what is behind the row's end does not matter. Loops rather than
// long code: each instruction runs only a few times, and takes as long to fetch as to run.
template <class Wire, class From>
__device__ void reduce_piece(const ExpertCombineTask& task, const WeighedRows& rows, int index, Piece& piece) {
  constexpr int kValues = 16 / static_cast<int>(sizeof(typename Wire::Bits));
  constexpr int kPacks = kPieceBytes / 16;
  const auto n = static_cast<int>(task.hidden);
  const int first = index * kPacks * kValues;
  const int end = min(n - first, kPacks * kValues);
  if (task.from_vectors && n % kValues == 0) {
#pragma unroll 1
    for (int i = lane_index(); i * kValues < end; i += kWarp) {
      float sums[kValues] = {};
      add_weighed<From, kValues>(sums, rows, first + i * kValues);
      store_pack<Wire, kValues>(piece.bytes, i, sums);
    }
    return;
  }
#pragma unroll 1
  for (int i = lane_index(); i < end; i += kWarp) {
    float sum[1] = {};
    add_weighed<From, 1>(sum, rows, first + i);
    reinterpret_cast<typename Wire::Bits*>(piece.bytes)[i] = protocol::encode<Wire>(sum[0]);
  }
}

// By the warps of all blocks.
template <class Wire>
__device__ void reduce_into_lines(const ExpertCombineTask& task, std::uint32_t epoch, int rows) {
  __shared__ OwedRow owed[kWarps];                   // NOLINT(modernize-avoid-c-arrays): device code
  __shared__ std::uint32_t given[kWarps][kMaxTopK];  // NOLINT(modernize-avoid-c-arrays): device code
  __shared__ Piece pieces[kWarps];                   // NOLINT(modernize-avoid-c-arrays): device code
  const Common& common = task.common;
  const int lines = lines_of_row<Wire>(task);
  const auto of_row = static_cast<unsigned>((lines + kPieceLines - 1) / kPieceLines);
  const unsigned items = static_cast<unsigned>(rows) * of_row;
  OwedRow& row = owed[warp_index()];
  Piece& piece = pieces[warp_index()];
  // Most often there is room long before; what each lane sees now of one origin spares the wait.
  const int peer = min(lane_index(), common.num_ranks - 1);
  const std::uint64_t progress = load_acquire_system(progress_of(common, common.rank, protocol::kCombinePhase, peer));
  for (unsigned item = threadIdx.x / kWarp * gridDim.x + blockIdx.x; item < items; item += kWarps * gridDim.x) {
    const auto index = static_cast<int>(item % of_row);
    const std::uint32_t* record = task.route.items + static_cast<std::int64_t>(item / of_row) * task.route.item_words;
    __syncwarp();
    prepare_owed_row(task, epoch, record, given[warp_index()], row);
    __syncwarp();
    if (!row.needed) continue;
    if (task.from_dtype == Dtype::kBf16) {
      reduce_piece<Wire, protocol::Bf16>(task, row.from, index, piece);
    } else if (task.from_dtype == Dtype::kF16) {
      reduce_piece<Wire, protocol::F16>(task, row.from, index, piece);
    } else {
      reduce_piece<Wire, protocol::F32>(task, row.from, index, piece);
    }
    const std::uint64_t seen = __shfl_sync(kAllLanes, progress, row.origin % kWarp);
    if (row.origin >= kWarp || !protocol::reached(protocol::rows_released(seen), epoch - kExpertDepth)) {
      const bool room = wait_for_combine_space(common, epoch, row.origin, true, false);
      if (__all_sync(kAllLanes, static_cast<int>(room)) == 0) return;
    }
    __syncwarp();
    std::byte* to = window_of(common, row.origin) + task.extra.back(epoch, common.rank, row.token) +
                    index * kPieceLines * static_cast<int>(kDataLineBytes);
    store_piece(to, lines - index * kPieceLines, piece, line_flag(epoch));
  }
}

// The ranks of a set, ascending.
class RankWalk {
 public:
  __device__ RankWalk(const std::uint32_t* words, int num_words)
      : words_(words), num_words_(num_words), word_(words[0]) {}

  // -1 at the end.
  __device__ int next() {
    while (word_ == 0) {
      if (++index_ >= num_words_) return -1;
      word_ = words_[index_];
    }
    const int rank = index_ * kWordBits + __ffs(static_cast<int>(word_)) - 1;
    word_ &= word_ - 1;
    return rank;
  }

 private:
  const std::uint32_t* words_;
  int num_words_;
  std::uint32_t word_;
  int index_ = 0;
};

// Of one token's row, the line that this lane holds a part of.
struct SummedLine {
  unsigned token = 0;
  int line = 0;
  bool there = false;  // the row has it
};

// By one warp: the next up to kReturnedAtOnce owners' lines. False when the combine ends here.
__device__ inline bool take_lines(const ExpertCombineTask& task,
                                  std::uint32_t epoch,
                                  const SummedLine& at,
                                  const int (&owners)[kReturnedAtOnce],
                                  Pair (&pairs)[kReturnedAtOnce]) {
  const Common& common = task.common;
  const std::byte* own = window_of(common, common.rank);
  const std::uint64_t flag = line_flag(epoch);
  const auto ready = [&] {
    bool there = true;
#pragma unroll
    for (int k = 0; k < kReturnedAtOnce; ++k) {
      if (owners[k] < 0 || !at.there) continue;
      pairs[k] = load_pair_system(own + task.extra.back(epoch, owners[k], at.token) + offset_in_lines(at.line));
      there = there && (!holds_flag() || pairs[k].second == flag);
    }
    return __all_sync(kAllLanes, static_cast<int>(there)) != 0;
  };
  std::uint32_t* given_up = task.route.state + kCombineGivenUp;
  const auto pointless = [&] {
    for (int k = 0; k < kReturnedAtOnce && owners[k] >= 0; ++k) {
      if (gave_combine_up(common, epoch, owners[k]))
        give_up(common, given_up, NoticeKind::kAborted, {owners[k], Phase::kCombine, epoch});
    }
    return load_relaxed_device(given_up) != 0;
  };
  return wait_as_warp(common, {owners[0], Phase::kCombine, epoch}, ready, pointless);
}

template <class Wire, int N>
__device__ void add_word(float (&sums)[N], std::uint64_t word) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    constexpr int kBits = 8 * static_cast<int>(sizeof(typename Wire::Bits));
    const auto code = static_cast<typename Wire::Bits>(word >> (i * kBits));
    sums[i] = __fadd_rn(sums[i], protocol::decode<Wire>(code));
  }
}

// The values of one word of a line, as far as the row goes.
template <class To, int N>
__device__ void store_sums(const ExpertCombineTask& task, std::int64_t token, int first, const float (&sums)[N]) {
  std::byte* row = task.output + token * task.output_stride;
  const auto n = static_cast<int>(task.hidden);
  if (task.output_vectors && first + N <= n) return store_pack<To, N>(row, first / N, sums);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (first + i < n) reinterpret_cast<typename To::Bits*>(row)[first + i] = protocol::encode<To>(sums[i]);
  }
}

// ((+0 + lowest rank) + next rank) + ..., each addition rounded, then one rounding. False when the combine ends here.
template <class Wire, class To>
__device__ bool sum_line(const ExpertCombineTask& task, std::uint32_t epoch, const SummedLine& at) {
  constexpr int kValues = 8 / static_cast<int>(sizeof(typename Wire::Bits));  // of a word
  RankWalk walk(task.route.ranks_of_token + at.token * task.route.words, task.route.words);
  float first[kValues] = {};
  float second[kValues] = {};
  int owners[kReturnedAtOnce];
  Pair pairs[kReturnedAtOnce];
  do {
#pragma unroll
    for (int k = 0; k < kReturnedAtOnce; ++k)
      owners[k] = walk.next();
    if (owners[0] < 0) break;
    if (!take_lines(task, epoch, at, owners, pairs)) return false;
#pragma unroll
    for (int k = 0; k < kReturnedAtOnce; ++k) {
      if (owners[k] < 0) continue;
      add_word<Wire, kValues>(first, pairs[k].first);
      add_word<Wire, kValues>(second, pairs[k].second);
    }
  } while (owners[kReturnedAtOnce - 1] >= 0);
  if (!at.there) return true;
  const int word = at.line * kLineWords + 2 * static_cast<int>(place_in_line());
  store_sums<To, kValues>(task, at.token, word * kValues, first);
  if (!holds_flag()) store_sums<To, kValues>(task, at.token, (word + 1) * kValues, second);
  return true;
}

// By the warps of all blocks.
template <class Wire>
__device__ void sum_lines(const ExpertCombineTask& task, std::uint32_t epoch, std::int64_t tokens) {
  const auto lines = static_cast<unsigned>(lines_of_row<Wire>(task));
  const unsigned of_row = (lines + kLinesOfWarp - 1) / kLinesOfWarp;
  const unsigned items = static_cast<unsigned>(tokens) * of_row;
  for (unsigned item = threadIdx.x / kWarp * gridDim.x + blockIdx.x; item < items; item += kWarps * gridDim.x) {
    const unsigned token = item / of_row;
    const unsigned line = (item - token * of_row) * kLinesOfWarp + threadIdx.x % kWarp / kLineThreads;
    const SummedLine at{token, static_cast<int>(line), line < lines};
    bool goes_on = false;
    if (task.output_dtype == Dtype::kBf16) {
      goes_on = sum_line<Wire, protocol::Bf16>(task, epoch, at);
    } else if (task.output_dtype == Dtype::kF16) {
      goes_on = sum_line<Wire, protocol::F16>(task, epoch, at);
    } else {
      goes_on = sum_line<Wire, protocol::F32>(task, epoch, at);
    }
    if (!goes_on) return;
  }
}

}  // namespace tokenyard::engine::cuda
