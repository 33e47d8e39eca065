// SPDX-License-Identifier: Apache-2.0
// Dispatch into a space per source, in one launch: blocks first send this rank's tokens, each to every rank that owns
// one of its experts, and then receive: they wait for the chunks of all sources and write what the result needs besides
// rows, which lie where the caller sees them. A block that waits has nothing left to send, and all blocks are resident.
#include <algorithm>

#include "engine/cuda/copies.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAll = 0xFFFFFFFFU;

__device__ int lane_index() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

__device__ int warp_index() {
  return static_cast<int>(threadIdx.x) / kWarp;
}

// What the threads of a block know of the token they send.
struct TokenOfBlock {
  std::uint32_t words[kMaxRanks / kWordBits];
  std::int32_t wire_ids[kMaxTopK];
  std::int32_t destinations[kMaxTopK];
  int num_destinations;
  bool ends_chunk;
};

__device__ std::int64_t tokens_of_call(const DispatchTask& task) {
  if (task.num_tokens_on_device == nullptr) return task.num_tokens;
  const std::int64_t given = *task.num_tokens_on_device;
  return given < 0 ? 0 : min(given, task.num_tokens);
}

__device__ int num_chunks_of(const DispatchTask& task, std::int64_t tokens) {
  return static_cast<int>(protocol::num_chunks(tokens, task.common.layout.shape().tokens_per_chunk));
}

// Waits until every peer has read the headers of the operation before the last, and has released the rows of the last.
__device__ bool wait_for_space(const Common& common, std::uint32_t epoch) {
  bool there = true;
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kDispatchPhase, peer);
    there = there && wait_until(common, {peer, Phase::kDispatch, epoch}, [&] {
              const std::uint64_t progress = load_acquire_system(word);
              return protocol::reached(protocol::rows_released(progress), epoch - 1) &&
                     protocol::reached(protocol::headers_read(progress), epoch - protocol::kHeaderSlots);
            });
  }
  return __syncthreads_and(there) != 0;
}

// By one warp: the wire ids of a token and the distinct ranks that own them, ascending.
__device__ void route_token(const DispatchTask& task, std::int64_t token, TokenOfBlock& shared) {
  const Ids& ids = task.ids;
  const std::byte* row = ids.from + token * ids.from_stride;
  const int words = task.route.words;
  for (int i = lane_index(); i < words; i += kWarp)
    shared.words[i] = 0;
  __syncwarp();
  for (int slot = lane_index(); slot < ids.top_k; slot += kWarp) {
    const std::int64_t id = ids.from_i64 ? reinterpret_cast<const std::int64_t*>(row)[slot]
                                         : std::int64_t{reinterpret_cast<const std::int32_t*>(row)[slot]};
    const bool expert = id >= 0 && id < ids.num_experts && id != ids.invalid_id;
    shared.wire_ids[slot] = expert ? static_cast<std::int32_t>(id) : -1;
    if (expert) {
      const int owner = protocol::owner_of(ids.num_experts, task.common.num_ranks, static_cast<int>(id));
      atomicOr(&shared.words[owner / kWordBits], 1U << (owner % kWordBits));
    } else if (id != -1 && id != ids.invalid_id) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&task.common.board->invalid_ids), 1ULL);
    }
  }
  __syncwarp();
  const int lane = lane_index();
  std::uint32_t word = lane < words ? shared.words[lane] : 0;
  if (lane < words) task.route.ranks_of_token[token * words + lane] = word;
  int before = __popc(word);
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(kAll, before, step);
    if (lane >= step) before += other;
  }
  if (lane == kWarp - 1) shared.num_destinations = before;
  before -= __popc(word);
  for (; word != 0; word &= word - 1) {
    const int rank = lane * kWordBits + __ffs(static_cast<int>(word)) - 1;
    shared.destinations[before++] = rank;
    atomicAdd(task.route.rows_sent + rank, 1U);
  }
}

