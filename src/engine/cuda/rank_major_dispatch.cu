// SPDX-License-Identifier: Apache-2.0
// Dispatch into a space per source, in one launch: blocks first send this rank's tokens, each to every rank that owns
// one of its experts, and then receive: they wait for the chunks of all sources and write what the result needs besides
// rows, which lie where the caller sees them. All blocks are resident, and what a block still sends does not wait for
// its warps that receive.
#include "engine/cuda/bulk_send.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/rank_major_send.cuh"
#include "engine/cuda/routes.cuh"

namespace tokenyard::engine::cuda {
namespace {

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
  const auto pointless = [&] { return dispatch_given_up(task, awaited); };
  if (!wait_unless(
          common, awaited, [&] { return stamped(&header->stamp); }, pointless))
    return {};
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
  if (!wait_unless(
          common, awaited, [&] { return stamped(&line->stamp); }, pointless))
    return {};
  return {line->mask, tokens, true};
}

// Four picks of a row of the result.
__device__ void store_four_ids(const Ids& ids, std::byte* row, int index, const int4& wire) {
  const auto id = [&ids](std::int32_t given) { return given >= 0 ? std::int64_t{given} : ids.invalid_id; };
  if (ids.to_i64) {
    auto* to = reinterpret_cast<longlong2*>(row) + 2 * index;
    to[0] = make_longlong2(id(wire.x), id(wire.y));
    to[1] = make_longlong2(id(wire.z), id(wire.w));
  } else {
    const auto narrow = [&id](std::int32_t given) { return static_cast<std::int32_t>(id(given)); };
    reinterpret_cast<int4*>(row)[index] = make_int4(narrow(wire.x), narrow(wire.y), narrow(wire.z), narrow(wire.w));
  }
}

// As show_ids, four picks an access.
__device__ void show_ids_by_fours(
    const DispatchTask& task, int source, std::int64_t first, int count, std::uint64_t mask) {
  const Ids& ids = task.ids;
  const std::byte* space = window_of(task.common, task.common.rank) + task.common.layout.payload(source);
  const int fours = ids.top_k / 4;
  for (int i = lane_index(); i < count * fours; i += kWarp) {
    const std::int64_t token = first + i / fours;
    int4 wire = make_int4(-1, -1, -1, -1);
    if ((mask >> (i / fours) & 1U) != 0)
      wire = reinterpret_cast<const int4*>(space + ids.offset + token * ids.stride)[i % fours];
    store_four_ids(ids, ids.to + source * ids.to_block_stride + token * ids.to_row_stride, i % fours, wire);
  }
}

// By one warp: the ids of a chunk's rows, invalid ones where there is no token.
__device__ void show_ids(const DispatchTask& task, int source, std::int64_t first, int count, std::uint64_t mask) {
  const Ids& ids = task.ids;
  const auto all = reinterpret_cast<std::uint64_t>(ids.to) | static_cast<std::uint64_t>(ids.to_block_stride) |
                   static_cast<std::uint64_t>(ids.to_row_stride) | static_cast<std::uint64_t>(ids.offset) |
                   static_cast<std::uint64_t>(ids.stride);
  if (ids.top_k % 4 == 0 && all % sizeof(int4) == 0) return show_ids_by_fours(task, source, first, count, mask);
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

__device__ void copy_payloads(const DispatchTask& task, int source, std::int64_t first, std::uint64_t mask) {
  const std::byte* space = window_of(task.common, task.common.rank) + task.common.layout.payload(source);
  for (int index = 0; index < task.num_copied; ++index) {
    const Copied& plane = task.copied[static_cast<unsigned>(index)];
    copy_rows({plane.data + source * plane.block_stride + first * plane.row_stride, plane.row_stride},
              {space + plane.offset + first * plane.stride, plane.stride}, plane.row_bytes, plane.unit, mask);
  }
}

// By one warp: one chunk of one source, or rows of the result that no token of the source can fill.
__device__ void receive_chunk(const DispatchTask& task, int source, int chunk, std::uint32_t epoch) {
  const Common& common = task.common;
  Arrival arrival;
  if (lane_index() == 0) arrival = wait_chunk(task, source, chunk, epoch);
  __syncwarp();
  if (__shfl_sync(kAllLanes, arrival.there ? 1 : 0, 0) == 0) return;
  const std::uint64_t mask = __shfl_sync(kAllLanes, arrival.mask, 0);
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
  copy_payloads(task, source, first, mask);
}

// By the warps of all blocks, of each of which there are `warps.count`.
__device__ void receive(const DispatchTask& task, std::uint32_t epoch, Crew warps) {
  const int chunks = max(1, num_chunks_of(task, task.rows_per_block));
  const int items = chunks * task.common.num_ranks;
  for (int item = warps.index * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); item < items;
       item += warps.count * static_cast<int>(gridDim.x)) {
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
    common.host->invalid_ids = board.invalid_told = board.invalid_ids;
  }
  if (task.sends) write_epochs(common, protocol::kDispatchPhase, epoch, 0);
  const std::uint32_t aborted = load_relaxed_device(task.route.state + kRouteAborted);
  if (aborted != 0) {
    forget_arrivals(common);
    // Every rank hears from every other one in each dispatch, and blocks that gave up before they sent may have left
    // the first chunk without an end.
    for (int to = static_cast<int>(threadIdx.x); task.sends && to < common.num_ranks; to += kThreads)
      stamp_header(task, to, epoch, 0, 0);
  }
  if (!task.receives) return;
  // Nobody will combine an operation that was given up: its rows are released here.
  const std::uint32_t released = aborted != 0 ? epoch : board.rows_released;
  __syncthreads();
  if (threadIdx.x == 0) board.rows_released = released;
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    store_release_system(progress_of(common, peer, protocol::kDispatchPhase, common.rank),
                         protocol::encode_progress(released, epoch));
  }
}

