// SPDX-License-Identifier: Apache-2.0
// Dispatch of few tokens into a space per source, where latency is all: rows cross in lines that tell of their own
// arrival (small_layout.h), so nobody waits for stores to be acknowledged, for counters or for words that follow the
// rows, and no block waits for another of its rank. Every warp works out a token's route by itself, for the same
// reason. The receiver writes lines where the caller sees them as they come.
#include "engine/cuda/kernels.h"
#include "engine/cuda/overlap.cuh"
#include "engine/cuda/plain_headers.cuh"
#include "engine/cuda/small_lines.cuh"

namespace tokenyard::engine::cuda {
namespace {

// The pick of this lane's slot of a token, and its owner; -1 where there is no expert.
struct Pick {
  std::int32_t id = -1;
  std::int32_t owner = -1;
};

// An id as two words, the second of which nothing waits for before it is looked at.
struct RawId {
  std::uint32_t low = ~0U;
  std::uint32_t high = ~0U;
};

__device__ __forceinline__ RawId load_id(const SmallDispatchTask& task, unsigned token, unsigned slot) {
  const Ids& ids = task.ids;
  RawId id{};
  if (slot >= static_cast<unsigned>(ids.top_k)) return id;
  const std::byte* row = ids.from + token * ids.from_stride;
  const auto* at = reinterpret_cast<const std::uint32_t*>(row + (slot << (ids.from_i64 ? 3 : 2)));
  id.low = at[0];
  id.high = 0;
  if (ids.from_i64) id.high = at[1];
  return id;
}

// By one warp of the rank for a token, of ids that are no experts.
__device__ __noinline__ void look_at_id(const Ids& ids, Board* board, RawId raw) {
  const auto narrow = std::int64_t{static_cast<std::int32_t>(raw.low)};
  const std::int64_t id = ids.from_i64 ? static_cast<std::int64_t>(std::uint64_t{raw.high} << 32 | raw.low) : narrow;
  if (id == -1 || id == ids.invalid_id) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&board->invalid_ids), 1ULL);
}

// What marks "no expert" is no number of one.
__device__ __forceinline__ Pick pick_of(const SmallDispatchTask& task, RawId id, bool counts) {
  const Ids& ids = task.ids;
  const bool expert = id.low < static_cast<unsigned>(ids.num_experts) && id.high == 0;
  if (counts && !expert && threadIdx.x % kWarp < static_cast<unsigned>(ids.top_k))
    look_at_id(ids, task.common.board, id);
  const auto wire = static_cast<std::int32_t>(id.low);
  return expert ? Pick{wire, task.owners.owner_of(wire)} : Pick{};
}

__device__ __forceinline__ std::byte* ids_row(const Ids& ids, int source, unsigned token) {
  return ids.to + source * ids.to_block_stride + token * ids.to_row_stride;
}

__device__ __forceinline__ void show_id(const Ids& ids, std::byte* row, unsigned slot, std::int32_t wire) {
  if (slot >= static_cast<unsigned>(ids.top_k)) return;
  store_id(row, static_cast<int>(slot), ids.to_i64, wire < 0 ? ids.invalid_id : std::int64_t{wire});
}

// The first of the picks that a line of ids has for this thread.
__device__ __forceinline__ unsigned slot_of(const SmallDispatchTask& task, unsigned line) {
  return row_offset_of(line - task.lane_lines) / sizeof(std::int32_t);
}

__device__ __forceinline__ void show_ids(
    const SmallDispatchTask& task, int source, unsigned token, unsigned line, const Pair& pair) {
  if (task.ids.to == nullptr) return;
  std::byte* row = ids_row(task.ids, source, token);
  const unsigned slot = slot_of(task, line);
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    if (i >= 2 && holds_flag()) break;
    show_id(task.ids, row, slot + i, static_cast<std::int32_t>((i < 2 ? pair.first : pair.second) >> (i % 2 * 32)));
  }
}

// By one warp: says that no row of the token is here.
__device__ __forceinline__ void show_absent(const SmallDispatchTask& task, int source, unsigned token) {
  if (task.ids.to != nullptr) show_id(task.ids, ids_row(task.ids, source, token), threadIdx.x % kWarp, -1);
}

