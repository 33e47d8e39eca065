// SPDX-License-Identifier: Apache-2.0
// Combine by expert, in one launch or one for each half: each rank weighs and sums its experts' rows of a token and
// stores the one row to the origin's window; the origin sums the rows of its tokens in the order of ranks.
#include <algorithm>

#include "engine/cuda/copies.cuh"
#include "engine/cuda/expert_combine.cuh"
#include "engine/cuda/expert_combine_lines.cuh"
#include "engine/cuda/expert_kernels.h"
#include "engine/cuda/expert_state.cuh"
#include "engine/cuda/expert_sums.cuh"
#include "engine/cuda/overlap.cuh"

namespace tokenyard::engine::cuda {
namespace {

constexpr int kMostRowsAtOnce = 2;  // of a block

template <class Wire>
__device__ void reduce(const ExpertCombineTask& task, std::uint32_t epoch, const OwedRow& row, Crew crew) {
  std::byte* to = window_of(task.common, row.origin) +
                  task.common.layout.combine_row(task.common.rank * task.common.layout.shape().max_tokens + row.token,
                                                 protocol::slot_of(epoch, kExpertDepth));
  switch (task.from_dtype) {
    case Dtype::kBf16:
      return Wire::template reduce<protocol::Bf16>(to, row.from, task.hidden, task.from_vectors, crew);
    case Dtype::kF16:
      return Wire::template reduce<protocol::F16>(to, row.from, task.hidden, task.from_vectors, crew);
    default:
      return Wire::template reduce<protocol::F32>(to, row.from, task.hidden, task.from_vectors, crew);
  }
}

__device__ void stamp_returned(const ExpertCombineTask& task, std::uint32_t epoch, const OwedRow& row) {
  std::byte* stamp = window_of(task.common, row.origin) + task.extra.returned(epoch, task.common.rank, row.token);
  store_release_system(reinterpret_cast<std::uint64_t*>(stamp), protocol::encode_stamp(epoch, 1));
}

__device__ __noinline__ bool wait_for_room(const ExpertCombineTask& task, std::uint32_t epoch) {
  bool there = true;
  for (int peer = static_cast<int>(threadIdx.x); peer < task.common.num_ranks; peer += kThreads) {
    there = there && wait_for_combine_space(task.common, epoch, peer, task.route.rows_received[peer] > 0,
                                            task.weights != nullptr && task.route.rows_sent[peer] > 0);
  }
  return __syncthreads_and(there) != 0;
}

// Two rows at once where there are more than blocks: each half of the block makes one. Their stores are before their
// stamps, which release them (pairs with wait_returned).
template <class Wire>
__device__ void reduce_rows(const ExpertCombineTask& task, std::uint32_t epoch, int items) {
  __shared__ OwedRow owed[kMostRowsAtOnce];
  __shared__ std::uint32_t given[kMostRowsAtOnce][kMaxTopK];
  const auto blocks = static_cast<int>(gridDim.x);
  const int at_once = items > blocks ? kMostRowsAtOnce : 1;
  const int crew_size = kThreads / at_once;
  const auto thread = static_cast<int>(threadIdx.x);
  const int crew = thread / crew_size;
  for (int first = static_cast<int>(blockIdx.x); first < items; first += at_once * blocks) {
    const int item = first + crew * blocks;
    OwedRow& row = owed[crew];
    if (thread % crew_size < kWarp) {
      if (item < items) {
        RecordOfLanes record;
        record.load(task, static_cast<unsigned>(item));
        prepare_owed_row(task, epoch, record, given[crew], row);
      } else if (lane_index() == 0) {
        row.needed = false;
      }
    }
    __syncthreads();
    if (row.needed) reduce<Wire>(task, epoch, row, {thread % crew_size, crew_size});
    __syncthreads();
    if (thread < at_once && owed[thread].needed) stamp_returned(task, epoch, owed[thread]);
    __syncthreads();
  }
}

template <class Wire>
__device__ void sum_tokens(const ExpertCombineTask& task, std::uint32_t epoch, std::int64_t tokens) {
  __shared__ ReturnedRows returned;
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    __syncthreads();
    if (threadIdx.x == 0) find_returned(task, epoch, token, returned);
    __syncthreads();
    if (!wait_returned(task, epoch, token, returned)) return;
    std::byte* to = task.output + token * task.output_stride;
    switch (task.output_dtype) {
      case Dtype::kBf16:
        Wire::template sum<protocol::Bf16>(to, returned.rows, returned.count, task.hidden, task.output_vectors);
        break;
      case Dtype::kF16:
        Wire::template sum<protocol::F16>(to, returned.rows, returned.count, task.hidden, task.output_vectors);
        break;
      default:
        Wire::template sum<protocol::F32>(to, returned.rows, returned.count, task.hidden, task.output_vectors);
    }
  }
}

// How the two halves move rows: stamped ones, or
template <class Wire>
struct StampedRows {
  static constexpr bool kInLines = false;

  __device__ __forceinline__ void load(const ExpertCombineTask& /*task*/) {}

  __device__ __forceinline__ void reduce_all(const ExpertCombineTask& task, std::uint32_t epoch, int items) {
    reduce_rows<Wire>(task, epoch, items);
  }

