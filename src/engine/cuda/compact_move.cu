// SPDX-License-Identifier: Apache-2.0
// Dispatch to final places: where its counts are settled, which may be what it begins with, rows go to where the route
// says, each chunk is stamped, and the receivers wait for the chunks of all sources and write what the result needs
// besides rows in the window.
#include "engine/cuda/bulk_send.cuh"
#include "engine/cuda/compact_kernels.h"
#include "engine/cuda/compact_places.cuh"
#include "engine/cuda/compact_settle.cuh"
#include "engine/cuda/routes.cuh"
#include "engine/cuda/row_send.cuh"
#include "engine/cuda/waits.cuh"

namespace tokenyard::engine::cuda {
namespace {

struct PlacesOfBlock {
  std::int32_t destinations[kMaxTopK];
  std::int32_t rows[kMaxTopK];
  int num_destinations;
};

struct CompactSend {
  using Task = MoveTask;
  using Token = PlacesOfBlock;

  static __device__ __forceinline__ const Common& common(const Task& task) { return task.common; }

  static __device__ __forceinline__ int tokens_at_once(const Task& /*task*/) { return 1; }

  static __device__ __forceinline__ int num_destinations(const Task& /*task*/, const Token& route) {
    return route.num_destinations;
  }

  static __device__ __forceinline__ int destination(const Task& /*task*/, const Token& route, int index) {
    return route.destinations[index];
  }

  static __device__ __forceinline__ void find_route(const Task& task, std::int64_t token, Token& route) {
    const InChunk at = in_chunk(task.common, token);
    const ChunkPlaces known = load_places(task.common, task.route, at.chunk, lane_index());
    const auto note = [&route](int position, int rank, std::int32_t row) {
      route.destinations[position] = rank;
      route.rows[position] = row;
    };
    const int count = visit_places(task.common, task.route, at, known, note);
    if (lane_index() == 0) route.num_destinations = count;
  }

  static __device__ __forceinline__ std::int64_t base(const Task& task, const Lane& lane, std::int64_t /*token*/) {
    return task.common.layout.payload(0) + lane.offset;
  }

  static __device__ __forceinline__ std::int64_t place(std::int64_t base,
                                                       const Lane& lane,
                                                       const Token& route,
                                                       int destination) {
    return base + route.rows[destination] * lane.stride;
  }

  // Picks, as those who route them take them.
  static __device__ __forceinline__ void send_rest(const Task& task,
                                                   std::int64_t token,
                                                   const Token& route,
                                                   Crew crew) {
    const Ids& ids = task.ids;
    for (int slot = crew.index; task.sends_ids && slot < ids.top_k; slot += crew.count) {
      const int expert = expert_of(ids, id_at(ids, token, slot));
      for (int d = 0; d < route.num_destinations; ++d) {
        std::byte* row = window_of(task.common, route.destinations[d]) + task.common.layout.payload(0) + ids.offset +
                         route.rows[d] * ids.stride;
        reinterpret_cast<std::int32_t*>(row)[slot] = expert;
      }
    }
  }

  // The line's mask holds the chunk's first row at the receiver, who knows the rows by it (pairs with wait_chunk).
  static __device__ void stamp(const Task& task, int chunk, std::uint32_t epoch, std::int64_t /*tokens*/) {
    const Common& common = task.common;
    const CompactRoute& route = task.route;
    for (int to = lane_index(); to < common.num_ranks; to += kWarp) {
      if (route.basic.rows_sent[to] == 0) continue;
      const ChunkPlaces places = load_places(common, route, chunk, to);
      protocol::ChunkLine* line = chunk_of(common, to, common.rank, chunk);
      line->mask = static_cast<std::uint32_t>(places.row);
      store_release_system(&line->stamp, protocol::encode_stamp(epoch, __popcll(places.mask)));
    }
  }