__device__ void send_rows(const DispatchTask& task, std::int64_t token, const TokenOfBlock& shared) {
  const Crew crew{static_cast<int>(threadIdx.x), kThreads};
  const Common& common = task.common;
  for (int index = 0; index < task.num_lanes; ++index) {
    const Lane& lane = task.lanes[static_cast<unsigned>(index)];
    const std::int64_t place = common.layout.payload(common.rank) + lane.offset + token * lane.stride;
    move_row(lane.from + token * lane.from_stride, lane.row_bytes, lane.unit, crew, [&](int i, auto value) {
      for (int d = 0; d < shared.num_destinations; ++d)
        reinterpret_cast<decltype(value)*>(window_of(common, shared.destinations[d]) + place)[i] = value;
    });
  }
  const std::int64_t place = common.layout.payload(common.rank) + task.ids.offset + token * task.ids.stride;
  for (int i = static_cast<int>(threadIdx.x); i < shared.num_destinations * task.ids.top_k; i += kThreads) {
    std::byte* window = window_of(common, shared.destinations[i / task.ids.top_k]);
    reinterpret_cast<std::int32_t*>(window + place)[i % task.ids.top_k] = shared.wire_ids[i % task.ids.top_k];
  }
}

// Chunk 0 also says what must agree; it goes to every rank, with its tokens or without. The other fields are written
// before the stamp, which releases them (pairs with wait_chunk).
__device__ void stamp_header(
    const DispatchTask& task, int to, std::uint32_t epoch, std::int64_t tokens, std::uint64_t mask) {
  const Common& common = task.common;
  for (std::int64_t i = 0; i < task.num_stats; ++i) {
    reinterpret_cast<std::int32_t*>(window_of(common, to) + common.layout.stats(common.rank))[i] = task.stats[i];
  }
  protocol::HeaderLine* header = header_of(common, to, protocol::kDispatchPhase, epoch, common.rank);
  header->mask = mask;
  header->digest = task.digest;
  header->agreed = task.agreed;
  header->num_tokens = static_cast<std::int32_t>(tokens);
  header->status = protocol::HeaderStatus::kOk;
  store_release_system(&header->stamp, protocol::encode_stamp(epoch, __popcll(mask)));
}

// By one warp, for all ranks; what the blocks that sent the chunk's tokens did has been acquired.
__device__ void stamp_chunk(const DispatchTask& task, int chunk, std::uint32_t epoch, std::int64_t tokens) {
  const Common& common = task.common;
  const int size = common.layout.shape().tokens_per_chunk;
  const std::int64_t first = static_cast<std::int64_t>(chunk) * size;
  const int count = static_cast<int>(min(static_cast<std::int64_t>(size), tokens - first));
  for (int to = lane_index(); to < common.num_ranks; to += kWarp) {
    std::uint64_t mask = 0;
    const std::uint32_t* word = task.route.ranks_of_token + first * task.route.words + to / kWordBits;
    for (int i = 0; i < count; ++i) {
      const std::uint64_t goes =
          load_relaxed_device(word + std::int64_t{i} * task.route.words) >> (to % kWordBits) & 1U;
      mask |= goes << i;
    }
    if (chunk == 0) {
      stamp_header(task, to, epoch, tokens, mask);
    } else {
      protocol::ChunkLine* line = chunk_of(common, to, common.rank, chunk);
      line->mask = mask;
      store_release_system(&line->stamp, protocol::encode_stamp(epoch, __popcll(mask)));
    }
  }
}

__device__ void send(const DispatchTask& task, std::uint32_t epoch, std::int64_t tokens) {
  __shared__ TokenOfBlock shared;
  if (tokens == 0 && blockIdx.x == 0 && warp_index() == 0) stamp_chunk(task, 0, epoch, 0);
  const int size = task.common.layout.shape().tokens_per_chunk;
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    if (warp_index() == 0) route_token(task, token, shared);
    __syncthreads();
    send_rows(task, token, shared);
    __syncthreads();
    const auto chunk = static_cast<int>(token / size);
    if (threadIdx.x == 0) {
      const std::int64_t left = tokens - static_cast<std::int64_t>(chunk) * size;
      const auto of_chunk = static_cast<std::uint32_t>(min(static_cast<std::int64_t>(size), left));
      shared.ends_chunk = add_acq_rel_device(task.common.arrivals + chunk, 1) == of_chunk - 1;
      if (shared.ends_chunk) task.common.arrivals[chunk] = 0;
    }
    __syncthreads();
    if (shared.ends_chunk && warp_index() == 0) stamp_chunk(task, chunk, epoch, tokens);
  }
}

