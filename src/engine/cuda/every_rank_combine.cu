// SPDX-License-Identifier: Apache-2.0
// Combine of every rank's rows, in one launch: expert output that does not lie in the window is staged there, chunk by
// chunk, and each origin pulls its tokens' rows from all ranks and sums them in the order of ranks. Some warps stage
// while the others pull what is staged already.
//
// An owner's header says whether its rows lie in the window as they are. Those that do not are told of by chunks of the
// origin's tokens, in a word beside the stamp of the dispatch's chunk, which that dispatch has no use for.
#include <algorithm>

#include "engine/cuda/combine_kernels.cuh"
#include "engine/cuda/combine_rounds.cuh"
#include "engine/cuda/copies.cuh"
#include "engine/cuda/every_rank_kernels.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/sums.cuh"

namespace tokenyard::engine::cuda {
namespace {

constexpr int kStagers = kWarps / 2;  // warps of a block that stage first, where the others can begin with sums
constexpr int kPacksAtOnce = 4;       // of a lane, and of each of
constexpr int kOwnersAtOnce = 2;      // this many rows: loads that cross the link together
constexpr std::uint64_t kInPlace = 1;

__device__ std::uint64_t* staged_stamp(const Common& common, int window, int owner, std::int64_t chunk) {
  return &chunk_of(common, window, owner, chunk)->mask;
}

// First rows of the origins among the rows of every result, by one warp.
__device__ void find_first_rows(const EveryRankCombineTask& task, std::int64_t* first_rows) {
  const Common& common = task.rows.common;
  std::int64_t before = 0;
  for (int first = 0; first < common.num_ranks; first += kWarp) {
    const int origin = first + lane_index();
    const std::int64_t rows = origin < common.num_ranks ? task.rows.route.rows_received[origin] : 0;
    std::int64_t end = rows;
    for (int step = 1; step < kWarp; step *= 2) {
      const std::int64_t other = __shfl_up_sync(kAllLanes, end, step);
      if (lane_index() >= step) end += other;
    }
    if (origin < common.num_ranks) first_rows[origin] = before + end - rows;
    before += __shfl_sync(kAllLanes, end, kWarp - 1);
  }
}

template <class Wire>
__device__ void stage_row(const CombineTask& task, std::byte* to, const std::byte* from) {
  const Crew crew{lane_index(), kWarp};
  if (task.from_dtype == task.rows_dtype) return copy_row(to, from, task.row_bytes, task.unit, crew);
  cast_row_of<Wire>(task.from_dtype, to, from, task.hidden, crew);
}

// By warps, in the order in which origins want the rows: the first chunk of each, then the next. The one that stages
// the last row of a chunk tells its origin (pairs with wait_chunk).
template <class Wire>
__device__ void stage_rows(const EveryRankCombineTask& task,
                           const std::int64_t* first_rows,
                           std::uint32_t epoch,
                           Crew warps) {
  const CombineTask& rows = task.rows;
  const Common& common = rows.common;
  const std::int64_t size = common.layout.shape().tokens_per_chunk;
  const std::int64_t items = protocol::num_chunks(task.most_tokens, static_cast<int>(size)) * size * common.num_ranks;
  auto* counters = reinterpret_cast<std::uint32_t*>(rows.route.masks);
  for (std::int64_t item = warps.index; item < items; item += warps.count) {
    const std::int64_t chunk = item / (size * common.num_ranks);
    const auto origin = static_cast<int>((common.rank + 1 + item / size % common.num_ranks) % common.num_ranks);
    const std::int64_t token = chunk * size + item % size;
    const std::int64_t tokens = rows.route.tokens_of[origin];
    if (token >= tokens) continue;
    const std::int64_t row = first_rows[origin] + token;
    stage_row<Wire>(rows, window_of(common, common.rank) + common.layout.combine_row(row),
                    rows.from + row * rows.from_row_stride);
    __syncwarp();
    if (lane_index() != 0) continue;
    const auto of_chunk = static_cast<std::uint32_t>(min(size, tokens - chunk * size));
    std::uint32_t* counter = counters + origin * common.layout.max_chunks() + chunk;
    if (add_acq_rel_device(counter, 1) + 1 != of_chunk) continue;
    *counter = 0;
    store_release_system(staged_stamp(common, origin, common.rank, chunk), protocol::encode_stamp(epoch, of_chunk));
  }
}

// By one block. Rows in place were written by kernels before, which the release publishes (pairs with wait_chunk).
__device__ void write_headers(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  for (int origin = static_cast<int>(threadIdx.x); origin < common.num_ranks; origin += kThreads) {
    const std::uint32_t rows = task.route.rows_received[origin];
    if (rows == 0) continue;
    protocol::HeaderLine* header = header_of(common, origin, protocol::kCombinePhase, epoch, common.rank);
    header->mask = task.staged ? 0 : kInPlace;
    header->agreed = task.hidden;
    header->status = protocol::HeaderStatus::kOk;
    store_release_system(&header->stamp, protocol::encode_stamp(epoch, rows));
  }
}

// By one block, when no other one waits for the section any more.
__device__ void note_owed(const CombineTask& task, std::uint32_t epoch) {
  for (int origin = static_cast<int>(threadIdx.x); origin < task.common.num_ranks; origin += kThreads) {
    if (task.route.rows_received[origin] > 0) task.common.owed[origin] = epoch;
  }
  __syncthreads();
}

struct Owed {
  bool there = false;  // all owners' rows of the chunk
  bool all = false;    // and those of all other chunks
};

// By one warp.
__device__ Owed wait_chunk(const CombineTask& task, std::int64_t chunk, std::uint32_t epoch) {
  const Common& common = task.common;
  std::uint32_t* state = task.route.state + kCombineAborted;
  bool there = true;
  bool all = true;
  for (int owner = lane_index(); owner < common.num_ranks; owner += kWarp) {
    const Awaited awaited{owner, Phase::kCombine, epoch};
    const auto stamped = [epoch](const std::uint64_t* stamp) {
      return protocol::stamp_is(load_acquire_system(stamp), epoch);
    };
    const protocol::HeaderLine* header = header_of(common, common.rank, protocol::kCombinePhase, epoch, owner);
    if (!wait_until(
            common, awaited, [&] { return stamped(&header->stamp); }, state)) {
      there = false;
      continue;
    }
    const bool aborted = header->status == protocol::HeaderStatus::kAborted;
    if (aborted || header->agreed != task.hidden) {
      give_up(common, state, aborted ? NoticeKind::kAborted : NoticeKind::kMismatch, awaited);
      there = false;
      continue;
    }
    if (header->mask == kInPlace) continue;
    all = false;
    const std::uint64_t* staged = staged_stamp(common, common.rank, owner, chunk);
    there = there && wait_until(
                         common, awaited, [&] { return stamped(staged); }, state);
  }
  __syncwarp();
  return {__all_sync(kAllLanes, static_cast<int>(there)) != 0, __all_sync(kAllLanes, static_cast<int>(all)) != 0};
}

// Packs of one token's sum that a warp makes.
struct Share {
  std::int64_t token = 0;
  int begin = 0;
  int end = 0;
};

// ((+0 + rank 0) + rank 1) + ... + biases, each addition rounded, then one rounding. Loads of several ranks and packs
// come before the first addition: they cross the link.
template <class Wire, class To, int N>
__device__ void sum_share(const EveryRankCombineTask& task, const Share& share) {
  const CombineTask& rows = task.rows;
  const Common& common = rows.common;
  const std::int64_t place = common.layout.combine_row(task.first_row + share.token);
  for (int first = share.begin + lane_index(); first < share.end; first += kPacksAtOnce * kWarp) {
    float sums[kPacksAtOnce][N] = {};
    for (int owner = 0; owner < common.num_ranks; owner += kOwnersAtOnce) {
      Pack<Wire, N> packs[kOwnersAtOnce][kPacksAtOnce];
#pragma unroll
      for (int o = 0; o < kOwnersAtOnce; ++o) {
        if (owner + o >= common.num_ranks) continue;
        const auto* row = reinterpret_cast<const Pack<Wire, N>*>(window_of(common, owner + o) + place);
#pragma unroll
        for (int k = 0; k < kPacksAtOnce; ++k) {
          if (first + k * kWarp < share.end) packs[o][k] = row[first + k * kWarp];
        }
      }
#pragma unroll
      for (int o = 0; o < kOwnersAtOnce; ++o) {
        if (owner + o >= common.num_ranks) continue;
#pragma unroll
        for (int k = 0; k < kPacksAtOnce; ++k) {
          if (first + k * kWarp < share.end) add_pack<Wire, N>(sums[k], packs[o][k]);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kPacksAtOnce; ++k) {
      const int index = first + k * kWarp;
      if (index >= share.end) continue;
      for (unsigned b = 0; b < rows.bias.size(); ++b) {
        if (rows.bias[b] == nullptr) continue;
        const std::byte* bias = rows.bias[b] + share.token * rows.bias_stride[b];
        add_pack<To, N>(sums[k], reinterpret_cast<const Pack<To, N>*>(bias)[index]);
      }
      reinterpret_cast<Pack<To, N>*>(rows.output + share.token * rows.output_stride)[index] =
          round_sums<To, N>(sums[k]);
    }
  }
}

// By warps of all blocks: those with an index of their own begin with the share of that index, and all go on with the
// next that is free.
template <class Wire, class To, int N>
__device__ void sum_shares(const EveryRankCombineTask& task, std::uint32_t epoch, Crew warps) {
  const CombineTask& rows = task.rows;
  const std::int64_t tokens = rows.route.state[kRouteTokens];
  const auto packs = static_cast<int>(rows.hidden / N);
  const std::int64_t all_warps = std::int64_t{kWarps} * gridDim.x;
  const std::int64_t most_slices = protocol::ceil_div(packs, kWarp);
  const auto slices =
      static_cast<int>(max(std::int64_t{1}, min(most_slices, all_warps / max(tokens, std::int64_t{1}))));
  const int per_slice = static_cast<int>(protocol::ceil_div(packs, slices));
  const std::int64_t items = tokens * slices;
  const auto next_free = [&] {
    std::uint32_t taken = 0;
    if (lane_index() == 0) taken = atomicAdd(rows.route.rows_sent, 1U);
    return std::int64_t{__shfl_sync(kAllLanes, taken, 0)} + warps.count;
  };
  const int size = rows.common.layout.shape().tokens_per_chunk;
  std::int64_t ready = -1;
  bool all_ready = false;
  std::int64_t item = warps.index >= 0 ? warps.index : next_free();
  while (item < items) {
    const Share share{item / slices, static_cast<int>(item % slices) * per_slice,
                      min(packs, static_cast<int>(item % slices + 1) * per_slice)};
    const std::int64_t chunk = share.token / size;
    if (!all_ready && chunk != ready) {
      const Owed owed = wait_chunk(rows, chunk, epoch);
      if (!owed.there) return;
      ready = chunk;
      all_ready = owed.all;
    }
    item = next_free();
    sum_share<Wire, To, N>(task, share);
  }
}

template <class Wire, class To>
__device__ void sum(const EveryRankCombineTask& task, std::uint32_t epoch, Crew warps) {
  // As many values as make 16 bytes of the wider of the two.
  constexpr int kSize = static_cast<int>(std::max(sizeof(typename Wire::Bits), sizeof(typename To::Bits)));
  if (task.rows.vectors) return sum_shares<Wire, To, 16 / kSize>(task, epoch, warps);
  sum_shares<Wire, To, 1>(task, epoch, warps);
}

// By a block; whether rows may be staged.
__device__ bool begin_sending(const CombineTask& task, std::uint32_t epoch) {
  const Common& common = task.common;
  const bool first = blockIdx.x == 0;
  if (task.ends_views && first) release_views(common, common.board->epochs[protocol::kDispatchPhase]);
  if (task.staged && !wait_for_section(common, epoch)) return false;
  if (first) write_headers(task, epoch);
  return task.staged;
}

template <class Wire, class To>
__device__ void run(const EveryRankCombineTask& task, std::uint32_t epoch) {
  __shared__ std::int64_t first_rows[kMaxRanks];
  const CombineTask& rows = task.rows;
  const bool stages = rows.sends && begin_sending(rows, epoch);
  if (stages) {
    if (warp_index() == 0) find_first_rows(task, first_rows);
    __syncthreads();
  }
  const auto grid = static_cast<int>(gridDim.x);
  const auto block = static_cast<int>(blockIdx.x);
  const int stagers = !stages ? 0 : rows.receives ? kStagers : kWarps;
  const bool stager = warp_index() < stagers;
  if (stager) stage_rows<Wire>(task, first_rows, epoch, {warp_index() * grid + block, stagers * grid});
  if (!rows.receives) return;
  const int index = stager ? -1 : (warp_index() - stagers) * grid + block;
  sum<Wire, To>(task, epoch, {index, (kWarps - stagers) * grid});
}

template <class Wire, class To>
__global__ void __launch_bounds__(kThreads) every_rank_combine(const __grid_constant__ EveryRankCombineTask task) {
  const CombineTask& rows = task.rows;
  const Common& common = rows.common;
  // Loaded together, before anything waits for one of them.
  const std::uint32_t failed = load_relaxed_device(&common.board->failed);
  const std::uint32_t last = load_relaxed_device(&common.board->epochs[protocol::kCombinePhase]);
  const bool aborted = load_relaxed_device(rows.route.state + kRouteAborted) != 0;
  if (__syncthreads_or(static_cast<int>(failed)) != 0) return;
  // No rank combines a round that was given up, so it uses up no epoch.
  const std::uint32_t epoch = rows.sends && !aborted ? last + 1 : last;
  if (!aborted) run<Wire, To>(task, epoch);
  if (!last_block(&common.board->blocks_done)) return;
  if (rows.sends && !aborted) {
    note_owed(rows, epoch);
    if (rows.reads_views) release_views(common, common.board->epochs[protocol::kDispatchPhase]);
  }
  finish_combine(rows, epoch);
}

__global__ void __launch_bounds__(kThreads) await_section(const __grid_constant__ Common common) {
  if (__syncthreads_or(static_cast<int>(load_relaxed_device(&common.board->failed))) != 0) return;
  wait_for_section(common, common.board->epochs[protocol::kCombinePhase] + 1);
}

struct Kernels {
  template <class Wire, class To>
  static auto get() {
    return every_rank_combine<Wire, To>;
  }
};

}  // namespace

void load_every_rank_combine() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, await_section), "loading a kernel");
  load_combine_kernels<Kernels>();
}

void launch_every_rank_combine(const EveryRankCombineTask& task, int blocks, cudaStream_t stream) {
  combine_kernel<Kernels>(task.rows.rows_dtype, task.rows.output_dtype)<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a combine");
}

void launch_await_section(const Common& common, cudaStream_t stream) {
  await_section<<<1, kThreads, 0, stream>>>(common);
  check(cudaGetLastError(), "launching a wait");
}

}  // namespace tokenyard::engine::cuda