// What this thread has of a line of the payloads; of another line, nothing. Parameters are read in place: a reference
// to them that a call takes would make them memory, which misses.
struct LineOfLane {
  unsigned lane;
  unsigned line;
  unsigned row_bytes;
};

__device__ __forceinline__ LineOfLane lane_of(const SmallDispatchTask& task, unsigned line) {
  if (line >= static_cast<unsigned>(task.lane_lines)) return {0, 0, 0};
  unsigned i = 0;
  if (static_cast<int>(line) >= task.lanes[0].end_line) {
#pragma unroll 1
    do {
      ++i;
    } while (static_cast<int>(line) >= task.lanes[i].end_line);
  }
  return {i, line - task.lanes[i].first_line, static_cast<unsigned>(task.lanes[i].row_bytes)};
}

__device__ __forceinline__ Part part_from(const SmallDispatchTask& task, unsigned token, unsigned line) {
  const LineOfLane at = lane_of(task, line);
  const SmallLane& lane = task.lanes[at.lane];
  return part_of(lane.from + token * lane.from_stride, at.line, at.row_bytes, lane.words_from);
}

__device__ __forceinline__ Part part_to(const SmallDispatchTask& task, int source, unsigned token, unsigned line) {
  const LineOfLane at = lane_of(task, line);
  const SmallLane& lane = task.lanes[at.lane];
  return part_of(lane.to + source * lane.to_block_stride + token * lane.to_row_stride, at.line, at.row_bytes,
                 lane.words_to);
}

// This thread's parts of the token's packet, without its ids.
__device__ __forceinline__ Parts read_parts(const SmallDispatchTask& task, unsigned token, const Slice& slice) {
  Parts parts{};
  for_each_line(slice, task.num_lines,
                [&](int k, unsigned line) { parts.pairs[k] = load_part(part_from(task, token, line)); });
  return parts;
}

__device__ __forceinline__ bool has_ids(const SmallDispatchTask& task, unsigned line) {
  return line >= static_cast<unsigned>(task.lane_lines) && line < static_cast<unsigned>(task.num_lines);
}

// By whole warps, which hold all picks.
__device__ __forceinline__ void add_ids(const SmallDispatchTask& task,
                                        const Pick& pick,
                                        const Slice& slice,
                                        Parts& parts) {
  for_each_line(slice, task.num_lines, [&](int k, unsigned line) {
    const bool ids = has_ids(task, line);
    if (__any_sync(kAllLanes, static_cast<int>(ids)) == 0) return;
    const unsigned slot = slot_of(task, line);
    std::uint32_t wire[4];  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll
    for (unsigned i = 0; i < 4; ++i)
      wire[i] = static_cast<std::uint32_t>(__shfl_sync(kAllLanes, pick.id, static_cast<int>((slot + i) % kWarp)));
    if (!ids) return;
    parts.pairs[k].first = std::uint64_t{wire[1]} << 32 | wire[0];
    parts.pairs[k].second = std::uint64_t{wire[3]} << 32 | wire[2];
  });
}