  static __device__ __forceinline__ void stamp_nothing(const Task& /*task*/, std::uint32_t /*epoch*/) {}
};

// Rows of the result, counted as the receiver's.
struct Arrived {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// By one lane.
__device__ Arrived wait_chunk(const MoveTask& task, int source, int chunk, std::uint32_t epoch) {
  const protocol::ChunkLine* line = chunk_of(task.common, task.common.rank, source, chunk);
  std::uint64_t stamp = 0;
  const bool there = wait_until(task.common, {source, Phase::kDispatch, epoch}, [&] {
    stamp = load_acquire_system(&line->stamp);
    return protocol::stamp_is(stamp, epoch);
  });
  if (!there) return {};
  return {static_cast<std::int64_t>(line->mask), protocol::stamp_rows(stamp)};
}

// Element `index` of 2 or 4 bytes; 0 where the pick is of another rank.
__device__ void show_weight(const Copied& weights, std::byte* to, const std::byte* from, int index, bool here) {
  if (weights.unit == 4) {
    reinterpret_cast<std::uint32_t*>(to)[index] = here ? reinterpret_cast<const std::uint32_t*>(from)[index] : 0;
  } else {
    reinterpret_cast<std::uint16_t*>(to)[index] = here ? reinterpret_cast<const std::uint16_t*>(from)[index] : 0;
  }
}

// By one warp: picks as this rank sees them, its experts counted from 0.
__device__ void show_picks(const MoveTask& task, Arrived rows) {
  const Ids& ids = task.ids;
  const std::byte* space = window_of(task.common, task.common.rank) + task.common.layout.payload(0);
  const int top_k = ids.top_k;
  for (int i = lane_index(); i < static_cast<int>(rows.count) * top_k; i += kWarp) {
    const std::int64_t row = rows.first + i / top_k;
    const int slot = i % top_k;
    const int wire = reinterpret_cast<const std::int32_t*>(space + ids.offset + row * ids.stride)[slot];
    const int local = wire - task.first_expert;
    const bool here = wire >= 0 && local >= 0 && local < task.num_local_experts;
    if (ids.to != nullptr) store_id(ids.to + row * ids.to_row_stride, slot, ids.to_i64, here ? local : -1);
    if (task.weights.data == nullptr) continue;
    show_weight(task.weights, task.weights.data + row * task.weights.row_stride,
                space + task.weights.offset + row * task.weights.stride, slot, here);
  }
}

__device__ void copy_payloads(const MoveTask& task, Arrived rows) {
  const std::byte* space = window_of(task.common, task.common.rank) + task.common.layout.payload(0);
  for (int index = 0; index < task.num_copied; ++index) {
    const Copied& plane = task.copied[static_cast<unsigned>(index)];
    copy_rows({plane.data + rows.first * plane.row_stride, plane.row_stride},
              {space + plane.offset + rows.first * plane.stride, plane.stride}, plane.row_bytes, plane.unit,
              ~std::uint64_t{0} >> (64 - rows.count));
  }
}

// Of `count` equal parts of a chunk's rows.
struct Part {
  int index = 0;
  int count = 1;
};

// By one warp. Rows over the limit are not shown.
__device__ void receive_chunk(const MoveTask& task, int source, int chunk, Part part, std::uint32_t epoch) {
  Arrived rows;
  if (lane_index() == 0) rows = wait_chunk(task, source, chunk, epoch);
  __syncwarp();
  rows.first = __shfl_sync(kAllLanes, rows.first, 0);
  rows.count = min(__shfl_sync(kAllLanes, rows.count, 0), task.row_limit - rows.first);
  const std::int64_t each = protocol::ceil_div(task.common.layout.shape().tokens_per_chunk, part.count);
  rows.count = min(each, rows.count - part.index * each);
  rows.first += part.index * each;
  if (rows.count <= 0) return;
  if (task.ids.to != nullptr || task.weights.data != nullptr) show_picks(task, rows);
  copy_payloads(task, rows);
}

// Rows of the result behind the last one that came.
__device__ void show_tail(const MoveTask& task, std::uint32_t rows, int warp, int warps) {
  const int top_k = task.ids.top_k;
  const std::int64_t kept = min(std::int64_t{rows}, task.row_limit);
  for (std::int64_t row = kept + warp; row < task.rows_shown; row += warps) {
    for (int slot = lane_index(); slot < top_k; slot += kWarp) {
      if (task.ids.to != nullptr) store_id(task.ids.to + row * task.ids.to_row_stride, slot, task.ids.to_i64, -1);
      std::byte* weights = task.weights.data;
      if (weights != nullptr) show_weight(task.weights, weights + row * task.weights.row_stride, nullptr, slot, false);
    }
  }
}

// By the warps of all blocks, of each of which there are `warps.count`. Chunks of all sources in turn, own rows last:
// the others' are on their way meanwhile.
__device__ void receive(const MoveTask& task, const Settled& settled, Crew warps) {
  const Common& common = task.common;
  const int warp = warps.index * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  const int num_warps = warps.count * static_cast<int>(gridDim.x);
  const int size = common.layout.shape().tokens_per_chunk;
  int most = 0;
  for (int first = 0; first < common.num_ranks; first += kWarp) {
    const int source = first + lane_index();
    if (source < common.num_ranks) most = max(most, task.route.basic.tokens_of[source]);
  }
  most = __reduce_max_sync(kAllLanes, most);
  const int chunks = chunks_of(common, most);
  const int whole = chunks * common.num_ranks;
  // Where rows are copied, a chunk is much for one warp.
  const int parts = task.num_copied == 0 || whole == 0 ? 1 : max(1, min(size, num_warps / whole));
  for (int item = warp; item < whole * parts; item += num_warps) {
    const int part = item / whole;
    const int source = (common.rank + 1 + item % common.num_ranks) % common.num_ranks;
    const int chunk = item % whole / common.num_ranks;
    const bool stamped = task.route.basic.rows_received[source] > 0 &&
                         static_cast<std::int64_t>(chunk) * size < task.route.basic.tokens_of[source];
    if (stamped) receive_chunk(task, source, chunk, {part, parts}, settled.epoch);
  }
  show_tail(task, settled.rows, warp, num_warps);
}

// What an earlier launch settled.
__device__ Settled settled_before(const MoveTask& task) {
  const std::uint32_t* state = task.route.basic.state;
  const bool failed = load_relaxed_device(&task.common.board->failed) != 0;
  Settled settled{.epoch = state[kRouteEpoch], .tokens = state[kRouteTokens], .rows = state[kRouteRows]};
  settled.failed = __syncthreads_or(static_cast<int>(failed)) != 0;
  bool there = state[kRouteAborted] == 0;
  if (there && task.sends && warp_index() == 0)
    there = rows_have_space(task.common, settled.epoch, task.route.basic.rows_sent);
  settled.there = __syncthreads_and(static_cast<int>(there)) != 0;
  return settled;
}

// `send_all` is given the epoch and the number of tokens; `receivers` as in the dispatch into spaces.
template <class SendAll>
__device__ void move(const MoveTask& task, Crew receivers, const SendAll& send_all) {
  const Common& common = task.common;
  const Settled settled = task.settles ? settle(task) : settled_before(task);
  if (settled.failed) return;
  if (settled.there) {
    if (task.sends) send_all(settled.epoch, settled.tokens);
    if (task.receives && receivers.index >= 0) receive(task, settled, receivers);
  }
  if (!task.releases || !last_block(&common.board->blocks_done)) return;
  if (threadIdx.x == 0) common.board->blocks_done = 0;
  // A dispatch that was given up meanwhile has used up an epoch too.
  if (settled.there) release_views(common, common.board->epochs[protocol::kDispatchPhase]);
}

__global__ void __launch_bounds__(kThreads) move_by_blocks(const __grid_constant__ MoveTask task) {
  move(task, {warp_index(), kWarps},
       [&task](std::uint32_t epoch, std::int64_t tokens) { send_by_blocks<CompactSend>(task, epoch, tokens); });
}

// One block fills a multiprocessor: its stages do.
__global__ void __launch_bounds__(kThreads, 1) move_in_bulk(const __grid_constant__ MoveTask task) {
  move(task, receivers_beside_senders(task), [&task](std::uint32_t epoch, std::int64_t tokens) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) std::byte stages[];  // NOLINT(modernize-avoid-c-arrays): device code
    send_in_bulk<CompactSend>(task, epoch, tokens, stages);
#else
    send_by_blocks<CompactSend>(task, epoch, tokens);  // compiled for an older device, and run on a newer one
#endif
  });
}

}  // namespace

void load_move() {
  check(cudaFuncSetAttribute(move_by_blocks, cudaFuncAttributePreferredSharedMemoryCarveout, 0), "loading a kernel");
}

bool load_bulk_move() {
  return make_room_for_ring(reinterpret_cast<const void*>(move_in_bulk), kAllStagesBytes);
}

void launch_move(const MoveTask& task, int blocks, cudaStream_t stream) {
  move_by_blocks<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching the rows of a dispatch");
}

void launch_bulk_move(const MoveTask& task, int blocks, cudaStream_t stream) {
  move_in_bulk<<<blocks, kThreads, kAllStagesBytes, stream>>>(task);
  check(cudaGetLastError(), "launching the rows of a dispatch");
}

}  // namespace tokenyard::engine::cuda
