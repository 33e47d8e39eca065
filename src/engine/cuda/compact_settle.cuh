// SPDX-License-Identifier: Apache-2.0
// How a dispatch to final places begins: all blocks of a rank find out where its rows go. Nobody waits for a meeting of
// all blocks, and nothing is released: what blocks and ranks tell each other are words that tell of their own arrival.
//
// 1. A warp a chunk finds, for each rank, which of the chunk's tokens go there, and tells all blocks.
// 2. Every block adds these up. The last one, the clerk, tells every rank the sums.
// 3. Every block waits for what the other ranks tell, and knows where this rank's rows begin at each of them.
//
// All blocks write the same to the lists of the route, each before it reads them itself.
#pragma once

#include <cstdint>

#include "engine/cuda/compact_places.cuh"
#include "engine/cuda/compact_tasks.h"
#include "engine/cuda/plain_headers.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/tagged_units.cuh"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {

inline constexpr int kSharedExperts = 512;
inline constexpr int kChunksAtOnce = 8;  // chunks of a lane in one step of the sums
inline constexpr int kPicksAtOnce = 4;   // of a lane
// Warps that have something else to do while the first ones wait.
inline constexpr int kPorterWarp = kWarps - 2;
inline constexpr int kTellerWarp = kWarps - 1;

struct Settled {
  std::uint32_t epoch = 0;
  std::int64_t tokens = 0;
  std::uint32_t rows = 0;  // received in all
  bool there = false;      // all ranks are in the dispatch, and agree
  bool failed = false;     // before: nothing was done
};

struct SettleShared {
  std::uint32_t expert_rows[kSharedExperts];  // of the block
  std::uint32_t rows_sent[kMaxRanks];
  std::int32_t begin_at[kMaxRanks];
  std::uint32_t rows_received;
};

__device__ __forceinline__ bool is_last_block() {
  return blockIdx.x == gridDim.x - 1;
}

__device__ __forceinline__ std::uint32_t* expert_rows_of(const MoveTask& task, SettleShared& shared) {
  return task.ids.num_experts <= kSharedExperts ? shared.expert_rows : task.counts.expert_rows;
}

__device__ __forceinline__ std::int64_t id_at(const Ids& ids, std::int64_t token, int slot) {
  const std::byte* row = ids.from + token * ids.from_stride;
  return ids.from_i64 ? reinterpret_cast<const std::int64_t*>(row)[slot]
                      : std::int64_t{reinterpret_cast<const std::int32_t*>(row)[slot]};
}

struct ChunkToRoute {
  int chunk = 0;
  std::int64_t first = 0;
  int tokens = 0;
};

// Where the blocks tell each other a chunk's mask: a tagged unit.
__device__ __forceinline__ std::byte* mask_of_chunk(const MoveTask& task, int rank, std::int64_t chunk) {
  return task.counts.masks + (rank * std::int64_t{task.route.chunk_stride} + chunk) * kTaggedBytes;
}

__device__ __forceinline__ TaggedUnit halves_of(std::uint64_t word) {
  return {{static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32)}};
}

__device__ __forceinline__ std::uint64_t word_of(const TaggedUnit& halves) {
  return static_cast<std::uint64_t>(halves.words[1]) << 32 | halves.words[0];
}

struct PickOfChunk {
  int token = 0;  // of the chunk
  int slot = 0;
};

__device__ __forceinline__ PickOfChunk pick_of(const MoveTask& task, int index) {
  const auto token = static_cast<int>(task.counts.slots.divide(static_cast<std::uint32_t>(index)));
  return {token, index - token * task.ids.top_k};
}

// The expert that the pick names, or -1.
__device__ __forceinline__ int expert_of(const Ids& ids, std::int64_t id) {
  return id >= 0 && id < ids.num_experts && id != ids.invalid_id ? static_cast<int>(id) : -1;
}

