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

constexpr int kIdsOfLane = kMaxTopK / kWarp;

// The picks of a token, spread over a warp: lane i holds those of slots i and i + 32; -1 where there is no expert.
struct Picks {
  std::int32_t ids[kIdsOfLane];     // NOLINT(modernize-avoid-c-arrays): device code
  std::int32_t owners[kIdsOfLane];  // NOLINT(modernize-avoid-c-arrays): device code
};

__device__ Picks no_picks() {
  Picks picks{};
  for (int k = 0; k < kIdsOfLane; ++k)
    picks.ids[k] = picks.owners[k] = -1;
  return picks;
}

__device__ Picks load_picks(const SmallDispatchTask& task, std::int64_t token) {
  const Ids& ids = task.ids;
  const std::byte* row = ids.from + token * ids.from_stride;
  Picks picks = no_picks();
#pragma unroll
  for (int k = 0; k < kIdsOfLane; ++k) {
    const int slot = lane_index() + k * kWarp;
    if (slot >= ids.top_k) break;
    const std::int64_t id = ids.from_i64 ? reinterpret_cast<const std::int64_t*>(row)[slot]
                                         : std::int64_t{reinterpret_cast<const std::int32_t*>(row)[slot]};
    if (id >= 0 && id < ids.num_experts && id != ids.invalid_id) {
      picks.ids[k] = static_cast<std::int32_t>(id);
      picks.owners[k] = protocol::owner_of(ids.num_experts, task.common.num_ranks, picks.ids[k]);
    } else if (id != -1 && id != ids.invalid_id && warp_index() == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&task.common.board->invalid_ids), 1ULL);
    }
  }
  return picks;
}

// Ranks that own a pick, those from kWordBits * w on: bit r is rank kWordBits * w + r.
__device__ std::uint32_t ranks_of(const Picks& picks, int w) {
  std::uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < kIdsOfLane; ++k) {
    if (picks.owners[k] >= 0 && picks.owners[k] / kWordBits == w) bits |= 1U << (picks.owners[k] % kWordBits);
  }
  return __reduce_or_sync(kAllLanes, bits);
}

// The id of any slot, by a warp; each lane may ask for another one.
__device__ std::int32_t id_of(const Picks& picks, int slot) {
  const std::int32_t low = __shfl_sync(kAllLanes, picks.ids[0], slot % kWarp);
  const std::int32_t high = __shfl_sync(kAllLanes, picks.ids[1], slot % kWarp);
  return slot < kWarp ? low : high;
}

static_assert(kIdsOfLane == 2);

__device__ void show_id(const Ids& ids, int source, std::int64_t token, int slot, std::int32_t wire) {
  if (ids.to == nullptr || slot >= ids.top_k) return;
  store_id(ids.to + source * ids.to_block_stride + token * ids.to_row_stride, slot, ids.to_i64,
           wire < 0 ? ids.invalid_id : std::int64_t{wire});
}

// Words of a packet's lanes as they lie in the caller's rows. Each lane starts with a word of its own.
__device__ std::uint64_t lane_word(const SmallDispatchTask& task, std::int64_t token, int index) {
  unsigned i = 0;
  while (index >= task.lanes[i].end_word)
    ++i;
  const SmallLane& lane = task.lanes[i];
  return load_word(lane.from + token * lane.from_stride, lane.row_bytes, index - lane.first_word, lane.aligned_from);
}

__device__ void show_word(
    const SmallDispatchTask& task, int source, std::int64_t token, int index, std::uint64_t word) {
  unsigned i = 0;
  while (index >= task.lanes[i].end_word)
    ++i;
  const SmallLane& lane = task.lanes[i];
  std::byte* row = lane.to + source * lane.to_block_stride + token * lane.to_row_stride;
  store_word(row, lane.row_bytes, index - lane.first_word, lane.aligned_to, word);
}

__device__ Shares read_rows(const SmallDispatchTask& task, std::int64_t token, int first_line) {
  Shares shares{};
  for_shares(shares, first_line, task.num_words, [&](Pair& pair, int word) {
    pair.first = lane_word(task, token, word);
    if (!holds_flag() && word + 1 < task.num_words) pair.second = lane_word(task, token, word + 1);
  });
  return shares;
}

__device__ void show_rows(
    const SmallDispatchTask& task, int source, std::int64_t token, int first_line, Shares& shares) {
  for_shares(shares, first_line, task.num_words, [&](const Pair& pair, int word) {
    show_word(task, source, token, word, pair.first);
    if (!holds_flag() && word + 1 < task.num_words) show_word(task, source, token, word + 1, pair.second);
  });
}

