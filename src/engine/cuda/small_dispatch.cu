// SPDX-License-Identifier: Apache-2.0
// Dispatch of few tokens into a space per source, where latency is all: rows cross in units that tell of their own
// arrival (small_layout.h), so nobody waits for stores to be acknowledged, for counters or for words that follow the
// rows. The receiver writes units where the caller sees them as they come. One header per rank says how many tokens
// there are and what must agree, at the start and not after the rows.
#include "engine/cuda/copies.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/routes.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/waits.cuh"

namespace tokenyard::engine::cuda {
namespace {

// Bytes [4 * i, 4 * i + 4) of a row, as far as it goes.
__device__ std::uint32_t load_word(const std::byte* row, std::int64_t bytes, int i, bool aligned) {
  if (aligned && 4 * i + 4 <= bytes) return reinterpret_cast<const std::uint32_t*>(row)[i];
  std::uint32_t word = 0;
  for (int k = 0; k < 4 && 4 * i + k < bytes; ++k)
    word |= static_cast<std::uint32_t>(row[4 * i + k]) << (8 * k);
  return word;
}

__device__ void store_word(std::byte* row, std::int64_t bytes, int i, bool aligned, std::uint32_t word) {
  if (aligned && 4 * i + 4 <= bytes) {
    reinterpret_cast<std::uint32_t*>(row)[i] = word;
    return;
  }
  for (int k = 0; k < 4 && 4 * i + k < bytes; ++k)
    row[4 * i + k] = static_cast<std::byte>(word >> (8 * k));
}

// Word `index` of a token's packet, of those that its lanes take up.
__device__ std::uint32_t lane_word(const SmallDispatchTask& task, std::int64_t token, int index) {
  for (int i = 0; i < task.num_lanes; ++i) {
    const SmallLane& lane = task.lanes[static_cast<unsigned>(i)];
    if (index >= lane.first_word + lane.num_words) continue;
    return load_word(lane.from + token * lane.from_stride, lane.row_bytes, index - lane.first_word, lane.aligned);
  }
  return 0;
}

__device__ void show_id(const SmallDispatchTask& task, int source, std::int64_t token, int slot, std::int32_t wire) {
  const Ids& ids = task.ids;
  if (ids.to == nullptr) return;
  store_id(ids.to + source * ids.to_block_stride + token * ids.to_row_stride, slot, ids.to_i64,
           wire < 0 ? ids.invalid_id : std::int64_t{wire});
}

__device__ void show_word(
    const SmallDispatchTask& task, int source, std::int64_t token, int index, std::uint32_t word) {
  if (index >= task.lane_words) {
    const int slot = index - task.lane_words;
    if (slot < task.ids.top_k) show_id(task, source, token, slot, static_cast<std::int32_t>(word));
    return;
  }
  for (int i = 0; i < task.num_lanes; ++i) {
    const SmallLane& lane = task.lanes[static_cast<unsigned>(i)];
    if (index >= lane.first_word + lane.num_words) continue;
    std::byte* row = lane.to + source * lane.to_block_stride + token * lane.to_row_stride;
    return store_word(row, lane.row_bytes, index - lane.first_word, lane.aligned, word);
  }
}

__device__ void note_present(const SmallDispatchTask& task, int source, std::int64_t token) {
  const int size = task.common.layout.shape().tokens_per_chunk;
  std::uint64_t* mask = task.route.masks + source * task.common.layout.max_chunks() + token / size;
  atomicOr(reinterpret_cast<unsigned long long*>(mask), 1ULL << (token % size));
  atomicAdd(task.route.rows_received + source, 1U);
}

// A thread's units of a packet, loaded before it is known where they go.
struct UnitsOfThread {
  Unit units[kUnitsAtOnce];
};

__device__ UnitsOfThread load_units(const SmallDispatchTask& task, std::int64_t token, int first) {
  UnitsOfThread mine{};
#pragma unroll
  for (int k = 0; k < kUnitsAtOnce; ++k) {
    const int index = (first + k * kThreads) * kUnitWords;
#pragma unroll
    for (int w = 0; w < kUnitWords; ++w) {
      if (index + w < task.lane_words) mine.units[k].words[w] = lane_word(task, token, index + w);
    }
  }
  return mine;
}

__device__ void store_units(
    const SmallDispatchTask& task, std::int64_t packet, int first, UnitsOfThread& mine, const TokenOfBlock& shared) {
#pragma unroll
  for (int k = 0; k < kUnitsAtOnce; ++k) {
    const int index = first + k * kThreads;
    if (index >= task.num_units) return;
#pragma unroll
    for (int w = 0; w < kUnitWords; ++w) {
      const int slot = index * kUnitWords + w - task.lane_words;
      if (slot >= 0 && slot < task.ids.top_k) {
        mine.units[k].words[w] = static_cast<std::uint32_t>(shared.wire_ids[slot]);
      }
    }
    for (int d = 0; d < shared.num_destinations; ++d) {
      const int to = shared.destinations[d];
      if (to == task.common.rank) continue;
      store_unit_system(window_of(task.common, to) + packet + (1 + std::int64_t{index}) * kUnitBytes, mine.units[k]);
    }
  }
}

// Tells every rank whether the token comes, and sends its units to those that it goes to.
__device__ void send_token(const SmallDispatchTask& task,
                           std::int64_t token,
                           std::uint32_t epoch,
                           TokenOfBlock& shared) {
  const Common& common = task.common;
  const auto thread = static_cast<int>(threadIdx.x);
  const std::int64_t packet = task.small.packet(epoch, common.rank, token);
  UnitsOfThread mine = load_units(task, token, thread);
  if (warp_index() == 0) route_token(common, task.route, task.ids, token, shared);
  __syncthreads();
  for (int first = thread; first < task.num_units; first += kUnitsAtOnce * kThreads) {
    if (first != thread) mine = load_units(task, token, first);
    for (Unit& unit : mine.units)
      unit.flag = flag_of(epoch);
    store_units(task, packet, first, mine, shared);
  }
  for (int to = thread; to < common.num_ranks; to += kThreads) {
    if (to == common.rank) continue;
    const std::uint32_t comes = shared.words[to / kWordBits] >> (to % kWordBits) & 1U;
    store_unit_system(window_of(common, to) + packet, {{comes, 0}, flag_of(epoch)});
  }
}

// This rank's own row of the token, or ids that say there is none.
__device__ void show_own(const SmallDispatchTask& task, std::int64_t token, const TokenOfBlock& shared) {
  const int rank = task.common.rank;
  const bool comes = (shared.words[rank / kWordBits] >> (rank % kWordBits) & 1U) != 0;
  for (int slot = static_cast<int>(threadIdx.x); slot < task.ids.top_k; slot += kThreads)
    show_id(task, rank, token, slot, comes ? shared.wire_ids[slot] : -1);
  if (!comes) return;
  if (threadIdx.x == 0) note_present(task, rank, token);
  for (int i = 0; i < task.num_lanes; ++i) {
    const SmallLane& lane = task.lanes[static_cast<unsigned>(i)];
    copy_row(lane.to + rank * lane.to_block_stride + token * lane.to_row_stride, lane.from + token * lane.from_stride,
             lane.row_bytes, lane.unit, {static_cast<int>(threadIdx.x), kThreads});
  }
}

// By one warp of one block, at once: how many tokens come, and what ranks must agree on.
__device__ void send_headers(const SmallDispatchTask& task, std::uint32_t epoch, std::int64_t tokens) {
  const Common& common = task.common;
  const std::uint32_t flag = flag_of(epoch);
  const auto digest = static_cast<unsigned long long>(task.digest);
  const auto agreed = static_cast<unsigned long long>(task.agreed);
  for (int to = lane_index(); to < common.num_ranks; to += kWarp) {
    if (to == common.rank) continue;
    std::byte* header = window_of(common, to) + task.small.header(epoch, common.rank);
    const auto store = [&](int unit, std::uint64_t words) {
      store_unit_system(header + unit * kUnitBytes,
                        {{static_cast<std::uint32_t>(words), static_cast<std::uint32_t>(words >> 32)}, flag});
    };
    store(0, static_cast<std::uint32_t>(tokens));  // in the upper word: whether the operation is given up
    store(1, digest);
    store(2, agreed);
  }
}

__device__ void send(const SmallDispatchTask& task, std::uint32_t epoch, std::int64_t tokens) {
  __shared__ TokenOfBlock shared;
  if (blockIdx.x == 0 && warp_index() == 1) send_headers(task, epoch, tokens);
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    send_token(task, token, epoch, shared);
    show_own(task, token, shared);
    __syncthreads();
  }
}

// By one thread for each source.
__device__ void check_header(const SmallDispatchTask& task, int source, std::uint32_t epoch) {
  const Common& common = task.common;
  const Awaited awaited{source, Phase::kDispatch, epoch};
  const std::byte* at = window_of(common, common.rank) + task.small.header(epoch, source);
  std::array<Unit, kHeaderUnits> units{};
  const auto here = [&] {
    bool all = true;
    for (unsigned i = 0; i < units.size(); ++i) {
      units[i] = load_unit_system(at + std::int64_t{i} * kUnitBytes);
      all = all && units[i].flag == flag_of(epoch);
    }
    return all;
  };
  if (!wait_until(common, awaited, here)) return;
  task.route.tokens_of[source] = static_cast<std::int32_t>(units[0].words[0]);
  const std::uint64_t digest = std::uint64_t{units[1].words[1]} << 32 | units[1].words[0];
  const std::uint64_t agreed = std::uint64_t{units[2].words[1]} << 32 | units[2].words[0];
  const bool aborted = units[0].words[1] != 0;
  if (!aborted && digest == task.digest && agreed == static_cast<std::uint64_t>(task.agreed)) return;
  // Each rank compares all others with itself, so when any two differ every rank ends this operation.
  give_up(common, task.route.state + kRouteAborted, aborted ? NoticeKind::kAborted : NoticeKind::kMismatch, awaited);
}

enum class Coming : int { kUnknown, kNo, kYes };

// What is known of a token of another rank, from its header and from the unit that tells of presence.
__device__ Coming look(const std::byte* header, const std::byte* packet, std::int64_t token, std::uint32_t flag) {
  const Unit presence = load_unit_system(packet);
  const Unit tokens = load_unit_system(header);
  if (tokens.flag == flag && token >= tokens.words[0]) return Coming::kNo;
  if (presence.flag != flag) return Coming::kUnknown;
  return presence.words[0] != 0 ? Coming::kYes : Coming::kNo;
}

// By a block. Data is polled together with what tells whether it comes: all of it arrives at about the same time.
__device__ void receive_token(const SmallDispatchTask& task, int source, std::int64_t token, std::uint32_t epoch) {
  const Common& common = task.common;
  const std::uint32_t flag = flag_of(epoch);
  const std::byte* window = window_of(common, common.rank);
  const std::byte* packet = window + task.small.packet(epoch, source, token);
  const std::byte* header = window + task.small.header(epoch, source);
  Coming coming = Coming::kUnknown;
  int index = static_cast<int>(threadIdx.x);
  do {
    const bool mine = index < task.num_units;
    Unit unit{};
    const bool came = wait_until(
        common, {source, Phase::kDispatch, epoch},
        [&] {
          if (mine) unit = load_unit_system(packet + (1 + std::int64_t{index}) * kUnitBytes);
          if (coming == Coming::kUnknown) coming = look(header, packet, token, flag);
          return coming == Coming::kNo || (coming == Coming::kYes && (!mine || unit.flag == flag));
        },
        task.route.state + kRouteAborted);
    if (!came) return;
    if (coming == Coming::kNo) break;
    for (int w = 0; w < kUnitWords && mine; ++w)
      show_word(task, source, token, index * kUnitWords + w, unit.words[w]);
    index += kThreads;
  } while (index < task.num_units);
  if (coming == Coming::kYes) {
    if (threadIdx.x == 0) note_present(task, source, token);
    return;
  }
  for (int slot = static_cast<int>(threadIdx.x); slot < task.ids.top_k; slot += kThreads)
    show_id(task, source, token, slot, -1);
}

__device__ void receive(const SmallDispatchTask& task, std::uint32_t epoch, std::int64_t own_tokens) {
  // Of every source, whatever rows there are: the parity of epochs rests on it (small_layout.h).
  if (blockIdx.x == gridDim.x - 1) {
    for (int source = static_cast<int>(threadIdx.x); source < task.common.num_ranks; source += kThreads) {
      if (source != task.common.rank) check_header(task, source, epoch);
    }
  }
  const int others = task.common.num_ranks - 1;
  const std::int64_t items = task.rows_per_block * others;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const std::int64_t token = item / others;
    const int source = static_cast<int>((task.common.rank + 1 + item % others) % task.common.num_ranks);
    receive_token(task, source, token, epoch);
  }
  // Own rows that have no token.
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    task.route.tokens_of[task.common.rank] = static_cast<std::int32_t>(own_tokens);
  }
  for (std::int64_t row = own_tokens + blockIdx.x; row < task.rows_per_block; row += gridDim.x) {
    for (int slot = static_cast<int>(threadIdx.x); slot < task.ids.top_k; slot += kThreads)
      show_id(task, task.common.rank, row, slot, -1);
  }
}