// By one warp: which tokens have a pick of the lane's rank, of kPicksAtOnce picks of each lane from `first` on.
__device__ __forceinline__ std::uint64_t route_picks(const MoveTask& task,
                                                     const ChunkToRoute& at,
                                                     int first,
                                                     int first_rank) {
  const int num_picks = at.tokens * task.ids.top_k;
  std::int64_t ids[kPicksAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
  int owners[kPicksAtOnce];        // NOLINT(modernize-avoid-c-arrays): device code
  PickOfChunk picks[kPicksAtOnce];
#pragma unroll
  for (int k = 0; k < kPicksAtOnce; ++k) {
    const int i = first + k * kWarp + lane_index();
    picks[k] = pick_of(task, i);
    ids[k] = i < num_picks ? id_at(task.ids, at.first + picks[k].token, picks[k].slot) : -1;
  }
#pragma unroll
  for (int k = 0; k < kPicksAtOnce; ++k) {
    const int expert = expert_of(task.ids, ids[k]);
    owners[k] = expert < 0 ? -1 : task.counts.owners.owner_of(expert) - first_rank;
  }
  std::uint64_t mask = 0;
#pragma unroll 1
  for (int rank = 0; rank < min(kWarp, task.common.num_ranks - first_rank); ++rank) {
    std::uint32_t low = 0;
    std::uint32_t high = 0;
#pragma unroll
    for (int k = 0; k < kPicksAtOnce; ++k) {
      const std::uint32_t bit = owners[k] == rank ? 1U << (picks[k].token % kWordBits) : 0;
      (picks[k].token < kWordBits ? low : high) |= bit;
    }
    low = __reduce_or_sync(kAllLanes, low);
    high = __reduce_or_sync(kAllLanes, high);
    if (lane_index() == rank) mask = static_cast<std::uint64_t>(high) << kWordBits | low;
  }
  return mask;
}

// By one warp.
__device__ __forceinline__ void route_chunk(const MoveTask& task, std::uint32_t epoch, const ChunkToRoute& at) {
  for (int first_rank = 0; first_rank < task.common.num_ranks; first_rank += kWarp) {
    std::uint64_t mask = 0;
    for (int first = 0; first < at.tokens * task.ids.top_k; first += kWarp * kPicksAtOnce)
      mask |= route_picks(task, at, first, first_rank);
    const int rank = first_rank + lane_index();
    if (rank < task.common.num_ranks)
      store_tagged(mask_of_chunk(task, rank, at.chunk), halves_of(mask), mark_of(epoch));
  }
}

// By one warp: keeps the chunk's picks, and counts those that no pick of their token before names too.
__device__ __forceinline__ void keep_picks(const MoveTask& task, const ChunkToRoute& at, std::uint32_t* expert_rows) {
  const Ids& ids = task.ids;
#pragma unroll 1
  for (int i = lane_index(); i < at.tokens * ids.top_k; i += kWarp) {
    const PickOfChunk pick = pick_of(task, i);
    const std::int64_t token = at.first + pick.token;
    const std::int64_t id = id_at(ids, token, pick.slot);
    const int expert = expert_of(ids, id);
    task.route.wire_ids[token * ids.top_k + pick.slot] = expert;
    if (expert < 0) {
      if (id != -1 && id != ids.invalid_id)
        atomicAdd(reinterpret_cast<unsigned long long*>(&task.common.board->invalid_ids), 1ULL);
      continue;
    }
    bool repeated = false;
#pragma unroll 1
    for (int before = 0; before < pick.slot; ++before)
      repeated = id_at(ids, token, before) == id || repeated;
    if (!repeated) atomicAdd(expert_rows + expert, 1U);
  }
}

// Calls visit(chunk) for those of this warp.
template <class Visit>
__device__ __forceinline__ void visit_chunks(const MoveTask& task, std::int64_t tokens, const Visit& visit) {
  const int size = task.common.layout.shape().tokens_per_chunk;
  const int chunks = chunks_of(task.common, tokens);
  const auto blocks = static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int chunk = warp_index() * blocks + static_cast<int>(blockIdx.x); chunk < chunks; chunk += kWarps * blocks) {
    const std::int64_t first = chunk * std::int64_t{size};
    visit(ChunkToRoute{chunk, first, static_cast<int>(min(std::int64_t{size}, tokens - first))});
  }
}

__device__ __forceinline__ std::uint32_t sum_before(std::uint32_t value) {
  std::uint32_t sum = value;
  for (int step = 1; step < kWarp; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane_index() >= step) sum += other;
  }
  return sum - value;
}