struct Arrival {
  std::uint64_t mask = 0;
  std::int64_t tokens = 0;  // of the source
  bool there = false;
};

// By one lane.
__device__ Arrival wait_chunk(const DispatchTask& task, int source, int chunk, std::uint32_t epoch) {
  const Common& common = task.common;
  const Awaited awaited{source, Phase::kDispatch, epoch};
  protocol::HeaderLine* header = header_of(common, common.rank, protocol::kDispatchPhase, epoch, source);
  const auto stamped = [epoch](const std::uint64_t* stamp) {
    return protocol::stamp_is(load_acquire_system(stamp), epoch);
  };
  if (!wait_until(common, awaited, [&] { return stamped(&header->stamp); })) return {};
  const bool aborted = header->status == protocol::HeaderStatus::kAborted;
  if (aborted || header->digest != task.digest || header->agreed != task.agreed) {
    // Each rank compares all others with itself, so when any two differ every rank ends this operation.
    give_up(common, task.route.state + kRouteAborted, aborted ? NoticeKind::kAborted : NoticeKind::kMismatch, awaited);
    return {};
  }
  const std::int64_t tokens = header->num_tokens;
  if (chunk == 0) return {header->mask, tokens, true};
  if (static_cast<std::int64_t>(chunk) * common.layout.shape().tokens_per_chunk >= tokens) return {0, tokens, true};
  const protocol::ChunkLine* line = chunk_of(common, common.rank, source, chunk);
  if (!wait_until(common, awaited, [&] { return stamped(&line->stamp); })) return {};
  return {line->mask, tokens, true};
}

__device__ void store_id(std::byte* row, int slot, bool i64, std::int64_t id) {
  if (i64) {
    reinterpret_cast<std::int64_t*>(row)[slot] = id;
  } else {
    reinterpret_cast<std::int32_t*>(row)[slot] = static_cast<std::int32_t>(id);
  }
}

// By one warp: the ids of a chunk's rows, invalid ones where there is no token.
__device__ void show_ids(const DispatchTask& task, int source, std::int64_t first, int count, std::uint64_t mask) {
  const Ids& ids = task.ids;
  const std::byte* space = window_of(task.common, task.common.rank) + task.common.layout.payload(source);
  for (int i = lane_index(); i < count * ids.top_k; i += kWarp) {
    const std::int64_t token = first + i / ids.top_k;
    const int slot = i % ids.top_k;
    std::int64_t id = ids.invalid_id;
    if ((mask >> (i / ids.top_k) & 1U) != 0) {
      const auto wire = reinterpret_cast<const std::int32_t*>(space + ids.offset + token * ids.stride)[slot];
      if (wire >= 0) id = wire;
    }
    store_id(ids.to + source * ids.to_block_stride + token * ids.to_row_stride, slot, ids.to_i64, id);
  }
}

__device__ void copy_rows(const DispatchTask& task, int source, std::int64_t first, std::uint64_t mask) {
  const std::byte* space = window_of(task.common, task.common.rank) + task.common.layout.payload(source);
  for (; mask != 0; mask &= mask - 1) {
    const std::int64_t token = first + __ffsll(static_cast<long long>(mask)) - 1;
    for (int index = 0; index < task.num_copied; ++index) {
      const Copied& plane = task.copied[static_cast<unsigned>(index)];
      copy_row(plane.data + source * plane.block_stride + token * plane.row_stride,
               space + plane.offset + token * plane.stride, plane.row_bytes, plane.unit, {lane_index(), kWarp});
    }
  }
}