// Where a packet is shown, worked out while it is on its way.
struct Places {
  Part parts[kLinesAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
};

__device__ __forceinline__ Places places_of(const SmallDispatchTask& task,
                                            int source,
                                            unsigned token,
                                            const Slice& slice) {
  Places places{};
  for_each_line(slice, task.num_lines,
                [&](int k, unsigned line) { places.parts[k] = part_to(task, source, token, line); });
  return places;
}

__device__ __forceinline__ void show_parts(const SmallDispatchTask& task,
                                           int source,
                                           unsigned token,
                                           const Slice& slice,
                                           const Places& places,
                                           const Parts& parts) {
  for_each_line(slice, task.num_lines, [&](int k, unsigned line) {
    store_part(places.parts[k], parts.pairs[k]);
    if (has_ids(task, line)) show_ids(task, source, token, line, parts.pairs[k]);
  });
}

struct Call {
  Start start;
  std::uint32_t epoch;
  unsigned tokens;
};

// By one warp: tells every rank whether the token comes, and keeps for combine what it needs.
__device__ __forceinline__ void send_signs(const SmallDispatchTask& task,
                                           unsigned token,
                                           const Call& call,
                                           std::uint32_t ranks) {
  const Common& common = task.common;
  const auto to = static_cast<int>(threadIdx.x % kWarp);
  if (to == common.rank && token < call.tokens) task.route.ranks_of_token[token] = ranks;
  if (to >= common.num_ranks || (to == common.rank && task.own_direct)) return;
  store_pair_system(window_of(common, to) + task.small.sign(call.epoch, common.rank, token),
                    {sign_of(call.epoch, call.tokens, (ranks >> to & 1U) != 0), flag_of(call.epoch, task.agreed)});
}

// A slice of the token's packet, by a block. False when nothing is to be sent any more.
__device__ __forceinline__ bool send_token(const SmallDispatchTask& task, Item item, Call call) {
  const Common& common = task.common;
  const unsigned token = item.token;
  Slice& slice = item.slice;
  Parts parts{};
  RawId id{};
  if (token < call.tokens) {
    parts = read_parts(task, token, slice);
    id = load_id(task, token, threadIdx.x % kWarp);
  }
  call.epoch = used_from_here(call.start.epoch) + 1;
  if (call.start.failed != 0) return false;
  const bool tells = in_last_warp(slice);
  const Pick pick = pick_of(task, id, tells);
  const std::uint32_t ranks = __reduce_or_sync(kAllLanes, pick.owner < 0 ? 0U : 1U << pick.owner);
  if (tells) send_signs(task, token, call, ranks);
  const bool own = task.own_direct && (ranks >> common.rank & 1U) != 0;
  const std::int64_t packet = task.small.packet(call.epoch, common.rank, token);
  const std::uint64_t flag = flag_of(call.epoch, task.agreed);
  while (true) {
    add_ids(task, pick, slice, parts);
#pragma unroll 1
    for (std::uint32_t left = own ? ranks ^ 1U << common.rank : ranks; left != 0; left &= left - 1) {
      const int to = __ffs(static_cast<int>(left)) - 1;
      store_lines(window_of(common, to) + packet, parts, slice, task.num_lines, flag);
    }
    if (own) show_parts(task, common.rank, token, slice, places_of(task, common.rank, token, slice), parts);
    if (ranks == 0 || !advance(slice, task.num_lines)) break;
    parts = read_parts(task, token, slice);
  }
  if (!task.own_direct || !tells) return true;
  if (!own) {
    show_absent(task, common.rank, token);
  } else if (threadIdx.x % kWarp == 0) {
    atomicAdd(task.route.rows_received + common.rank, 1U);
  }
  return true;
}

// By one thread.
__device__ __forceinline__ void note_received(const SmallDispatchTask& task,
                                              int source,
                                              unsigned token,
                                              std::uint64_t sign) {
  task.route.present[source * static_cast<unsigned>(task.small.tokens) + token] = comes(sign) ? 1U : 0U;
  if (task.counts && comes(sign)) atomicAdd(task.route.rows_received + source, 1U);
  if (token == 0) task.route.tokens_of[source] = tokens_of(sign);
}

// By one lane, when it waits long: whether the operation is given up.
__device__ __noinline__ bool gave_up(const SmallDispatchTask& task, const std::byte* sign_at, Awaited awaited) {
  std::uint32_t* state = task.route.state + kSmallRouteAborted;
  if (given_up_plainly(task.common, state, awaited)) return true;
  const std::uint64_t flag = flag_of(awaited.epoch, task.agreed);
  const std::uint64_t seen = load_pair_system(sign_at).second;
  if (seen == flag || !same_epoch(seen, flag)) return false;
  // Each rank compares all others with itself, so when any two differ every rank ends this operation.
  give_up_small(task.common, state, NoticeKind::kMismatch, awaited);
  return true;
}

// A slice of a token's packet, by a warp; false when this rank does not go on with the operation. Rows are polled
// together with what tells whether they come: all of it arrives at about the same time.
__device__ __forceinline__ bool receive_token(const SmallDispatchTask& task,
                                              int source,
                                              Item item,
                                              std::uint32_t epoch) {
  const Common& common = task.common;
  const unsigned token = item.token;
  Slice& slice = item.slice;
  const std::uint64_t flag = flag_of(epoch, task.agreed);
  const std::byte* window = window_of(common, common.rank);
  const std::byte* sign_at = window + task.small.sign(epoch, source, token);
  const std::byte* packet = window + task.small.packet(epoch, source, token);
  const Awaited awaited{source, Phase::kDispatch, epoch};
  Pair sign{};
  do {
    const Places places = places_of(task, source, token, slice);
    Parts parts{};
    const auto ready = [&] {
      sign = load_pair_system(sign_at);
      parts = load_lines(packet, slice, task.num_lines);
      const bool known = same_epoch(sign.first, flag) && sign.second == flag;
      const bool there = !comes(sign.first) || are_there(parts, slice, task.num_lines, flag);
      return __all_sync(kAllLanes, static_cast<int>(known && there)) != 0;
    };
    if (!wait_as_warp(common, awaited, ready, [&] { return gave_up(task, sign_at, awaited); })) return false;
    if (!comes(sign.first)) break;
    show_parts(task, source, token, slice, places, parts);
  } while (advance(slice, task.num_lines));
  if (!in_last_warp(item.slice)) return true;
  if (!comes(sign.first)) show_absent(task, source, token);
  if (threadIdx.x % kWarp == 0) note_received(task, source, token, sign.first);
  return true;
}

// By one warp, of every source, whatever rows there are: the parity of epochs rests on it (small_layout.h).
__device__ __noinline__ void await_all(const SmallDispatchTask& task, std::uint32_t epoch) {
  const auto source = static_cast<int>(threadIdx.x % kWarp);
  if (source < task.common.num_ranks && source != task.common.rank)
    await_any_sign(task.common, task.small, source, epoch);
}

// Sources in turn from the next rank on, own rows last; items from the last block on, so that with few tokens nobody
// both sends and receives.
__device__ __forceinline__ void receive(const SmallDispatchTask& task, std::uint32_t epoch) {
  const unsigned items = task.rows_per_block * task.work.peers.value() << task.work.slices_log2;
#pragma unroll 1
  for (unsigned at = gridDim.x - 1 - blockIdx.x; at < items; at += gridDim.x) {
    const Item item = item_of(task.work, at);
    int source = task.common.rank + 1 + static_cast<int>(item.peer);
    if (source >= task.common.num_ranks) source -= task.common.num_ranks;
    if (!receive_token(task, source, item, epoch)) return await_all(task, epoch);
  }
}

__global__ void __launch_bounds__(kThreads, 2) small_dispatch(const __grid_constant__ SmallDispatchTask task) {
  const Common& common = task.common;
  fetch_parameters(task);
  wait_for_kernels_before();
  Call call{read_start(common, protocol::kDispatchPhase), 0, 0};
  // Else when all have sent: the blocks of the next kernel come in the way of what is to be sent.
  if (blocks_do_both(task.work, task.rows_per_block)) let_next_kernel_start();
  if (task.sends) {
    call.tokens = static_cast<unsigned>(tokens_of_call(task.num_tokens, task.num_tokens_on_device));
    const unsigned items = static_cast<unsigned>(task.rows_per_block) << task.work.slices_log2;
#pragma unroll 1
    for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
      if (!send_token(task, token_of(task.work, item), call)) return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      task.route.state[kRouteTokens] = call.tokens;
      task.route.tokens_of[common.rank] = static_cast<std::int32_t>(call.tokens);
    }
  }
  if (call.start.failed != 0) return;
  call.epoch = used_from_here(call.start.epoch) + (task.sends ? 1U : 0U);
  let_next_kernel_start();
  __syncthreads();
  if (task.sends) advance_block(common, protocol::kDispatchPhase, call.epoch);
  if (task.receives) receive(task, call.epoch);
}

}  // namespace

void load_small_dispatch() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(small_dispatch)), "loading a kernel");
}

void launch_small_dispatch(const SmallDispatchTask& task, int blocks, cudaStream_t stream) {
  const Launch launch{.blocks = blocks, .threads = task.work.threads, .overlaps = task.work.overlaps};
  launch_overlapping(small_dispatch, launch, stream, task);
}

}  // namespace tokenyard::engine::cuda