// By one warp: what all blocks tell of the chunks of one rank, the masks and the rows before each. Returns the rows of
// all.
__device__ __forceinline__ std::uint32_t take_masks(
    const MoveTask& task, std::uint32_t epoch, int chunks, int rank, bool& there) {
  std::uint64_t* masks = task.route.basic.masks + rank * std::int64_t{task.route.chunks};
  std::uint32_t* rows_before = task.route.first_of_chunk + rank * std::int64_t{task.route.chunk_stride};
  std::uint32_t rows = 0;
  for (int first = 0; first < chunks; first += kWarp * kChunksAtOnce) {
    TaggedUnit units[kChunksAtOnce] = {};
    const auto told = [&] {
      bool all = true;
#pragma unroll
      for (int k = 0; k < kChunksAtOnce; ++k) {
        const int chunk = first + k * kWarp + lane_index();
        if (chunk < chunks) all = load_tagged(mask_of_chunk(task, rank, chunk), mark_of(epoch), units[k]) && all;
      }
      return all;
    };
    there = wait_until(task.common, {task.common.rank, Phase::kDispatch, epoch}, told) && there;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kChunksAtOnce; ++k) {
      const int chunk = first + k * kWarp + lane_index();
      const std::uint64_t mask = word_of(units[k]);
      const std::uint32_t of_chunk = __popcll(mask);
      const std::uint32_t before = sum_before(of_chunk);
      if (chunk < chunks) {
        masks[chunk] = mask;
        rows_before[chunk] = rows + before;
      }
      rows += __shfl_sync(kAllLanes, before + of_chunk, kWarp - 1);
    }
  }
  return rows;
}

// By the warps of a block.
__device__ __forceinline__ bool sum_chunks(const MoveTask& task,
                                           std::uint32_t epoch,
                                           std::int64_t tokens,
                                           SettleShared& shared) {
  const int chunks = chunks_of(task.common, tokens);
  bool there = true;
  for (int rank = warp_index(); rank < task.common.num_ranks; rank += kWarps) {
    const std::uint32_t rows = take_masks(task, epoch, chunks, rank, there);
    if (lane_index() == 0) shared.rows_sent[rank] = task.route.basic.rows_sent[rank] = rows;
  }
  return there;
}

// By one warp of one block, at the start: tells all peers what the operations before have read, and waits until they
// have read the header that this operation writes over. Both are said by kernels that had ended: the fence makes the
// stores releases (they pair with the acquires here and in rows_have_space).
__device__ inline bool open_headers(const Common& common, std::uint32_t epoch) {
  const std::uint64_t progress = protocol::encode_progress(common.board->rows_released, epoch - 1);
  __threadfence_system();
  for (int peer = lane_index(); peer < common.num_ranks; peer += kWarp)
    store_relaxed_system(progress_of(common, peer, protocol::kDispatchPhase, common.rank), progress);
  bool there = true;
  for (int peer = lane_index(); peer < common.num_ranks; peer += kWarp) {
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kDispatchPhase, peer);
    there =
        there && wait_until(common, {peer, Phase::kDispatch, epoch}, [&] {
          return protocol::reached(protocol::headers_read(load_acquire_system(word)), epoch - protocol::kHeaderSlots);
        });
  }
  return there;
}

// By the threads of one block: unit by unit to every rank. `rows(rank)`: that go there.
template <class Rows>
__device__ void tell_headers(
    const MoveTask& task, std::uint32_t epoch, std::int64_t tokens, protocol::HeaderStatus status, const Rows& rows) {
  const Common& common = task.common;
  const CompactHeaders& headers = task.counts.headers;
  for (int i = static_cast<int>(threadIdx.x); i < common.num_ranks * headers.units; i += kThreads) {
    const int to = (common.rank + 1 + i / headers.units) % common.num_ranks;
    const int index = i % headers.units;
    TaggedUnit unit{};
    for (int k = 0; k < kTaggedWords; ++k) {
      const int rank = kTaggedWords * (index - CompactHeaders::kFirstCounts) + k;
      if (rank >= 0 && rank < common.num_ranks) unit.words[k] = rows(rank);
    }
    if (index == 0) unit = halves_of(task.counts.digest);
    if (index == 1) unit = halves_of(static_cast<std::uint64_t>(task.counts.agreed));
    if (index == 2) unit = {{static_cast<std::uint32_t>(tokens), static_cast<std::uint32_t>(status)}};
    store_tagged(window_of(common, to) + headers.unit(protocol::header_slot(epoch), common.rank, index), unit,
                 tag_of(epoch));
  }
}

