// SPDX-License-Identifier: Apache-2.0
// Rows of expert-major rounds in lines that tell of their own arrival (small_layout.h). A warp takes 16 lines at a
// time, a piece: with the data in shared memory in between, what lies on either side of it goes by 16 bytes a lane.
#pragma once

#include <cstdint>

#include "engine/cuda/expert_state.cuh"
#include "engine/cuda/small_lines.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kLinesOfWarp = kWarp / kLineThreads;
inline constexpr int kPieceAccesses = 4;
inline constexpr int kPieceLines = kPieceAccesses * kLinesOfWarp;
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

// By all threads of a block: the row in shared memory, to the lines at `place` of each destination's window.
__device__ inline void store_row_in_lines(const Common& common,
                                          const TokenOfBlock& to,
                                          std::int64_t place,
                                          const std::byte* row,
                                          int lines,
                                          std::uint64_t flag) {
  constexpr int kLinesOfBlock = kThreads / kLineThreads;
  for (auto line = static_cast<int>(threadIdx.x) / kLineThreads; line < lines; line += kLinesOfBlock) {
    const Pair pair = pair_of_line(row, line, flag);
    for (int d = 0; d < to.num_destinations; ++d)
      store_pair_system(window_of(common, to.destinations[d]) + place + offset_in_lines(line), pair);
  }
}

__device__ __forceinline__ int line_of_lane(int access) {
  return access * kLinesOfWarp + lane_index() / kLineThreads;
}

// By one warp: waits for lines [first, first + kPieceLines) of `lines`, as far as there are so many, and leaves their
// words in `piece`. `pointless` as in wait_as_warp.
template <class Pointless>
__device__ bool take_piece(const Common& common,
                           const Awaited& awaited,
                           const std::byte* from,
                           int lines,
                           Piece& piece,
                           const Pointless& pointless) {
  const std::uint64_t flag = line_flag(awaited.epoch);
  Pair pairs[kPieceAccesses];  // NOLINT(modernize-avoid-c-arrays): device code
  const auto ready = [&] {
    bool there = true;
#pragma unroll
    for (int k = 0; k < kPieceAccesses; ++k) {
      const int line = line_of_lane(k);
      if (line >= lines) continue;
      pairs[k] = load_pair_system(from + offset_in_lines(line));
      there = there && (!holds_flag() || pairs[k].second == flag);
    }
    return __all_sync(kAllLanes, static_cast<int>(there)) != 0;
  };
  if (!wait_as_warp(common, awaited, ready, pointless)) return false;
  auto* words = reinterpret_cast<std::uint64_t*>(piece.bytes);
#pragma unroll
  for (int k = 0; k < kPieceAccesses; ++k) {
    const int word = line_of_lane(k) * kLineWords + 2 * static_cast<int>(place_in_line());
    if (line_of_lane(k) >= lines) continue;
    words[word] = pairs[k].first;
    if (!holds_flag()) words[word + 1] = pairs[k].second;
  }
  __syncwarp();
  return true;
}

// By one warp: the other way.
__device__ inline void store_piece(std::byte* to, int lines, const Piece& piece, std::uint64_t flag) {
#pragma unroll
  for (int k = 0; k < kPieceAccesses; ++k) {
    const int line = line_of_lane(k);
    if (line < lines) store_pair_system(to + offset_in_lines(line), pair_of_line(piece.bytes, line, flag));
  }
}

}  // namespace tokenyard::engine::cuda
