// SPDX-License-Identifier: Apache-2.0
// The first launch of a dispatch to final places. All blocks find the routes of tokens, a warp a chunk; the last block
// turns them into places: it tells every rank how many rows come from here, waits for what they tell, and leaves in the
// route where rows of this rank begin at each receiver and where those of each source begin here.
#include "engine/cuda/compact_kernels.h"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {
namespace {

constexpr int kSharedExperts = 2048;
constexpr int kChunksAtOnce = 4;  // chunks of a lane in one step of the sums

struct CountShared {
  unsigned long long masks[kWarps][kWordBits];  // of the chunk that a warp is at, by rank
  std::uint32_t expert_rows[kSharedExperts];    // of the block
};

struct TokensOfChunk {
  std::int64_t first = 0;
  int count = 0;
};

__device__ std::int64_t id_at(const Ids& ids, std::int64_t token, int slot) {
  const std::byte* row = ids.from + token * ids.from_stride;
  return ids.from_i64 ? reinterpret_cast<const std::int64_t*>(row)[slot]
                      : std::int64_t{reinterpret_cast<const std::int32_t*>(row)[slot]};
}

// The expert that the pick names, or -1; kept in the route, and counted unless a pick of the token before names it too.
__device__ int take_pick(const CountTask& task, std::int64_t token, int slot, std::uint32_t* expert_rows) {
  const Ids& ids = task.ids;
  const std::int64_t id = id_at(ids, token, slot);
  const bool expert = id >= 0 && id < ids.num_experts && id != ids.invalid_id;
  if (!expert && id != -1 && id != ids.invalid_id) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&task.common.board->invalid_ids), 1ULL);
  }
  const int wire = expert ? static_cast<int>(id) : -1;
  task.route.wire_ids[token * ids.top_k + slot] = wire;
  if (!expert) return wire;
  bool repeated = false;
  for (int before = 0; before < slot && !repeated; ++before)
    repeated = id_at(ids, token, before) == id;
  if (!repeated) atomicAdd(expert_rows + wire, 1U);
  return wire;
}

// By one warp: the masks of a chunk, and how many rows of it each rank gets.
__device__ void route_chunk(
    const CountTask& task, std::int64_t chunk, TokensOfChunk tokens, unsigned long long* masks, std::uint32_t* rows) {
  const int num_ranks = task.common.num_ranks;
  const int top_k = task.ids.top_k;
  const CompactRoute& route = task.route;
  for (int first_rank = 0; first_rank < num_ranks; first_rank += kWordBits) {
    masks[lane_index()] = 0;
    __syncwarp();
    for (int i = lane_index(); i < tokens.count * top_k; i += kWarp) {
      const std::int64_t token = tokens.first + i / top_k;
      const int expert =
          first_rank == 0 ? take_pick(task, token, i % top_k, rows) : route.wire_ids[token * top_k + i % top_k];
      if (expert < 0) continue;
      const int owner = protocol::owner_of(task.num_experts, num_ranks, expert) - first_rank;
      if (owner >= 0 && owner < kWordBits) atomicOr(masks + owner, 1ULL << (i / top_k));
    }
    __syncwarp();
    const int rank = first_rank + lane_index();
    if (rank < num_ranks) {
      const std::uint64_t mask = masks[lane_index()];
      route.basic.masks[rank * std::int64_t{route.chunks} + chunk] = mask;
      route.first_of_chunk[rank * std::int64_t{route.chunk_stride} + chunk] = __popcll(mask);
    }
    __syncwarp();
  }
}