// By one thread. False when the dispatch ends here: every rank is in it, so one that gave up ends it for all.
__device__ __forceinline__ bool take_header(const MoveTask& task, const Awaited& awaited, const std::byte* from) {
  TaggedUnit units[CompactHeaders::kFirstCounts];  // NOLINT(modernize-avoid-c-arrays): device code
  const auto told = [&] {
    bool all = true;
#pragma unroll
    for (int i = 0; i < CompactHeaders::kFirstCounts; ++i)
      all = load_tagged(from + i * kTaggedBytes, tag_of(awaited.epoch), units[i]) && all;
    return all;
  };
  if (!wait_until(task.common, awaited, told)) return false;
  task.route.basic.tokens_of[awaited.peer] = static_cast<std::int32_t>(units[2].words[0]);
  const bool aborted = units[2].words[1] != static_cast<std::uint32_t>(protocol::HeaderStatus::kOk);
  const bool agrees =
      word_of(units[0]) == task.counts.digest && word_of(units[1]) == static_cast<std::uint64_t>(task.counts.agreed);
  if (!aborted && agrees) return true;
  give_up_small(task.common, task.route.basic.state + kSmallRouteAborted,
                aborted ? NoticeKind::kAborted : NoticeKind::kMismatch, awaited);
  return false;
}

// By one thread: the rows of a source for `first` and the rank after it.
__device__ __forceinline__ bool take_counts(
    const MoveTask& task, const Awaited& awaited, const std::byte* from, int first, SettleShared& shared) {
  const Common& common = task.common;
  TaggedUnit unit{};
  const auto told = [&] { return load_tagged(from, tag_of(awaited.epoch), unit); };
  if (!wait_until(common, awaited, told)) return false;
  for (int k = 0; k < kTaggedWords; ++k) {
    const int to = first + k;
    if (to >= common.num_ranks) continue;
    if (awaited.peer < common.rank) atomicAdd(shared.begin_at + to, static_cast<int>(unit.words[k]));
    if (to != common.rank) continue;
    task.route.basic.rows_received[awaited.peer] = unit.words[k];
    atomicAdd(&shared.rows_received, unit.words[k]);
  }
  return true;
}

// By the threads of a block.
__device__ __forceinline__ bool take_headers(const MoveTask& task, std::uint32_t epoch, SettleShared& shared) {
  const Common& common = task.common;
  const CompactHeaders& headers = task.counts.headers;
  const std::byte* window = window_of(common, common.rank);
  const int slot = protocol::header_slot(epoch);
  const int each = 1 + headers.units - CompactHeaders::kFirstCounts;
  bool there = true;
  for (int i = static_cast<int>(threadIdx.x); i < common.num_ranks * each; i += kThreads) {
    const Awaited awaited{i / each, Phase::kDispatch, epoch};
    const int count = i % each - 1;
    const std::byte* from =
        window + headers.unit(slot, awaited.peer, count < 0 ? 0 : CompactHeaders::kFirstCounts + count);
    there = (count < 0 ? take_header(task, awaited, from)
                       : take_counts(task, awaited, from, kTaggedWords * count, shared)) &&
            there;
  }
  return there;
}

// By one warp: the receivers of this rank's rows have released those of the dispatch before (pairs with release_views
// and open_headers).
template <class Rows>
__device__ bool rows_have_space(const Common& common, std::uint32_t epoch, const Rows& rows) {
  bool there = true;
  for (int peer = lane_index(); peer < common.num_ranks; peer += kWarp) {
    if (rows[peer] == 0) continue;
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kDispatchPhase, peer);
    there = there && wait_until(common, {peer, Phase::kDispatch, epoch}, [&] {
              return protocol::reached(protocol::rows_released(load_acquire_system(word)), epoch - 1);
            });
  }
  return there;
}

