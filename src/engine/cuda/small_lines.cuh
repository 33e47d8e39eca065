// SPDX-License-Identifier: Apache-2.0
// Lines of small rounds (small_layout.h) as warps store and load them. Four lines a warp and an access; a block's
// threads take the lines of a packet or row in turn.
#pragma once

#include <cstdint>

#include "engine/cuda/routing.cuh"
#include "engine/cuda/small_layout.h"
#include "engine/cuda/tasks.h"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kLinesOfWarp = kWarp / kLineThreads;
inline constexpr int kLinesOfBlock = kThreads / kLineThreads;
inline constexpr int kLinesAtOnce = 2;  // of a thread: rows of 14 KiB cross in one go

// The place of this thread in its line: words 2 * place and 2 * place + 1, of which the last one is the flag.
__device__ __forceinline__ int place_in_line() {
  return static_cast<int>(threadIdx.x) % kLineThreads;
}

__device__ __forceinline__ bool holds_flag() {
  return place_in_line() == kLineThreads - 1;
}

// The first line of this thread.
__device__ __forceinline__ int line_of_thread() {
  return static_cast<int>(threadIdx.x) / kLineThreads;
}

// This thread's words of its lines: of line `first`, first + kLinesOfBlock, ...
struct Shares {
  Pair pairs[kLinesAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
};

// Calls fn(pair, word) for each share below `num_words`, `word` being the first of its two.
template <class Fn>
__device__ __forceinline__ void for_shares(Shares& shares, int first_line, int num_words, const Fn& fn) {
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const int word = (first_line + k * kLinesOfBlock) * kLineWords + 2 * place_in_line();
    if (word < num_words) fn(shares.pairs[k], word);
  }
}

// The lines that hold `num_words` words, to `lines` in a window. Whole lines: all eight threads of each.
__device__ __forceinline__ void store_shares(
    std::byte* lines, const Shares& shares, int first_line, int num_words, std::uint64_t flag) {
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const int line = first_line + k * kLinesOfBlock;
    if (line * kLineWords >= num_words) return;
    Pair pair = shares.pairs[k];
    if (holds_flag()) pair.second = flag;
    store_pair_system(lines + line * kDataLineBytes + place_in_line() * static_cast<int>(sizeof(Pair)), pair);
  }
}

// Whether all of this thread's lines are there, as far as it can tell: only those that hold flags can.
__device__ __forceinline__ bool load_shares(
    const std::byte* lines, Shares& shares, int first_line, int num_words, std::uint64_t flag) {
  bool there = true;
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const int line = first_line + k * kLinesOfBlock;
    if (line * kLineWords >= num_words) break;
    shares.pairs[k] =
        load_pair_system(lines + line * kDataLineBytes + place_in_line() * static_cast<int>(sizeof(Pair)));
    if (holds_flag() && shares.pairs[k].second != flag) there = false;
  }
  return there;
}

// 8 bytes of a row, word `index`, as far as the row goes.
__device__ __forceinline__ std::uint64_t load_word(const std::byte* row, int row_bytes, int index, bool aligned) {
  if (aligned && 8 * index + 8 <= row_bytes) return reinterpret_cast<const std::uint64_t*>(row)[index];
  std::uint64_t word = 0;
  for (int k = 0; k < 8 && 8 * index + k < row_bytes; ++k)
    word |= static_cast<std::uint64_t>(row[8 * index + k]) << (8 * k);
  return word;
}

__device__ __forceinline__ void store_word(std::byte* row, int row_bytes, int index, bool aligned, std::uint64_t word) {
  if (aligned && 8 * index + 8 <= row_bytes) {
    reinterpret_cast<std::uint64_t*>(row)[index] = word;
    return;
  }
  for (int k = 0; k < 8 && 8 * index + k < row_bytes; ++k)
    row[8 * index + k] = static_cast<std::byte>(word >> (8 * k));
}

// By whole warps, like wait_until: `ready()` gives all lanes one answer. `pointless()` is asked now and then, by one
// lane: true ends the wait.
template <class Ready, class Pointless>
__device__ bool wait_as_warp(const Common& common,
                             const Awaited& awaited,
                             const Ready& ready,
                             const Pointless& pointless) {
  constexpr int kPollsPerClock = 64;
  std::uint64_t start = 0;
  bool late = false;
  while (true) {
    for (int i = 0; i < kPollsPerClock; ++i) {
      if (ready()) return true;
    }
    bool ends = false;
    if (lane_index() == 0) {
      const std::uint64_t now = nanoseconds();
      if (start == 0) start = now;
      ends = load_relaxed_device(&common.board->failed) != 0 || pointless();
      const bool was_late = late;
      late = now - start >= deadline_of(common, awaited.epoch);
      // Once more after the clock ran out: it may have come meanwhile.
      if (!ends && was_late) {
        fail(common, NoticeKind::kTimeout, awaited, now - start);
        ends = true;
      }
    }
    if (__any_sync(kAllLanes, static_cast<int>(ends)) != 0) return false;
  }
}

}  // namespace tokenyard::engine::cuda
