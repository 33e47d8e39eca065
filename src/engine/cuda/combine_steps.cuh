// SPDX-License-Identifier: Apache-2.0
// The steps of a combine of ranks that owe each token one row, whose origins pull. Owners stage rows that do not lie in
// the window as they cross, chunk by chunk, and tell each origin of each chunk; headers say whether they do. A row's
// place is its number among those that the owner has for its origin, and chunks are of places. A placement has
//
//   Owed   rows that this rank owes: places(origin), there(origin, place), and row(origin, place), its number in the
//          window's section; from(origin, place), where it lies, and stage_rest(row), what comes with it
//   Rows   rows that are owed to this rank: load(token) at any time; begin(epoch) when the headers are there; then
//          in_place(), or wait(known) until a token's rows are there; next(known) gives them in the order in which they
//          are added, null after the last. By one warp, which does the same in all lanes.
//
// and rows_of(task), and sum_rest(task, epoch) and end(task) for what else an origin does, and does at the end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/chunks.cuh"
#include "engine/cuda/combine_rounds.cuh"
#include "engine/cuda/copies.cuh"
#include "engine/cuda/routes.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/sums.cuh"
#include "engine/cuda/tasks.h"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"
#include "protocol/casts.h"

namespace tokenyard::engine::cuda {

// In a header: all rows lie in the window. 0 where chunks of them are told of.
inline constexpr std::uint64_t kInPlace = 1;

__device__ __forceinline__ std::uint64_t* staged_word(const Common& common, int window, int owner, std::int64_t chunk) {
  return reinterpret_cast<std::uint64_t*>(window_of(common, window) + common.layout.staged(owner, chunk));
}

// By one warp: rows of the origins before this one, where they lie one behind the other.
__device__ inline std::int64_t rows_before(const RouteMemory& route, int origin) {
  std::uint32_t before = 0;
  for (int other = lane_index(); other < origin; other += kWarp)
    before += route.rows_received[other];
  __syncwarp();
  return __reduce_add_sync(kAllLanes, before);
}

// A row of expert output as it crosses: each element rounded once.
__device__ inline void stage_row(const CombineTask& task, std::byte* to, const std::byte* from, Crew crew) {
  if (task.from_dtype == task.rows_dtype) return copy_row(to, from, task.row_bytes, task.unit, crew);
  switch (task.rows_dtype) {
    case Dtype::kBf16:
      return cast_row_of<protocol::Bf16>(task.from_dtype, to, from, task.hidden, crew);
    case Dtype::kF16:
      return cast_row_of<protocol::F16>(task.from_dtype, to, from, task.hidden, crew);
    case Dtype::kF32:
      return cast_row_of<protocol::F32>(task.from_dtype, to, from, task.hidden, crew);
    default:
      return cast_row_of<protocol::F8e4m3>(task.from_dtype, to, from, task.hidden, crew);
  }
}

// By warps, in the order in which origins want the rows: the first chunk of each, then the next. The one that stages
// the last row of a chunk tells its origin (pairs with wait_for_place). `move(to, from)` returns whether it did.
template <class Placement, class Move>
__device__ void stage_rows(const typename Placement::Task& task, std::uint32_t epoch, Crew warps, const Move& move) {
  const typename Placement::Owed owed(task);
  const CombineTask& rows = Placement::rows_of(task);
  const Common& common = rows.common;
  const int size = common.layout.shape().tokens_per_chunk;
  const auto chunks = static_cast<int>(protocol::num_chunks(rows.most_rows, size));
  for (int item = warps.index; item < chunks * size * common.num_ranks; item += warps.count) {
    const int chunk = item / size / common.num_ranks;
    const int origin = (common.rank + 1 + item / size % common.num_ranks) % common.num_ranks;
    const int place = chunk * size + item % size;
    const std::int64_t places = owed.places(origin);
    if (place >= places) continue;
    if (owed.there(origin, place)) {
      const std::int64_t row = owed.row(origin, place);
      std::byte* to = window_of(common, common.rank) + common.layout.combine_row(row);
      if (rows.staged && !move(to, owed.from(origin, place))) return;
      owed.stage_rest(row);
    }
    __syncwarp();
    if (lane_index() != 0) continue;
    const std::uint32_t all = tokens_of_chunk(common, chunk, places);
    if (!ends_chunk(common, origin * common.layout.max_chunks() + chunk, 1, all)) continue;
    store_release_system(staged_word(common, origin, common.rank, chunk), protocol::encode_stamp(epoch, all));
  }
}

template <class Placement>
__device__ void stage_plainly(const typename Placement::Task& task, std::uint32_t epoch, Crew warps) {
  stage_rows<Placement>(task, epoch, warps, [&task](std::byte* to, const std::byte* from) {
    stage_row(Placement::rows_of(task), to, from, {lane_index(), kWarp});
    return true;
  });
}

// Rows may lie in place, and what comes with them not.
__device__ __forceinline__ bool by_chunks(const CombineTask& task) {
  return task.staged || task.stages_rest;
}

// By one block. Rows in place were written by kernels before, which the release publishes (pairs with wait_for_owners).
__device__ inline void write_headers(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  for (int origin = static_cast<int>(threadIdx.x); origin < common.num_ranks; origin += kThreads) {
    const std::uint32_t rows = load_relaxed_device(task.route.rows_received + origin);
    if (rows == 0) continue;
    protocol::HeaderLine* header = header_of(common, origin, protocol::kCombinePhase, epoch, common.rank);
    header->mask = by_chunks(task) ? 0 : kInPlace;
    header->agreed = task.hidden;
    header->row_limit = task.row_limit;
    header->status = protocol::HeaderStatus::kOk;
    store_release_system(&header->stamp, protocol::encode_stamp(epoch, rows));
  }
}

// By all blocks: whether this one may stage rows.
__device__ inline bool begin_sending(const CombineTask& task, std::uint32_t epoch) {
  const bool first = blockIdx.x == 0;
  if (task.ends_views && first) release_views(task.common, task.common.board->epochs[protocol::kDispatchPhase]);
  const bool waits = by_chunks(task) || (task.repeats && first);
  if (waits && !wait_for_section(task.common, epoch)) return false;
  if (first) write_headers(task, epoch);
  return by_chunks(task);
}

// By the last block, when no other one waits for the section any more.
__device__ inline void end_sending(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  for (int origin = static_cast<int>(threadIdx.x); origin < common.num_ranks; origin += kThreads) {
    if (task.route.rows_received[origin] > 0) common.owed[origin] = epoch;
  }
  if (task.reads_views) release_views(common, common.board->epochs[protocol::kDispatchPhase]);
}

// By one warp.
__device__ inline bool wait_for_owners(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  bool there = true;
  for (int owner = lane_index(); owner < common.num_ranks; owner += kWarp) {
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
  __syncwarp();
  return __all_sync(kAllLanes, static_cast<int>(there)) != 0;
}

// By all warps, when the first ones have staged rows: those look by themselves, for the headers have most likely come
// by then. One warp looks for the others, which meet it.
__device__ inline bool owners_are_there(const CombineTask& task, std::uint32_t epoch, int stagers) {
  constexpr int kBarrier = 1;
  __shared__ bool there;
  if (warp_index() <= stagers) {
    const bool known = wait_for_owners(task, epoch);
    if (warp_index() < stagers) return known;
    if (lane_index() == 0) there = known;
    __syncwarp();
  }
  wait_at(kBarrier, stagers == 0 ? kThreads : kThreads / 2);
  return there;
}

// By one thread: until the owner has staged the chunk with the place, where it tells of chunks. Out of line, because
// few loops of those that have it need it.
__device__ __noinline__ inline bool wait_for_place(const CombineTask& task,
                                                   std::uint32_t epoch,
                                                   int owner,
                                                   std::int64_t place) {
  const Common& common = task.common;
  if (header_of(common, common.rank, protocol::kCombinePhase, epoch, owner)->mask == kInPlace) return true;
  const std::uint64_t* word = staged_word(common, common.rank, owner, place / common.layout.shape().tokens_per_chunk);
  return wait_until(
      common, {owner, Phase::kCombine, epoch}, [&] { return protocol::stamp_is(load_acquire_system(word), epoch); },
      task.route.state + kCombineAborted);
}

// What a warp knows of the owners' rows, when their headers are there.
class Readiness {
 public:
  __device__ explicit Readiness(const CombineTask& task) : task_(task) {}

  __device__ void begin(std::uint32_t epoch) {
    epoch_ = epoch;
    const Common& common = task_.common;
    bool in_place = true;
    for (int owner = lane_index(); owner < common.num_ranks; owner += kWarp) {
      if (task_.route.rows_sent[owner] == 0) continue;
      const auto* header = header_of(common, common.rank, protocol::kCombinePhase, epoch_, owner);
      in_place = in_place && header->mask == kInPlace;
    }
    in_place_ = __all_sync(kAllLanes, static_cast<int>(in_place)) != 0;
  }

  // Nothing is to be waited for.
  [[nodiscard]] __device__ bool in_place() const { return in_place_; }

  // place(owner): of the token's row among this rank's rows there; negative where none is awaited.
  template <class Place>
  __device__ bool wait(const Place& place) const {
    if (in_place_) return true;
    bool there = true;
    for (int owner = lane_index(); owner < task_.common.num_ranks; owner += kWarp) {
      if (task_.route.rows_sent[owner] == 0) continue;
      const std::int64_t awaited = place(owner);
      there = there && (awaited < 0 || wait_for_place(task_, epoch_, owner, awaited));
    }
    __syncwarp();
    return __all_sync(kAllLanes, static_cast<int>(there)) != 0;
  }

 private:
  const CombineTask& task_;
  std::uint32_t epoch_ = 0;
  bool in_place_ = false;
};

// By all blocks. `Access` does what depends on how rows are moved: stage(epoch, warps) and sum(epoch, warps), by warps.
// What this rank owes is not held up by ranks that owe it something.
template <class Placement, class Access>
__device__ void run_halves(const typename Placement::Task& task, std::uint32_t epoch, Access& access) {
  const CombineTask& rows = Placement::rows_of(task);
  const bool stages = rows.sends && begin_sending(rows, epoch);
  const auto grid = static_cast<int>(gridDim.x);
  const auto block = static_cast<int>(blockIdx.x);
  const int stagers = !stages ? 0 : rows.receives ? kWarps / 2 : kWarps;
  const bool stager = warp_index() < stagers;
  if (stager) access.stage(epoch, {warp_index() * grid + block, stagers * grid});
  if (!rows.receives || !owners_are_there(rows, epoch, stagers)) return;
  access.sum(epoch, {stager ? -1 : (warp_index() - stagers) * grid + block, (kWarps - stagers) * grid});
  Placement::sum_rest(task, epoch);
}

template <class Placement, class Access>
__device__ void run_combine(const typename Placement::Task& task, Access& access) {
  const CombineTask& rows = Placement::rows_of(task);
  Board* board = rows.common.board;
  // Loaded together, before anything waits for one of them.
  const std::uint32_t failed = load_relaxed_device(&board->failed);
  const std::uint32_t last = load_relaxed_device(&board->epochs[protocol::kCombinePhase]);
  const bool aborted = load_relaxed_device(rows.route.state + kRouteAborted) != 0;
  if (__syncthreads_or(static_cast<int>(failed)) != 0) return;
  // No rank combines a round that was given up, so it uses up no epoch.
  const std::uint32_t epoch = rows.sends && !aborted ? last + 1 : last;
  if (!aborted) run_halves<Placement>(task, epoch, access);
  if (!last_block(&board->blocks_done)) return;
  if (threadIdx.x == 0) board->blocks_done = board->shares_taken = 0;
  if (rows.sends && !aborted) end_sending(rows, epoch);
  if (rows.sends) write_epochs(rows.common, protocol::kCombinePhase, epoch, 0);
  if (!rows.receives) return;
  release_section(rows.common, epoch);
  __syncthreads();
  Placement::end(task);
}

}  // namespace tokenyard::engine::cuda