__device__ void route_tokens(const CountTask& task, std::int64_t tokens) {
  __shared__ CountShared shared;
  const bool few = task.num_experts <= kSharedExperts;
  std::uint32_t* rows = few ? shared.expert_rows : task.expert_rows;
  for (int i = static_cast<int>(threadIdx.x); few && i < task.num_experts; i += kThreads)
    rows[i] = 0;
  __syncthreads();
  const int size = task.common.layout.shape().tokens_per_chunk;
  const auto chunks = static_cast<int>(protocol::num_chunks(tokens, size));
  for (int chunk = warp_index() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); chunk < chunks;
       chunk += kWarps * static_cast<int>(gridDim.x)) {
    const std::int64_t first = static_cast<std::int64_t>(chunk) * size;
    const auto count = static_cast<int>(min(static_cast<std::int64_t>(size), tokens - first));
    route_chunk(task, chunk, {first, count}, shared.masks[warp_index()], rows);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); few && i < task.num_experts; i += kThreads) {
    if (rows[i] != 0) atomicAdd(task.expert_rows + i, rows[i]);
  }
}

template <class Value>
__device__ void copy_list(Value* to, const Value* from, std::int64_t count) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads)
    to[i] = from[i];
}

// What the sums over chunks begin with is kept in the masks, so these are all that a replay needs.
__device__ void copy_route(const CountTask& task, std::int64_t tokens) {
  const std::int64_t chunks = std::int64_t{task.common.num_ranks} * task.route.chunks;
  copy_list(task.route.basic.masks, task.replayed.basic.masks, chunks);
  copy_list(task.route.wire_ids, task.replayed.wire_ids, tokens * task.route.top_k);
  const std::int64_t lines = std::int64_t{task.common.num_ranks} * task.route.chunk_stride;
  copy_list(task.route.first_of_chunk, task.replayed.first_of_chunk, lines);
  copy_list(task.route.basic.rows_sent, task.replayed.basic.rows_sent, task.common.num_ranks);
}

__device__ std::uint32_t sum_before(std::uint32_t value) {
  std::uint32_t sum = value;
  for (int step = 1; step < kWarp; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane_index() >= step) sum += other;
  }
  return sum - value;
}

// By the warps of the last block: rows of each chunk become rows of the chunks before.
__device__ void sum_chunks(const CountTask& task, std::int64_t tokens) {
  const auto chunks = static_cast<int>(protocol::num_chunks(tokens, task.common.layout.shape().tokens_per_chunk));
  for (int rank = warp_index(); rank < task.common.num_ranks; rank += kWarps) {
    std::uint32_t* line = task.route.first_of_chunk + rank * std::int64_t{task.route.chunk_stride};
    std::uint32_t carry = 0;
    for (int first = 0; first < chunks; first += kWarp * kChunksAtOnce) {
      const int mine = first + lane_index() * kChunksAtOnce;
      uint4 rows = mine < chunks ? __ldcg(reinterpret_cast<const uint4*>(line + mine)) : make_uint4(0, 0, 0, 0);
      if (mine + 1 >= chunks) rows.y = 0;
      if (mine + 2 >= chunks) rows.z = 0;
      if (mine + 3 >= chunks) rows.w = 0;
      const std::uint32_t all = rows.x + rows.y + rows.z + rows.w;
      const std::uint32_t before = carry + sum_before(all);
      if (mine < chunks) {
        *reinterpret_cast<uint4*>(line + mine) =
            make_uint4(before, before + rows.x, before + rows.x + rows.y, before + rows.x + rows.y + rows.z);
      }
      carry = __shfl_sync(kAllLanes, before + all, kWarp - 1);
    }
    if (lane_index() == 0) task.route.basic.rows_sent[rank] = carry;
  }
}

