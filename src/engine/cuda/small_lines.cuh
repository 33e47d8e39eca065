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
  bool last;       // of the row or packet
};

__device__ __forceinline__ Slice slice_of(const SmallWork& work, unsigned index) {
  return {index * (blockDim.x / kLineThreads) + threadIdx.x / kLineThreads, work.step, index == work.slices - 1};
}

// What an item is.
struct Item {
  unsigned token;
  unsigned peer;  // of those that the work counts
  Slice slice;
};

// Of one for each token.
__device__ __forceinline__ Item token_of(const SmallWork& work, unsigned item) {
  return {item >> work.slices_log2, 0, slice_of(work, item & (work.slices - 1))};
}

// Of one for each token and peer.
__device__ __forceinline__ Item item_of(const SmallWork& work, unsigned item) {
  const unsigned row = item >> work.slices_log2;
  const unsigned token = work.peers.divide(row);
  return {token, row - token * work.peers.value(), slice_of(work, item & (work.slices - 1))};
}

// Whether blocks have more to do than one of them: to send, or to receive.
__device__ __forceinline__ bool blocks_do_both(const SmallWork& work, unsigned tokens) {
  return tokens * (work.peers.value() + 1) << work.slices_log2 > gridDim.x;
}

// The warp that has the fewest lines of a packet, and does what one warp does for it.
__device__ __forceinline__ bool in_last_warp(const Slice& slice) {
  return slice.last && threadIdx.x / kWarp == blockDim.x / kWarp - 1;
}

// The place of this thread in its line: it has 16 bytes of it, of which the last 8 are the flag in the last place.
__device__ __forceinline__ unsigned place_in_line() {
  return threadIdx.x % kLineThreads;
}

__device__ __forceinline__ bool holds_flag() {
  return place_in_line() == kLineThreads - 1;
}

// A line is seen as a whole when one instruction stores it and one loads it, so its threads come together before: lanes
// that once went different ways need not do so by themselves.
__device__ __forceinline__ unsigned lanes_of_line() {
  return ((1U << kLineThreads) - 1) << (lane_index() / kLineThreads * kLineThreads);
}

// Where this thread's part of a line lies, from the first line on.
__device__ __forceinline__ unsigned offset_of(unsigned line) {
  return line * static_cast<unsigned>(kDataLineBytes) + place_in_line() * 16;
}

// What a line has of a row for this thread: 16 bytes, or 8 beside the flag, as far as the row goes.
struct Part {
  std::byte* at = nullptr;
  int bytes = 0;
  bool words = true;  // the row is whole words of 8 bytes, at an address of such
};

__device__ __forceinline__ unsigned row_offset_of(unsigned line) {
  return line * static_cast<unsigned>(kLineData) + place_in_line() * 16;
}

__device__ __forceinline__ Part part_of(const std::byte* row, unsigned line, unsigned row_bytes, bool words) {
  const unsigned offset = row_offset_of(line);
  const int most = holds_flag() ? 8 : 16;
  return {const_cast<std::byte*>(row) + offset, min(static_cast<int>(row_bytes - offset), most), words};
}

__device__ __noinline__ inline Pair load_bytes(const std::byte* from, int bytes) {
  std::uint64_t words[2] = {};  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll 1
  for (int i = 0; i < bytes; ++i)
    words[i / 8] |= static_cast<std::uint64_t>(from[i]) << (i % 8 * 8);
  return {words[0], words[1]};
}

__device__ __noinline__ inline void store_bytes(std::byte* to, int bytes, Pair pair) {
#pragma unroll 1
  for (int i = 0; i < bytes; ++i)
    to[i] = static_cast<std::byte>((i < 8 ? pair.first : pair.second) >> (i % 8 * 8));
}

__device__ __forceinline__ Pair load_part(const Part& part) {
  if (!part.words) return load_bytes(part.at, part.bytes);
  Pair pair{};
  const auto* from = reinterpret_cast<const std::uint64_t*>(part.at);
  if (part.bytes > 0) pair.first = from[0];
  if (part.bytes > 8) pair.second = from[1];
  return pair;
}

__device__ __forceinline__ void store_part(const Part& part, const Pair& pair) {
  if (!part.words) return store_bytes(part.at, part.bytes, pair);
  auto* to = reinterpret_cast<std::uint64_t*>(part.at);
  if (part.bytes > 0) to[0] = pair.first;
  if (part.bytes > 8) to[1] = pair.second;
}

// What this thread has of lines `first`, first + step, ...
struct Parts {
  Pair pairs[kLinesAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
};

// Calls visit(k, line) for the thread's lines of those; with few rows no thread has a second one.
template <class Visit>
__device__ __forceinline__ void for_each_line(const Slice& slice, unsigned num_lines, const Visit& visit) {
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    if (k > 0 && k * slice.step >= num_lines) break;  // the same for all threads
    visit(k, slice.first + k * slice.step);
  }
}

// To the next lines of the warp, while there are any.
__device__ __forceinline__ bool advance(Slice& slice, unsigned num_lines) {
  if (kLinesAtOnce * slice.step >= num_lines) return false;  // the same for all threads
  slice.first += kLinesAtOnce * slice.step;
  return __any_sync(kAllLanes, static_cast<int>(slice.first < num_lines)) != 0;
}

// Whole lines, by all eight threads of each.
__device__ __forceinline__ void store_lines(
    std::byte* to, const Parts& parts, const Slice& slice, unsigned num_lines, std::uint64_t flag) {
  for_each_line(slice, num_lines, [&](int k, unsigned line) {
    const Pair pair{parts.pairs[k].first, holds_flag() ? flag : parts.pairs[k].second};
    __syncwarp(lanes_of_line());
    if (line < num_lines) store_pair_system(to + offset_of(line), pair);
  });
}

__device__ __forceinline__ Parts load_lines(const std::byte* from, const Slice& slice, unsigned num_lines) {
  Parts parts{};
  for_each_line(slice, num_lines, [&](int k, unsigned line) {
    __syncwarp(lanes_of_line());
    if (line < num_lines) parts.pairs[k] = load_pair_system(from + offset_of(line));
  });
  return parts;
}

// Whether all of this thread's lines are there, as far as it can tell: only those that hold flags can.
__device__ __forceinline__ bool are_there(const Parts& parts,
                                          const Slice& slice,
                                          unsigned num_lines,
                                          std::uint64_t flag) {
  bool there = true;
  for_each_line(slice, num_lines,
                [&](int k, unsigned line) { there = there && (line >= num_lines || parts.pairs[k].second == flag); });
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