  __device__ __forceinline__ void sum_all(const ExpertCombineTask& task, std::uint32_t epoch, std::int64_t tokens) {
    sum_tokens<Wire>(task, epoch, tokens);
  }
};

// rows in lines. `kUniform`: of one dtype everywhere, in whole packs.
template <class Wire, bool kUniform>
struct RowsInLines {
  static constexpr bool kInLines = true;

  __device__ __forceinline__ void load(const ExpertCombineTask& task) { loaded.load(task); }

  __device__ __forceinline__ void reduce_all(const ExpertCombineTask& task, std::uint32_t epoch, int items) {
    reduce_into_lines<Wire, kUniform>(task, epoch, static_cast<unsigned>(items), loaded);
  }

  __device__ __forceinline__ void sum_all(const ExpertCombineTask& task, std::uint32_t epoch, std::int64_t tokens) {
    sum_lines<Wire, kUniform>(task, epoch, tokens);
  }

  LoadedCombine loaded;
};

// When all blocks have seen that the round was given up, its handle is as new.
__device__ __noinline__ void end_given_up(const Common& common, std::uint32_t* state) {
  if (last_block(&common.board->blocks_done) && threadIdx.x == 0) common.board->blocks_done = state[kGivenUp] = 0;
}

template <class Rows>
__global__ void __launch_bounds__(kThreads, 1) expert_combine(const __grid_constant__ ExpertCombineTask task) {
  const Common& common = task.common;
  std::uint32_t* state = task.route.state;
  fetch_parameters(task);
  wait_for_kernels_before();
  const Start start = read_start(common, protocol::kCombinePhase);
  const bool aborted = load_relaxed_device(state + kGivenUp) != 0;
  const std::uint32_t of_round = task.sends ? 0 : state[kCombineEpoch];
  const std::int64_t tokens = state[kOwnTokens];
  const auto items = static_cast<int>(state[kItems]);
  Rows rows;
  if (task.sends) rows.load(task);
  if (start.failed != 0) return;
  // No rank combines a round that was given up, so it uses up no epoch.
  const bool sends = task.sends && !aborted;
  const std::uint32_t epoch = task.sends ? start.epoch + 1 : of_round;
  // Before any wait: peers may wait for what it tells. Its warp has the fewest rows.
  tend_board(common, *task.state, {protocol::kCombinePhase, epoch, sends, task.receives && !aborted});
  if (sends) {
    if (is_warden() && threadIdx.x == 0) state[kCombineEpoch] = epoch;
    // With rows in lines each warp sees for itself that its origin has room.
    if ((task.weights != nullptr || !Rows::kInLines) && !wait_for_room(task, epoch)) return;
    if (task.weights != nullptr) push_weights(task, epoch, tokens);
    rows.reduce_all(task, epoch, items);
  }
  let_next_kernel_start();
  if (task.receives && !aborted) rows.sum_all(task, epoch, tokens);
  __syncthreads();
  if (sends) advance_block(common, protocol::kCombinePhase, epoch);
  if (aborted && task.receives) end_given_up(common, state);
}

using CombineByExpert = void (*)(ExpertCombineTask);

enum class RowsKind { kStamped, kInLines, kUniformInLines };

RowsKind kind_of(const ExpertCombineTask& task) {
  if (!task.extra.in_lines()) return RowsKind::kStamped;
  const auto is_plain = [&](Dtype dtype) { return dtype == task.wire_dtype; };
  const bool from = !task.sends || (is_plain(task.from_dtype) && task.from_vectors);
  const bool to = !task.receives || (is_plain(task.output_dtype) && task.output_vectors);
  const bool packs = task.hidden * size_of(task.wire_dtype) % 16 == 0;
  return from && to && packs ? RowsKind::kUniformInLines : RowsKind::kInLines;
}

template <class Format>
CombineByExpert kernel_of(RowsKind kind) {
  if (kind == RowsKind::kStamped) return expert_combine<StampedRows<PlainWire<Format>>>;
  return kind == RowsKind::kInLines ? expert_combine<RowsInLines<Format, false>>
                                    : expert_combine<RowsInLines<Format, true>>;
}

CombineByExpert kernel_for(Dtype wire, RowsKind kind) {
  if (wire == Dtype::kBf16) return kernel_of<protocol::Bf16>(kind);
  if (wire == Dtype::kF16) return kernel_of<protocol::F16>(kind);
  return kernel_of<protocol::F32>(kind);
}

// Logarithms are stamped: their blocks do not fit lines.
CombineByExpert logarithmic_kernel() {
  return expert_combine<StampedRows<LogWire>>;
}

}  // namespace

void load_expert_combine() {
  cudaFuncAttributes attributes{};
  for (const Dtype wire : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const RowsKind kind : {RowsKind::kStamped, RowsKind::kInLines, RowsKind::kUniformInLines})
      check(cudaFuncGetAttributes(&attributes, kernel_for(wire, kind)), "loading a kernel of combine");
  }
  check(cudaFuncGetAttributes(&attributes, logarithmic_kernel()), "loading a kernel of combine");
}

void launch_expert_combine(const ExpertCombineTask& task, bool logarithmic, int blocks, cudaStream_t stream) {
  const CombineByExpert kernel = logarithmic ? logarithmic_kernel() : kernel_for(task.wire_dtype, kind_of(task));
  launch_overlapping(kernel, {.blocks = blocks, .overlaps = task.overlaps}, stream, task);
}

}  // namespace tokenyard::engine::cuda