// By one warp. All but the stamp is written before it (pairs with wait_headers).
__device__ void tell_counts(const CountTask& task, int to, std::uint32_t epoch, std::int64_t tokens) {
  const Common& common = task.common;
  const int slot = protocol::header_slot(epoch);
  bool there = true;
  if (lane_index() == 0) {
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kDispatchPhase, to);
    there = wait_until(common, {to, Phase::kDispatch, epoch}, [&] {
      return protocol::reached(protocol::headers_read(load_acquire_system(word)), epoch - protocol::kHeaderSlots);
    });
  }
  if (__all_sync(kAllLanes, static_cast<int>(there)) == 0) return;
  std::byte* window = window_of(common, to);
  auto* counts = reinterpret_cast<std::int32_t*>(window + common.layout.counts(slot, common.rank));
  for (int rank = lane_index(); rank < common.num_ranks; rank += kWarp)
    counts[rank] = static_cast<std::int32_t>(task.route.basic.rows_sent[rank]);
  const int first = protocol::first_local_expert(task.num_experts, common.num_ranks, to);
  const int experts = protocol::num_local_experts(task.num_experts, common.num_ranks, to);
  auto* of_experts = reinterpret_cast<std::int32_t*>(window + task.expert_counts.at(slot, common.rank));
  for (int expert = lane_index(); expert < experts; expert += kWarp)
    of_experts[expert] = static_cast<std::int32_t>(__ldcg(task.expert_rows + first + expert));
  __syncwarp();
  if (lane_index() != 0) return;
  protocol::HeaderLine* header = header_of(common, to, protocol::kDispatchPhase, epoch, common.rank);
  header->digest = task.digest;
  header->agreed = task.agreed;
  header->num_tokens = static_cast<std::int32_t>(tokens);
  header->status = protocol::HeaderStatus::kOk;
  store_release_system(&header->stamp, protocol::encode_stamp(epoch, task.route.basic.rows_sent[to]));
}

// By the last block: whether all ranks are in this dispatch and agree.
__device__ bool wait_headers(const CountTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  bool there = true;
  for (int source = static_cast<int>(threadIdx.x); source < common.num_ranks; source += kThreads) {
    const Awaited awaited{source, Phase::kDispatch, epoch};
    const protocol::HeaderLine* header = header_of(common, common.rank, protocol::kDispatchPhase, epoch, source);
    const auto stamped = [&] { return protocol::stamp_is(load_acquire_system(&header->stamp), epoch); };
    // Every rank is in it, so one that gave up ends it for all.
    if (!wait_until(common, awaited, stamped, task.route.basic.state + kRouteAborted)) {
      there = false;
      continue;
    }
    const bool aborted = header->status == protocol::HeaderStatus::kAborted;
    if (aborted || header->digest != task.digest || header->agreed != task.agreed) {
      give_up(common, task.route.basic.state + kRouteAborted, aborted ? NoticeKind::kAborted : NoticeKind::kMismatch,
              awaited);
      there = false;
      continue;
    }
    task.route.basic.rows_received[source] = protocol::stamp_rows(load_acquire_system(&header->stamp));
    task.route.basic.tokens_of[source] = header->num_tokens;
  }
  return __syncthreads_and(there) != 0;
}

// Rows lie by source rank, then by token.
__device__ void place_rows(const CountTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  const int slot = protocol::header_slot(epoch);
  const std::byte* window = window_of(common, common.rank);
  for (int to = static_cast<int>(threadIdx.x); to < common.num_ranks; to += kThreads) {
    std::int32_t before = 0;
    for (int source = 0; source < common.rank; ++source)
      before += reinterpret_cast<const std::int32_t*>(window + common.layout.counts(slot, source))[to];
    task.route.begin_at[to] = before;
  }
  if (warp_index() != 0) return;
  std::uint32_t carry = 0;
  for (int first = 0; first < common.num_ranks; first += kWarp) {
    const int source = first + lane_index();
    const std::uint32_t rows = source < common.num_ranks ? task.route.basic.rows_received[source] : 0;
    const std::uint32_t before = carry + sum_before(rows);
    if (source < common.num_ranks) task.route.row_base[source] = static_cast<std::int32_t>(before);
    carry = __shfl_sync(kAllLanes, before + rows, kWarp - 1);
  }
  if (lane_index() == 0) task.route.basic.state[kRouteRows] = carry;
}

