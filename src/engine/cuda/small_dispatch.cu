// SPDX-License-Identifier: Apache-2.0
// Dispatch of few tokens into a space per source, where latency is all: rows cross in lines that tell of their own
// arrival (small_layout.h), so nobody waits for stores to be acknowledged, for counters or for words that follow the
// rows, and no block waits for another of its rank. Every warp works out a token's route by itself, for the same
// reason. The receiver writes lines where the caller sees them as they come.
#include "engine/cuda/kernels.h"
#include "engine/cuda/plain_headers.cuh"
#include "engine/cuda/small_lines.cuh"

namespace tokenyard::engine::cuda {
namespace {

// The pick of this lane's slot of a token, and its owner; -1 where there is no expert.
struct Pick {
  std::int32_t id = -1;
  std::int32_t owner = -1;
};

__device__ __noinline__ void count_invalid_id(Board* board) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&board->invalid_ids), 1ULL);
}

__device__ __forceinline__ std::int64_t load_id(const SmallDispatchTask& task, unsigned token, unsigned slot) {
  const Ids& ids = task.ids;
  if (slot >= static_cast<unsigned>(ids.top_k)) return -1;
  const std::byte* row = ids.from + token * ids.from_stride;
  return ids.from_i64 ? reinterpret_cast<const std::int64_t*>(row)[slot]
                      : std::int64_t{reinterpret_cast<const std::int32_t*>(row)[slot]};
}

__device__ __forceinline__ bool is_expert(const Ids& ids, std::int64_t id) {
  return id >= 0 && id < ids.num_experts && id != ids.invalid_id;
}

__device__ __forceinline__ Pick pick_of(const SmallDispatchTask& task, std::int64_t id) {
  if (!is_expert(task.ids, id)) {
    if (id != -1 && id != task.ids.invalid_id && threadIdx.x < kWarp) count_invalid_id(task.common.board);
    return {};
  }
  const auto expert = static_cast<std::int32_t>(id);
  return {expert, task.owners.owner_of(expert)};
}

__device__ __forceinline__ void show_id(const Ids& ids, int source, unsigned token, unsigned slot, std::int32_t wire) {
  if (ids.to == nullptr || slot >= static_cast<unsigned>(ids.top_k)) return;
  store_id(ids.to + source * ids.to_block_stride + token * ids.to_row_stride, static_cast<int>(slot), ids.to_i64,
           wire < 0 ? ids.invalid_id : std::int64_t{wire});
}

__device__ __forceinline__ unsigned num_lines_of(const SmallDispatchTask& task) {
  return static_cast<unsigned>(task.lane_lines) +
         (static_cast<unsigned>(task.ids.top_k) + 2 * kLineWords - 1) / (2 * kLineWords);
}

// The lane that a line is of, where it is not one of ids.
__device__ __forceinline__ const SmallLane& lane_of(const SmallDispatchTask& task, unsigned line) {
  unsigned i = 0;
#pragma unroll 1
  while (static_cast<int>(line) >= task.lanes[i].end_line)
    ++i;
  return task.lanes[i];
}

__device__ __forceinline__ Pair read_lane_part(const SmallLane& lane, unsigned token, unsigned line) {
  return load_part(lane.from + token * lane.from_stride, line - lane.first_line, lane.row_bytes, lane.words_from);
}

__device__ __forceinline__ void show_lane_part(
    const SmallLane& lane, int source, unsigned token, unsigned line, const Pair& pair) {
  store_part(lane.to + source * lane.to_block_stride + token * lane.to_row_stride, line - lane.first_line,
             lane.row_bytes, lane.words_to, pair);
}

__device__ __noinline__ Pair read_other_part(const SmallDispatchTask& task, unsigned token, unsigned line) {
  return read_lane_part(lane_of(task, line), token, line);
}

// Of other lanes than the first, and of ids.
__device__ __noinline__ void show_other_part(
    const SmallDispatchTask& task, int source, unsigned token, unsigned line, Pair pair) {
  if (line < static_cast<unsigned>(task.lane_lines)) {
    return show_lane_part(lane_of(task, line), source, token, line, pair);
  }
  const unsigned slot = row_offset_of(line - task.lane_lines) / sizeof(std::int32_t);
  show_id(task.ids, source, token, slot, static_cast<std::int32_t>(pair.first));
  show_id(task.ids, source, token, slot + 1, static_cast<std::int32_t>(pair.first >> 32));
  if (holds_flag()) return;
  show_id(task.ids, source, token, slot + 2, static_cast<std::int32_t>(pair.second));
  show_id(task.ids, source, token, slot + 3, static_cast<std::int32_t>(pair.second >> 32));
}