// By one warp: tells every rank whether the token comes, with its ids.
__device__ void send_control(
    const SmallDispatchTask& task, const Picks& picks, std::int64_t token, std::int64_t tokens, std::uint32_t epoch) {
  const Common& common = task.common;
  const std::int64_t packet = task.small.packet(epoch, common.rank, token);
  for (int first = 0; first < common.num_ranks; first += kLinesOfWarp) {
    const int to = first + lane_index() / kLineThreads;
    const std::uint32_t comes = ranks_of(picks, first / kWordBits) >> (to % kWordBits) & 1U;
    for (int line = 0; line < control_lines(task.ids.top_k); ++line) {
      std::uint32_t words[4];  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = line * kControlWords + 4 * place_in_line() + i;
        const std::int32_t id = id_of(picks, max(word - kFirstId, 0) % kMaxTopK);
        words[i] = static_cast<std::uint32_t>(id);
        if (word == 0) words[i] = static_cast<std::uint32_t>(tokens);
        if (word == 1) words[i] = comes;
      }
      Pair pair{static_cast<std::uint64_t>(words[1]) << 32 | words[0],
                static_cast<std::uint64_t>(words[3]) << 32 | words[2]};
      if (holds_flag()) pair.second = flag_of(epoch, task.agreed);
      if (to >= common.num_ranks || (to == common.rank && task.own_direct)) continue;
      store_pair_system(
          window_of(common, to) + packet + line * kDataLineBytes + place_in_line() * static_cast<int>(sizeof(Pair)),
          pair);
    }
  }
}

// This rank's own ids of the token, or ids that say that no row is here; and what combine needs to know.
__device__ void note_own(const SmallDispatchTask& task, const Picks& picks, std::int64_t token, bool real) {
  const int rank = task.common.rank;
  const RouteMemory& route = task.route;
  bool comes = false;
  for (int w = 0; w < route.words; ++w) {
    const std::uint32_t ranks = ranks_of(picks, w);
    if (real && lane_index() == 0) route.ranks_of_token[token * route.words + w] = ranks;
    if (w == rank / kWordBits) comes = (ranks >> (rank % kWordBits) & 1U) != 0;
  }
  if (!task.own_direct) return;
#pragma unroll
  for (int k = 0; k < kIdsOfLane; ++k)
    show_id(task.ids, rank, token, lane_index() + k * kWarp, comes ? picks.ids[k] : -1);
  if (lane_index() == 0 && comes) atomicAdd(route.rows_received + rank, 1U);
}

__device__ void send_token(const SmallDispatchTask& task,
                           std::int64_t token,
                           std::int64_t tokens,
                           std::uint32_t epoch) {
  const Common& common = task.common;
  const bool real = token < tokens;
  const std::uint64_t flag = flag_of(epoch, task.agreed);
  const std::int64_t rows =
      task.small.packet(epoch, common.rank, token) + control_lines(task.ids.top_k) * kDataLineBytes;
  Shares shares{};
  if (real) shares = read_rows(task, token, line_of_thread());
  const Picks picks = real ? load_picks(task, token) : no_picks();
  if (warp_index() == kWarps - 1) send_control(task, picks, token, tokens, epoch);
  for (int base = 0; real && base * kLineWords < task.num_words; base += kLinesAtOnce * kLinesOfBlock) {
    const int line = base + line_of_thread();
    if (base != 0) shares = read_rows(task, token, line);
    for (int w = 0; w < task.route.words; ++w) {
      for (std::uint32_t ranks = ranks_of(picks, w); ranks != 0; ranks &= ranks - 1) {
        const int to = w * kWordBits + __ffs(static_cast<int>(ranks)) - 1;
        if (to == common.rank && task.own_direct) {
          show_rows(task, to, token, line, shares);
        } else {
          store_shares(window_of(common, to) + rows, shares, line, task.num_words, flag);
        }
      }
    }
  }
  if (warp_index() == 0) note_own(task, picks, token, real);
}

// What the control lines of a token say, spread over a warp as they were stored.
class Control {
 public:
  // Whether it is all there.
  __device__ bool load(const std::byte* packet, int top_k, std::uint64_t flag) {
    const int line = min(lane_index() / kLineThreads, control_lines(top_k) - 1);
    pair_ = load_pair_system(packet + line * kDataLineBytes + place_in_line() * static_cast<int>(sizeof(Pair)));
    return __all_sync(kAllLanes, static_cast<int>(!holds_flag() || same_epoch(pair_.second, flag))) != 0;
  }

  __device__ bool agrees(std::uint64_t flag) const {
    return __all_sync(kAllLanes, static_cast<int>(!holds_flag() || pair_.second == flag)) != 0;
  }

  __device__ std::int32_t tokens() const { return static_cast<std::int32_t>(__shfl_sync(kAllLanes, pair_.first, 0)); }

  __device__ bool comes() const { return (__shfl_sync(kAllLanes, pair_.first, 0) >> 32) != 0; }

  // Each lane may ask for another one.
  __device__ std::int32_t id(int slot) const {
    const int word = min(slot, kMaxTopK - 1) + kFirstId;
    const int at = word % kControlWords;
    const int lane = word / kControlWords * kLineThreads + at / 4;
    const std::uint64_t first = __shfl_sync(kAllLanes, pair_.first, lane);
    const std::uint64_t second = __shfl_sync(kAllLanes, pair_.second, lane);
    return static_cast<std::int32_t>((at % 4 < 2 ? first : second) >> (at % 2 * 32));
  }