// The ticket is stored last, for the host to find all of it.
__device__ void tell_host(const CountTask& task, std::uint32_t epoch, bool there) {
  const Common& common = task.common;
  const int slot = protocol::header_slot(epoch);
  for (int source = static_cast<int>(threadIdx.x); there && source < common.num_ranks; source += kThreads) {
    task.lists.rows_received[source] = static_cast<std::int32_t>(task.route.basic.rows_received[source]);
    task.lists.tokens_of[source] = task.route.basic.tokens_of[source];
  }
  const std::byte* window = window_of(common, common.rank);
  const int experts = protocol::num_local_experts(task.num_experts, common.num_ranks, common.rank);
  for (int expert = static_cast<int>(threadIdx.x); there && expert < experts; expert += kThreads) {
    std::int32_t rows = 0;
    for (int source = 0; source < common.num_ranks; ++source)
      rows += reinterpret_cast<const std::int32_t*>(window + task.expert_counts.at(slot, source))[expert];
    task.lists.rows_per_expert[expert] = rows;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  task.told->num_rows = static_cast<std::int32_t>(task.route.basic.state[kRouteRows]);
  task.told->there = there ? 1 : 0;
  __threadfence_system();
  *const_cast<volatile std::uint32_t*>(&task.told->ticket) = task.ticket;
}

// By the last block. Headers and counts have been read by the end; a dispatch that was given up has no rows either.
__device__ void settle(const CountTask& task, std::uint32_t epoch, std::int64_t tokens) {
  const Common& common = task.common;
  Board& board = *common.board;
  std::uint32_t* state = task.route.basic.state;
  if (threadIdx.x == 0) {
    board.blocks_done = 0;
    state[kRouteTokens] = static_cast<std::uint32_t>(tokens);
    state[kRouteAborted] = state[kCombineAborted] = state[kRouteRows] = 0;
    state[kRouteEpoch] = epoch;
  }
  if (!task.replays) sum_chunks(task, tokens);
  __syncthreads();
  for (int peer = warp_index(); peer < common.num_ranks; peer += kWarps)
    tell_counts(task, (common.rank + 1 + peer) % common.num_ranks, epoch, tokens);
  __syncthreads();
  for (int expert = static_cast<int>(threadIdx.x); expert < task.num_experts; expert += kThreads)
    task.expert_rows[expert] = 0;
  const bool there = wait_headers(task, epoch);
  if (there) place_rows(task, epoch);
  __syncthreads();
  const std::uint32_t released = load_relaxed_device(state + kRouteAborted) != 0 ? epoch : board.rows_released;
  if (task.told != nullptr) tell_host(task, epoch, there);
  __syncthreads();
  write_epochs(common, protocol::kDispatchPhase, epoch, 0);
  if (threadIdx.x == 0) {
    board.rows_released = released;
    common.host->invalid_ids = board.invalid_ids;
  }
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    store_release_system(progress_of(common, peer, protocol::kDispatchPhase, common.rank),
                         protocol::encode_progress(released, epoch));
  }
}

__global__ void __launch_bounds__(kThreads) count(const __grid_constant__ CountTask task) {
  const Common& common = task.common;
  if (__syncthreads_or(static_cast<int>(load_relaxed_device(&common.board->failed))) != 0) return;
  const std::uint32_t epoch = common.board->epochs[protocol::kDispatchPhase] + 1;
  const std::int64_t tokens = task.replays ? std::int64_t{task.replayed.basic.state[kRouteTokens]}
                                           : tokens_of_call(task.num_tokens, task.num_tokens_on_device);
  if (task.replays) {
    copy_route(task, tokens);
  } else {
    route_tokens(task, tokens);
  }
  if (last_block(&common.board->blocks_done)) settle(task, epoch, tokens);
}

}  // namespace

void load_count() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, count), "loading a kernel");
}

void launch_count(const CountTask& task, int blocks, cudaStream_t stream) {
  count<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching the counts of a dispatch");
}

}  // namespace tokenyard::engine::cuda