// By one warp of each block, behind a barrier after its chunks: the warp of the last one tells the ranks how many rows
// each of their experts gets, and leaves the counts empty.
__device__ inline void tell_expert_rows(const MoveTask& task, std::uint32_t epoch, const std::uint32_t* of_block) {
  const Common& common = task.common;
  const int num_experts = task.ids.num_experts;
  std::uint32_t* of_rank = task.counts.expert_rows;
  for (int expert = lane_index(); of_block != of_rank && expert < num_experts; expert += kWarp) {
    if (of_block[expert] != 0) atomicAdd(of_rank + expert, of_block[expert]);
  }
  __syncwarp();
  bool last = false;
  if (lane_index() == 0) last = add_acq_rel_device(&common.board->blocks_counted, 1) == gridDim.x - 1;
  __syncwarp();  // what that thread has acquired, the others have
  if (__any_sync(kAllLanes, static_cast<int>(last)) == 0) return;
  if (lane_index() == 0) {
    common.board->blocks_counted = 0;
    common.host->invalid_ids = common.board->invalid_ids;
  }
  const CompactHeaders& headers = task.counts.headers;
  for (int i = lane_index(); i < common.num_ranks * headers.expert_units; i += kWarp) {
    const int to = i / headers.expert_units;
    const int index = i % headers.expert_units;
    const int first = protocol::first_local_expert(num_experts, common.num_ranks, to);
    TaggedUnit unit{};
    for (int k = 0; k < kTaggedWords; ++k) {
      const int local = kTaggedWords * index + k;
      if (local >= protocol::num_local_experts(num_experts, common.num_ranks, to)) continue;
      unit.words[k] = __ldcg(of_rank + first + local);
      of_rank[first + local] = 0;
    }
    store_tagged(window_of(common, to) + headers.unit(protocol::header_slot(epoch), common.rank, headers.units + index),
                 unit, tag_of(epoch));
  }
}

// By one thread: for the dispatch's rows, for its combine, and for what follows. A dispatch that was given up has no
// rows; an older result that is still a view keeps its own.
__device__ inline void keep_settled(const MoveTask& task, const Settled& settled) {
  Board& board = *task.common.board;
  std::uint32_t* state = task.route.basic.state;
  state[kRouteTokens] = static_cast<std::uint32_t>(settled.tokens);
  state[kRouteAborted] = settled.there ? 0 : 1;
  state[kCombineAborted] = 0;
  state[kRouteRows] = settled.there ? settled.rows : 0;
  state[kRouteEpoch] = settled.epoch;
  if (!settled.there && board.rows_released == settled.epoch - 1) board.rows_released = settled.epoch;
}

// By all blocks.
__device__ inline Settled settle(const MoveTask& task) {
  __shared__ SettleShared shared;
  const Common& common = task.common;
  const Start start = read_start(common, protocol::kDispatchPhase);
  Settled settled{.epoch = start.epoch + 1,
                  .tokens = tokens_of_call(task.counts.num_tokens, task.counts.num_tokens_on_device)};
  std::uint32_t* expert_rows = expert_rows_of(task, shared);
  const std::uint32_t* rows_sent = shared.rows_sent;
  for (int i = static_cast<int>(threadIdx.x); i < kSharedExperts; i += kThreads)
    shared.expert_rows[i] = 0;
  for (int i = static_cast<int>(threadIdx.x); i < common.num_ranks; i += kThreads)
    shared.begin_at[i] = 0;
  if (threadIdx.x == 0) shared.rows_received = 0;
  settled.failed = __syncthreads_or(static_cast<int>(start.failed)) != 0;
  if (settled.failed) return settled;
  advance_block(common, protocol::kDispatchPhase, settled.epoch);
  visit_chunks(task, settled.tokens, [&](const ChunkToRoute& at) { route_chunk(task, settled.epoch, at); });
  // Meanwhile the others route theirs.
  visit_chunks(task, settled.tokens, [&](const ChunkToRoute& at) { keep_picks(task, at, expert_rows); });
  bool there = true;
  if (is_last_block() && warp_index() == kPorterWarp) there = open_headers(common, settled.epoch);
  there = sum_chunks(task, settled.epoch, settled.tokens, shared) && there;
  if (__syncthreads_and(static_cast<int>(there)) == 0) return settled;
  if (is_last_block()) {
    tell_headers(task, settled.epoch, settled.tokens, protocol::HeaderStatus::kOk,
                 [rows_sent](int rank) { return rows_sent[rank]; });
  }
  if (warp_index() == kTellerWarp) tell_expert_rows(task, settled.epoch, expert_rows);
  there = take_headers(task, settled.epoch, shared);
  if (task.sends && warp_index() == kPorterWarp)
    there = rows_have_space(common, settled.epoch, shared.rows_sent) && there;
  settled.there = __syncthreads_and(static_cast<int>(there)) != 0;
  for (int to = static_cast<int>(threadIdx.x); to < common.num_ranks; to += kThreads)
    task.route.begin_at[to] = shared.begin_at[to];
  settled.rows = shared.rows_received;
  if (is_last_block() && threadIdx.x == 0) keep_settled(task, settled);
  __syncthreads();
  return settled;
}

}  // namespace tokenyard::engine::cuda