// By one warp: one chunk of one source, or rows of the result that no token of the source can fill.
__device__ void receive_chunk(const DispatchTask& task, int source, int chunk, std::uint32_t epoch) {
  const Common& common = task.common;
  Arrival arrival;
  if (lane_index() == 0) arrival = wait_chunk(task, source, chunk, epoch);
  __syncwarp();
  if (__shfl_sync(kAll, arrival.there ? 1 : 0, 0) == 0) return;
  const std::uint64_t mask = __shfl_sync(kAll, arrival.mask, 0);
  const int size = common.layout.shape().tokens_per_chunk;
  const std::int64_t first = static_cast<std::int64_t>(chunk) * size;
  if (lane_index() == 0) {
    task.route.masks[source * common.layout.max_chunks() + chunk] = mask;
    if (task.counts) atomicAdd(task.route.rows_received + source, static_cast<std::uint32_t>(__popcll(mask)));
    if (chunk == 0) task.route.tokens_of[source] = static_cast<std::int32_t>(arrival.tokens);
  }
  if (chunk == 0) {
    const auto* stats =
        reinterpret_cast<const std::int32_t*>(window_of(common, common.rank) + common.layout.stats(source));
    for (std::int64_t i = lane_index(); i < task.num_stats; i += kWarp)
      task.gathered_stats[source * task.num_stats + i] = stats[i];
  }
  const auto count = static_cast<int>(min(static_cast<std::int64_t>(size), task.rows_per_block - first));
  if (task.ids.to != nullptr) show_ids(task, source, first, count, mask);
  copy_rows(task, source, first, mask);
}

__device__ void receive(const DispatchTask& task, std::uint32_t epoch) {
  const int chunks = max(1, num_chunks_of(task, task.rows_per_block));
  const int items = chunks * task.common.num_ranks;
  for (int item = warp_index() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); item < items;
       item += kWarps * static_cast<int>(gridDim.x)) {
    // Own rows last: the others' are on their way meanwhile.
    const int source = (task.common.rank + 1 + item % task.common.num_ranks) % task.common.num_ranks;
    receive_chunk(task, source, item / task.common.num_ranks, epoch);
  }
}

// By the last block of the operation, for the next one.
__device__ void finish(const DispatchTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  Board& board = *common.board;
  if (threadIdx.x == 0) {
    board.blocks_done = 0;
    if (task.sends) board.epochs[protocol::kDispatchPhase] = epoch;
    common.host->invalid_ids = board.invalid_ids;
  }
  if (!task.receives) return;
  const std::uint32_t aborted = load_relaxed_device(task.route.state + kRouteAborted);
  // Nobody will combine an operation that was given up: its rows are released here.
  const std::uint32_t released = aborted != 0 ? epoch : board.rows_released;
  __syncthreads();
  if (threadIdx.x == 0) board.rows_released = released;
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    store_release_system(progress_of(common, peer, protocol::kDispatchPhase, common.rank),
                         protocol::encode_progress(released, epoch));
  }
}

__global__ void __launch_bounds__(kThreads) rank_major_dispatch(const __grid_constant__ DispatchTask task) {
  const Common& common = task.common;
  if (load_relaxed_device(&common.board->failed) != 0) return;
  const std::uint32_t last = common.board->epochs[protocol::kDispatchPhase];
  const std::uint32_t epoch = task.sends ? last + 1 : last;
  if (task.sends) {
    const std::int64_t tokens = tokens_of_call(task);
    if (blockIdx.x == 0 && threadIdx.x == 0) task.route.state[kRouteTokens] = static_cast<std::uint32_t>(tokens);
    if (wait_for_space(common, epoch)) send(task, epoch, tokens);
  }
  if (task.receives) receive(task, epoch);
  if (last_block(&common.board->blocks_done)) finish(task, epoch);
}

}  // namespace

void load_rank_major_dispatch() {
  check(cudaFuncSetAttribute(rank_major_dispatch, cudaFuncAttributePreferredSharedMemoryCarveout, 0),
        "loading a kernel");
}

void launch_rank_major_dispatch(const DispatchTask& task, int blocks, cudaStream_t stream) {
  rank_major_dispatch<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a dispatch");
}

}  // namespace tokenyard::engine::cuda
