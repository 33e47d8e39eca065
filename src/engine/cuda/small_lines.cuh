// SPDX-License-Identifier: Apache-2.0
// Lines of small rounds (small_layout.h) as threads store and load them, and the waits for them.
//
// These kernels run a few hundred instructions a warp, once: an instruction costs as much as it takes to fetch and to
// wait for the one before. So what threads share is computed with unsigned 32-bit numbers, nothing is divided, loads
// are issued before anything is known that they do not need, and what is rare is a function call.
#pragma once

#include <cstdint>

#include "engine/cuda/routing.cuh"
#include "engine/cuda/small_layout.h"
#include "engine/cuda/tasks.h"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kLinesAtOnce = 2;  // of a thread: rows of 14 KiB cross in one go

// A slice of the lines of a row or packet: with few tokens several blocks share one.
struct Slice {
  unsigned first;  // this thread's first line; others follow in steps
  unsigned step;   // lines of all the blocks that share
  unsigned index;
};

__device__ __forceinline__ Slice slice_of(const SmallWork& work, unsigned index) {
  const unsigned lines = blockDim.x / kLineThreads;
  return {index * lines + threadIdx.x / kLineThreads, lines * work.slices.value(), index};
}

// What an item is.
struct Item {
  unsigned token;
  unsigned peer;  // of those that the work counts
  unsigned slice;
};

__device__ __forceinline__ Item item_of(const SmallWork& work, unsigned item) {
  const unsigned row = work.slices.divide(item);
  const unsigned token = work.peers.divide(row);
  return {token, row - token * work.peers.value(), item - row * work.slices.value()};
}

// The place of this thread in its line: it has 16 bytes of it, of which the last 8 are the flag in the last place.
__device__ __forceinline__ unsigned place_in_line() {
  return threadIdx.x % kLineThreads;
}

__device__ __forceinline__ bool holds_flag() {
  return place_in_line() == kLineThreads - 1;
}

// Where this thread's part of a line lies, from the first line on.
__device__ __forceinline__ unsigned offset_of(unsigned line) {
  return line * static_cast<unsigned>(kDataLineBytes) + place_in_line() * 16;
}

// Which bytes of a row it holds: 16 of them, or 8 beside the flag, as far as the row goes.
__device__ __forceinline__ unsigned row_offset_of(unsigned line) {
  return line * static_cast<unsigned>(kLineData) + place_in_line() * 16;
}

__device__ __noinline__ inline Pair load_bytes(const std::byte* row, unsigned offset, unsigned row_bytes) {
  std::uint64_t words[2] = {};  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll 1
  for (unsigned i = 0; i < 16 && offset + i < row_bytes; ++i)
    words[i / 8] |= static_cast<std::uint64_t>(row[offset + i]) << (i % 8 * 8);
  return {words[0], words[1]};
}

__device__ __noinline__ inline void store_bytes(
    std::byte* row, unsigned offset, unsigned row_bytes, Pair pair, unsigned bytes) {
#pragma unroll 1
  for (unsigned i = 0; i < bytes && offset + i < row_bytes; ++i)
    row[offset + i] = static_cast<std::byte>((i < 8 ? pair.first : pair.second) >> (i % 8 * 8));
}

// This thread's part of a line of a row. `words`: the row is whole words at an address of such.
__device__ __forceinline__ Pair load_part(const std::byte* row, unsigned line, unsigned row_bytes, bool words) {
  const unsigned offset = row_offset_of(line);
  if (!words) return load_bytes(row, offset, row_bytes);
  Pair pair{};
  const auto* from = reinterpret_cast<const std::uint64_t*>(row + offset);
  if (offset < row_bytes) pair.first = from[0];
  if (offset + 8 < row_bytes && !holds_flag()) pair.second = from[1];
  return pair;
}

__device__ __forceinline__ void store_part(
    std::byte* row, unsigned line, unsigned row_bytes, bool words, const Pair& pair) {
  const unsigned offset = row_offset_of(line);
  if (!words) return store_bytes(row, offset, row_bytes, pair, holds_flag() ? 8 : 16);
  auto* to = reinterpret_cast<std::uint64_t*>(row + offset);
  if (offset < row_bytes) to[0] = pair.first;
  if (offset + 8 < row_bytes && !holds_flag()) to[1] = pair.second;
}

// This thread's parts of lines `first`, first + step, ...
struct Parts {
  Pair pairs[kLinesAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
};

// Whole lines, by all eight threads of each.
__device__ __forceinline__ void store_lines(
    std::byte* to, const Parts& parts, Slice slice, unsigned num_lines, std::uint64_t flag) {
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const unsigned line = slice.first + k * slice.step;
    const Pair pair{parts.pairs[k].first, holds_flag() ? flag : parts.pairs[k].second};
    if (line < num_lines) store_pair_system(to + offset_of(line), pair);
  }
}

__device__ __forceinline__ Parts load_lines(const std::byte* from, Slice slice, unsigned num_lines) {
  Parts parts{};
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const unsigned line = slice.first + k * slice.step;
    if (line < num_lines) parts.pairs[k] = load_pair_system(from + offset_of(line));
  }
  return parts;
}

// Whether all of this thread's lines are there, as far as it can tell: only those that hold flags can.
__device__ __forceinline__ bool are_there(const Parts& parts, Slice slice, unsigned num_lines, std::uint64_t flag) {
  bool there = true;
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k)
    there = there && (slice.first + k * slice.step >= num_lines || parts.pairs[k].second == flag);
  return there || !holds_flag();
}

// How long a warp has waited.
struct Clock {
  std::uint64_t start = 0;
  bool late = false;
  bool ends = false;
};

// By one lane, now and then: what has become of the wait. It goes on once more after the clock ran out, for what came
// meanwhile.
__device__ __noinline__ inline Clock look_at_clock(const Common& common, Awaited awaited, Clock clock) {
  clock.ends = load_relaxed_device(&common.board->failed) != 0;
  if (clock.ends) return clock;
  const std::uint64_t now = nanoseconds();
  if (clock.start == 0) clock.start = now;
  if (clock.late) fail(common, NoticeKind::kTimeout, awaited, now - clock.start);
  clock.ends = clock.late;
  clock.late = now - clock.start >= deadline_of(common, awaited.epoch);
  return clock;
}

// By whole warps, like wait_until: `ready()` gives all lanes one answer. `pointless()` is asked now and then, by one
// lane: true ends the wait.
template <class Ready, class Pointless>
__device__ __forceinline__ bool wait_as_warp(const Common& common,
                                             const Awaited& awaited,
                                             const Ready& ready,
                                             const Pointless& pointless) {
  constexpr int kPollsPerClock = 64;
  Clock clock;
  while (true) {
#pragma unroll 1
    for (int i = 0; i < kPollsPerClock; ++i) {
      if (ready()) return true;
    }
    if (threadIdx.x % kWarp == 0) {
      clock.ends = pointless();
      if (!clock.ends) clock = look_at_clock(common, awaited, clock);
    }
    if (__any_sync(kAllLanes, static_cast<int>(clock.ends)) != 0) return false;
  }
}

}  // namespace tokenyard::engine::cuda