__global__ void __launch_bounds__(kThreads, 1) small_dispatch(const __grid_constant__ SmallDispatchTask task) {
  const Common& common = task.common;
  const Start start = read_start(common);
  if (start.failed != 0) return;
  const std::uint32_t epoch = start.epochs[protocol::kDispatchPhase] + 1;
  const std::int64_t tokens = tokens_of_call(task.num_tokens, task.num_tokens_on_device);
  if (blockIdx.x == 0 && threadIdx.x == 0) task.route.state[kRouteTokens] = static_cast<std::uint32_t>(tokens);
  send(task, epoch, tokens);
  receive(task, epoch, tokens);
  if (!last_block(&common.board->blocks_done)) return;
  if (threadIdx.x == 0) {
    common.board->blocks_done = 0;
    common.board->epochs[protocol::kDispatchPhase] = epoch;
    common.host->invalid_ids = common.board->invalid_ids;
  }
  __syncthreads();
  // The peers need to know of rows and headers that are not needed any more only before the operation after the next,
  // and hear of them from the combine; an operation that was given up has none.
  if (load_relaxed_device(task.route.state + kRouteAborted) != 0) release_views(common, epoch);
}

}  // namespace

void load_small_dispatch() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(small_dispatch)), "loading a kernel");
}

void launch_small_dispatch(const SmallDispatchTask& task, int blocks, cudaStream_t stream) {
  small_dispatch<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a small dispatch");
}

}  // namespace tokenyard::engine::cuda
