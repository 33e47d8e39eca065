// SPDX-License-Identifier: Apache-2.0
// Rows of expert-major rounds in lines that tell of their own arrival (small_layout.h). A warp takes 8 lines at a
// time, a piece: with the data in shared memory in between, what lies on either side of it goes by 16 bytes a lane.
#pragma once

#include <cstdint>

#include "engine/cuda/expert_state.cuh"
#include "engine/cuda/small_lines.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kPieceBytes = kPieceLines * kLineWords * 8;
static_assert(kPieceBytes % 16 == 0);

// In a warp's shared memory.
struct alignas(16) Piece {
  std::byte bytes[kPieceBytes];  // NOLINT(modernize-avoid-c-arrays): device code
};

__device__ __forceinline__ std::uint64_t line_flag(std::uint32_t epoch) {
  return tag_of(epoch);
}

// Data words 2 * place and 2 * place + 1 of a line, from `row` in shared memory, where its words lie one after the
// other.
__device__ __forceinline__ Pair pair_of_line(const std::byte* row, int line, std::uint64_t flag) {
  const auto* words =
      reinterpret_cast<const std::uint64_t*>(row) + line * kLineWords + 2 * static_cast<int>(place_in_line());
  return {words[0], holds_flag() ? flag : words[1]};
}

__device__ __forceinline__ int offset_in_lines(int line) {
  return line * static_cast<int>(kDataLineBytes) + static_cast<int>(place_in_line() * sizeof(Pair));
}

// Where a block stores a row: to the windows of a set of ranks, at `place` of each.
struct RowTo {
  const Common& common;
  const std::uint32_t* ranks;
  int words;
  std::int64_t place;
};

// By all threads of a block, from shared memory.
__device__ inline void store_row_in_lines(const RowTo& to, const std::byte* row, int lines, std::uint64_t flag) {
  constexpr int kLinesOfBlock = kThreads / kLineThreads;
#pragma unroll 1
  for (auto line = static_cast<int>(threadIdx.x) / kLineThreads; line < lines; line += kLinesOfBlock) {
    const Pair pair = pair_of_line(row, line, flag);
    RankWalk walk(to.ranks, to.words);
#pragma unroll 1
    for (int rank = walk.next(); rank >= 0; rank = walk.next()) {
      __syncwarp(lanes_of_line());
      store_pair_system(window_of(to.common, rank) + to.place + offset_in_lines(line), pair);
    }
  }
}

__device__ __forceinline__ int line_of_lane(int access) {
  return access * kLinesOfAccess + lane_index() / kLineThreads;
}

// What a lane has of a piece.
struct PartOfPiece {
  Pair pairs[kPieceAccesses];  // NOLINT(modernize-avoid-c-arrays): device code
};

// By one warp: the first kPieceLines of `lines` lines, as far as there are so many. Whether they are there, as far as
// this lane can tell.
__device__ __forceinline__ bool load_piece(const std::byte* from, int lines, std::uint64_t flag, PartOfPiece& part) {
  bool there = true;
#pragma unroll
  for (int k = 0; k < kPieceAccesses; ++k) {
    const int line = line_of_lane(k);
    if (line >= lines) continue;
    __syncwarp(lanes_of_line());
    part.pairs[k] = load_pair_system(from + offset_in_lines(line));
    there = there && (!holds_flag() || part.pairs[k].second == flag);
  }
  return there;
}

// By one warp: leaves the data words in `piece`.
__device__ __forceinline__ void leave_piece(const PartOfPiece& part, int lines, Piece& piece) {
  auto* words = reinterpret_cast<std::uint64_t*>(piece.bytes);
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kPieceAccesses; ++k) {
    const int word = line_of_lane(k) * kLineWords + 2 * static_cast<int>(place_in_line());
    if (line_of_lane(k) >= lines) continue;
    words[word] = part.pairs[k].first;
    if (!holds_flag()) words[word + 1] = part.pairs[k].second;
  }
  __syncwarp();
}

// By one warp: the other way.
__device__ inline void store_piece(std::byte* to, int lines, const Piece& piece, std::uint64_t flag) {
#pragma unroll
  for (int k = 0; k < kPieceAccesses; ++k) {
    const int line = line_of_lane(k);
    if (line >= lines) continue;
    const Pair pair = pair_of_line(piece.bytes, line, flag);
    __syncwarp(lanes_of_line());
    store_pair_system(to + offset_in_lines(line), pair);
  }
}

}  // namespace tokenyard::engine::cuda