 private:
  Pair pair_{};
};

static_assert(control_lines(kMaxTopK) <= kLinesOfWarp);

// By one warp.
__device__ void note_received(const SmallDispatchTask& task, int source, std::int64_t token, const Control& control) {
  const bool comes = control.comes();
  const std::int32_t tokens = control.tokens();
#pragma unroll
  for (int k = 0; k < kIdsOfLane; ++k) {
    const int slot = lane_index() + k * kWarp;
    const std::int32_t id = control.id(slot);
    show_id(task.ids, source, token, slot, comes ? id : -1);
  }
  if (lane_index() != 0) return;
  task.route.present[source * task.small.tokens + token] = comes ? 1U : 0U;
  if (task.counts && comes) atomicAdd(task.route.rows_received + source, 1U);
  if (token == 0) task.route.tokens_of[source] = tokens;
}

// By a block; false when this rank does not go on with the operation. Rows are polled together with what tells whether
// they come: all of it arrives at about the same time.
__device__ bool receive_token(const SmallDispatchTask& task, int source, std::int64_t token, std::uint32_t epoch) {
  const Common& common = task.common;
  const std::uint64_t flag = flag_of(epoch, task.agreed);
  const std::byte* packet = window_of(common, common.rank) + task.small.packet(epoch, source, token);
  const std::byte* rows = packet + control_lines(task.ids.top_k) * kDataLineBytes;
  const Awaited awaited{source, Phase::kDispatch, epoch};
  Control control;
  bool known = false;
  bool comes = false;
  bool agrees = false;
  for (int base = 0; base == 0 || (comes && base * kLineWords < task.num_words); base += kLinesAtOnce * kLinesOfBlock) {
    const int line = base + line_of_thread();
    Shares shares{};
    const auto ready = [&] {
      if (!known) {
        known = control.load(packet, task.ids.top_k, flag);
        agrees = known && control.agrees(flag);
        comes = agrees && control.comes();
      }
      const bool there = load_shares(rows, shares, line, task.num_words, flag);
      return known && (!comes || __all_sync(kAllLanes, static_cast<int>(there)) != 0);
    };
    const auto pointless = [&] { return given_up_plainly(common, task.route.state + kSmallRouteAborted, awaited); };
    if (!wait_as_warp(common, awaited, ready, pointless)) return false;
    if (!agrees) {
      // Each rank compares all others with itself, so when any two differ every rank ends this operation.
      if (lane_index() == 0)
        give_up_small(common, task.route.state + kSmallRouteAborted, NoticeKind::kMismatch, awaited);
      return false;
    }
    if (comes) show_rows(task, source, token, line, shares);
  }
  if (warp_index() == 0) note_received(task, source, token, control);
  return true;
}

// Of every source, whatever rows there are: the parity of epochs rests on it (small_layout.h).
__device__ void await_all(const SmallDispatchTask& task, std::uint32_t epoch) {
  for (int source = warp_index(); source < task.common.num_ranks; source += kWarps) {
    if (source != task.common.rank && lane_index() == 0) await_any_sign(task.common, task.small, source, epoch);
  }
}

__device__ void receive(const SmallDispatchTask& task, std::uint32_t epoch) {
  const int sources = task.common.num_ranks - (task.own_direct ? 1 : 0);
  const std::int64_t items = task.rows_per_block * sources;
  bool goes_on = true;
  // From the last block on, so that with few tokens nobody both sends and receives.
  for (std::int64_t item = gridDim.x - 1 - blockIdx.x; item < items && goes_on; item += gridDim.x) {
    const auto source = static_cast<int>((task.common.rank + 1 + item % sources) % task.common.num_ranks);
    goes_on = receive_token(task, source, item / sources, epoch);
  }
  if (__syncthreads_and(static_cast<int>(goes_on)) == 0) await_all(task, epoch);
}

__global__ void __launch_bounds__(kThreads, 1) small_dispatch(const __grid_constant__ SmallDispatchTask task) {
  const Common& common = task.common;
  const Start start = read_start(common, protocol::kDispatchPhase);
  if (start.failed != 0) return;
  const std::uint32_t epoch = start.epoch + (task.sends ? 1U : 0U);
  if (task.sends) {
    const std::int64_t tokens = tokens_of_call(task.num_tokens, task.num_tokens_on_device);
    for (std::int64_t token = blockIdx.x; token < task.rows_per_block; token += gridDim.x)
      send_token(task, token, tokens, epoch);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      task.route.state[kRouteTokens] = static_cast<std::uint32_t>(tokens);
      task.route.tokens_of[common.rank] = static_cast<std::int32_t>(tokens);
    }
  }
  if (task.receives) receive(task, epoch);
  __syncthreads();
  if (task.sends) advance_block(common, protocol::kDispatchPhase, epoch);
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