// This thread's parts of the token's packet, without its ids. Most lines are of the first lane.
__device__ __forceinline__ Parts read_parts(const SmallDispatchTask& task, unsigned token, Slice slice) {
  Parts parts{};
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const unsigned line = slice.first + k * slice.step;
    if (line < static_cast<unsigned>(task.lanes[0].end_line)) {
      parts.pairs[k] = read_lane_part(task.lanes[0], token, line);
    } else if (line < static_cast<unsigned>(task.lane_lines)) {
      parts.pairs[k] = read_other_part(task, token, line);
    }
  }
  return parts;
}

// By whole warps, which hold all picks.
__device__ __forceinline__ void add_ids(const SmallDispatchTask& task, const Pick& pick, Slice slice, Parts& parts) {
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const unsigned line = slice.first + k * slice.step;
    const bool ids = line >= static_cast<unsigned>(task.lane_lines);
    if (__any_sync(kAllLanes, static_cast<int>(ids)) == 0) continue;
    const unsigned slot = row_offset_of(line - task.lane_lines) / sizeof(std::int32_t);
    std::uint32_t wire[4];  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll
    for (unsigned i = 0; i < 4; ++i)
      wire[i] = static_cast<std::uint32_t>(__shfl_sync(kAllLanes, pick.id, static_cast<int>((slot + i) % kWarp)));
    if (!ids) continue;
    parts.pairs[k].first = std::uint64_t{wire[1]} << 32 | wire[0];
    parts.pairs[k].second = std::uint64_t{wire[3]} << 32 | wire[2];
  }
}

__device__ __forceinline__ void show_parts(
    const SmallDispatchTask& task, int source, unsigned token, Slice slice, const Parts& parts) {
  const unsigned num_lines = num_lines_of(task);
#pragma unroll
  for (int k = 0; k < kLinesAtOnce; ++k) {
    const unsigned line = slice.first + k * slice.step;
    if (line < static_cast<unsigned>(task.lanes[0].end_line)) {
      show_lane_part(task.lanes[0], source, token, line, parts.pairs[k]);
    } else if (line < num_lines) {
      show_other_part(task, source, token, line, parts.pairs[k]);
    }
  }
}