// `send_all` is given the epoch and the number of tokens. `receivers` are the warps for the other half, none for an
// index below 0; they may begin while others of the block still send.
template <class Send>
__device__ void dispatch(const DispatchTask& task, Crew receivers, const Send& send_all) {
  const Common& common = task.common;
  // As a block: warps wait for each other at barriers that count them.
  if (__syncthreads_or(static_cast<int>(load_relaxed_device(&common.board->failed))) != 0) return;
  const std::uint32_t last = common.board->epochs[protocol::kDispatchPhase];
  const std::uint32_t epoch = task.sends ? last + 1 : last;
  if (task.sends) {
    const std::int64_t tokens = tokens_of_call(task.num_tokens, task.num_tokens_on_device);
    if (blockIdx.x == 0 && threadIdx.x == 0) task.route.state[kRouteTokens] = static_cast<std::uint32_t>(tokens);
    // Small rounds release nothing, and none of an older round's rows is read any more.
    if (blockIdx.x == 0) release_views(common, last);
    if (wait_for_space(task, epoch)) send_all(epoch, tokens);
  }
  if (task.receives && receivers.index >= 0) receive(task, epoch, receivers);
  if (last_block(&common.board->blocks_done)) finish(task, epoch);
}

__global__ void __launch_bounds__(kThreads) rank_major_dispatch(const __grid_constant__ DispatchTask task) {
  dispatch(task, {warp_index(), kWarps},
           [&task](std::uint32_t epoch, std::int64_t tokens) { send_by_blocks<RankMajorSend>(task, epoch, tokens); });
}

// One block fills a multiprocessor: its stages do.
__global__ void __launch_bounds__(kThreads, 1) bulk_dispatch(const __grid_constant__ DispatchTask task) {
  dispatch(task, receivers_beside_senders(task), [&task](std::uint32_t epoch, std::int64_t tokens) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) std::byte stages[];  // NOLINT(modernize-avoid-c-arrays): device code
    send_in_bulk<RankMajorSend>(task, epoch, tokens, stages);
#else
    send_by_blocks<RankMajorSend>(task, epoch, tokens);  // compiled for an older device, and run on a newer one
#endif
  });
}

}  // namespace

void load_rank_major_dispatch() {
  check(cudaFuncSetAttribute(rank_major_dispatch, cudaFuncAttributePreferredSharedMemoryCarveout, 0),
        "loading a kernel");
}

bool load_bulk_dispatch() {
  return make_room_for_ring(reinterpret_cast<const void*>(bulk_dispatch), kAllStagesBytes);
}

void launch_bulk_dispatch(const DispatchTask& task, int blocks, cudaStream_t stream) {
  bulk_dispatch<<<blocks, kThreads, kAllStagesBytes, stream>>>(task);
  check(cudaGetLastError(), "launching a dispatch");
}

void launch_rank_major_dispatch(const DispatchTask& task, int blocks, cudaStream_t stream) {
  rank_major_dispatch<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a dispatch");
}

}  // namespace tokenyard::engine::cuda