// By one warp: says that no row of the token is here.
__device__ __forceinline__ void show_absent(const SmallDispatchTask& task, int source, unsigned token) {
  show_id(task.ids, source, token, threadIdx.x % kWarp, -1);
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
__device__ __forceinline__ bool send_token(const SmallDispatchTask& task,
                                           unsigned token,
                                           Slice slice,
                                           const Call& call) {
  const Common& common = task.common;
  const bool real = token < call.tokens;
  const unsigned num_lines = num_lines_of(task);
  Parts parts{};
  std::int64_t id = -1;
  if (real) {
    id = load_id(task, token, threadIdx.x % kWarp);
    parts = read_parts(task, token, slice);
  }
  if (call.start.failed != 0) return false;
  const Pick pick = pick_of(task, id);
  const std::uint32_t ranks = __reduce_or_sync(kAllLanes, pick.owner < 0 ? 0U : 1U << pick.owner);
  const bool tells = slice.index == 0 && threadIdx.x < kWarp;
  if (tells) send_signs(task, token, call, ranks);
  const std::int64_t packet = task.small.packet(call.epoch, common.rank, token);
  const std::uint64_t flag = flag_of(call.epoch, task.agreed);
  while (true) {
    add_ids(task, pick, slice, parts);
#pragma unroll 1
    for (std::uint32_t left = ranks; left != 0; left &= left - 1) {
      const int to = __ffs(static_cast<int>(left)) - 1;
      if (to == common.rank && task.own_direct) continue;
      store_lines(window_of(common, to) + packet, parts, slice, num_lines, flag);
    }
    if ((ranks >> common.rank & 1U) != 0 && task.own_direct) show_parts(task, common.rank, token, slice, parts);
    slice.first += kLinesAtOnce * slice.step;
    if (ranks == 0 || __any_sync(kAllLanes, static_cast<int>(slice.first < num_lines)) == 0) break;
    parts = read_parts(task, token, slice);
  }
  if (!task.own_direct || !tells) return true;
  if ((ranks >> common.rank & 1U) == 0) {
    show_absent(task, common.rank, token);
  } else if (threadIdx.x == 0) {
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

// A slice of a token's packet, by a block; false when this rank does not go on with the operation. Rows are polled
// together with what tells whether they come: all of it arrives at about the same time.
__device__ __forceinline__ bool receive_token(
    const SmallDispatchTask& task, int source, unsigned token, Slice slice, std::uint32_t epoch) {
  const Common& common = task.common;
  const unsigned num_lines = num_lines_of(task);
  const std::uint64_t flag = flag_of(epoch, task.agreed);
  const std::byte* window = window_of(common, common.rank);
  const std::byte* sign_at = window + task.small.sign(epoch, source, token);
  const std::byte* packet = window + task.small.packet(epoch, source, token);
  const Awaited awaited{source, Phase::kDispatch, epoch};
  std::uint32_t* given_up = task.route.state + kSmallRouteAborted;
  Pair sign{};
  const bool tells = slice.index == 0;
  do {
    Parts parts{};
    const auto ready = [&] {
      sign = load_pair_system(sign_at);
      parts = load_lines(packet, slice, num_lines);
      const bool known = same_epoch(sign.first, flag) && same_epoch(sign.second, flag);
      const bool there = are_there(parts, slice, num_lines, flag) || !comes(sign.first) || sign.second != flag;
      return __all_sync(kAllLanes, static_cast<int>(known && there)) != 0;
    };
    if (!wait_as_warp(common, awaited, ready, [&] { return given_up_plainly(common, given_up, awaited); }))
      return false;
    if (sign.second != flag) {
      // Each rank compares all others with itself, so when any two differ every rank ends this operation.
      if (threadIdx.x % kWarp == 0) give_up_small(common, given_up, NoticeKind::kMismatch, awaited);
      return false;
    }
    if (!comes(sign.first)) break;
    show_parts(task, source, token, slice, parts);
    slice.first += kLinesAtOnce * slice.step;
  } while (__any_sync(kAllLanes, static_cast<int>(slice.first < num_lines)) != 0);
  if (tells && threadIdx.x < kWarp && !comes(sign.first)) show_absent(task, source, token);
  if (tells && threadIdx.x == 0) note_received(task, source, token, sign.first);
  return true;
}

// Of every source, whatever rows there are: the parity of epochs rests on it (small_layout.h).
__device__ __noinline__ void await_all(const SmallDispatchTask& task, std::uint32_t epoch) {
  for (int source = static_cast<int>(threadIdx.x); source < task.common.num_ranks; source += blockDim.x) {
    if (source != task.common.rank) await_any_sign(task.common, task.small, source, epoch);
  }
}

// Sources in turn from the next rank on, own rows last; items from the last block on, so that with few tokens nobody
// both sends and receives.
__device__ __forceinline__ void receive(const SmallDispatchTask& task, std::uint32_t epoch) {
  const unsigned items = task.rows_per_block * task.work.peers.value() * task.work.slices.value();
  bool goes_on = true;
#pragma unroll 1
  for (unsigned at = gridDim.x - 1 - blockIdx.x; at < items && goes_on; at += gridDim.x) {
    const Item item = item_of(task.work, at);
    int source = task.common.rank + 1 + static_cast<int>(item.peer);
    if (source >= task.common.num_ranks) source -= task.common.num_ranks;
    goes_on = receive_token(task, source, item.token, slice_of(task.work, item.slice), epoch);
  }
  if (__syncthreads_and(static_cast<int>(goes_on)) == 0) await_all(task, epoch);
}

__global__ void __launch_bounds__(kThreads, 1) small_dispatch(const __grid_constant__ SmallDispatchTask task) {
  const Common& common = task.common;
  Call call{read_start(common, protocol::kDispatchPhase), 0, 0};
  call.epoch = call.start.epoch + (task.sends ? 1U : 0U);
  if (task.sends) {
    call.tokens = static_cast<unsigned>(tokens_of_call(task.num_tokens, task.num_tokens_on_device));
    const unsigned items = task.rows_per_block * task.work.slices.value();
#pragma unroll 1
    for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
      const unsigned token = task.work.slices.divide(item);
      const Slice slice = slice_of(task.work, item - token * task.work.slices.value());
      if (!send_token(task, token, slice, call)) return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      task.route.state[kRouteTokens] = call.tokens;
      task.route.tokens_of[common.rank] = static_cast<std::int32_t>(call.tokens);
    }
  }
  if (call.start.failed != 0) return;
  if (task.receives) receive(task, call.epoch);
  __syncthreads();
  if (task.sends) advance_block(common, protocol::kDispatchPhase, call.epoch);
}

}  // namespace

void load_small_dispatch() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(small_dispatch)), "loading a kernel");
}

void launch_small_dispatch(const SmallDispatchTask& task, int blocks, cudaStream_t stream) {
  small_dispatch<<<blocks, task.work.threads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a small dispatch");
}

}  // namespace tokenyard::engine::cuda
