// SPDX-License-Identifier: Apache-2.0
// Combine by expert, in one launch or one for each half: each rank weighs and sums its experts' rows of a token and
// stores the one row to the origin's window; the origin sums the rows of its tokens in the order of ranks.
#include <algorithm>

#include "engine/cuda/copies.cuh"
#include "engine/cuda/expert_combine.cuh"
#include "engine/cuda/expert_kernels.h"
#include "engine/cuda/expert_state.cuh"
#include "engine/cuda/expert_sums.cuh"

namespace tokenyard::engine::cuda {
namespace {

constexpr int kMostRowsAtOnce = 2;  // of a block

template <class Wire>
__device__ void reduce(const ExpertCombineTask& task, const OwedRow& row, Crew crew) {
  switch (task.from_dtype) {
    case Dtype::kBf16:
      return Wire::template reduce<protocol::Bf16>(row.to, row.from, task.hidden, task.from_vectors, crew);
    case Dtype::kF16:
      return Wire::template reduce<protocol::F16>(row.to, row.from, task.hidden, task.from_vectors, crew);
    default:
      return Wire::template reduce<protocol::F32>(row.to, row.from, task.hidden, task.from_vectors, crew);
  }
}

__device__ bool wait_for_room(const ExpertCombineTask& task, std::uint32_t epoch) {
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
        const std::uint32_t* record = task.route.items + static_cast<std::int64_t>(item) * task.route.item_words;
        prepare_owed_row(task, epoch, record, given[crew], row);
      } else if (lane_index() == 0) {
        row.stamp = nullptr;
      }
    }
    __syncthreads();
    if (row.stamp != nullptr) reduce<Wire>(task, row, {thread % crew_size, crew_size});
    __syncthreads();
    if (thread < at_once && owed[thread].stamp != nullptr)
      store_release_system(owed[thread].stamp, protocol::encode_stamp(epoch, 1));
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

template <class Wire>
__global__ void __launch_bounds__(kThreads, 1) expert_combine(const __grid_constant__ ExpertCombineTask task) {
  const Common& common = task.common;
  std::uint32_t* state = task.route.state;
  const ExpertStart start = read_expert_start(common);
  const bool aborted = load_relaxed_device(state + kGivenUp) != 0;
  const std::uint32_t of_round = task.sends ? 0 : state[kCombineEpoch];
  if (__syncthreads_or(static_cast<int>(start.failed)) != 0) return;
  // No rank combines a round that was given up, so it uses up no epoch.
  const bool sends = task.sends && !aborted;
  const std::uint32_t epoch = task.sends ? start.epochs[protocol::kCombinePhase] + 1 : of_round;
  const ExpertStep step{protocol::kCombinePhase, epoch, sends, task.receives && !aborted};
  begin_operation(common, *task.state, start, step, [&] {
    if (sends) state[kCombineEpoch] = epoch;
    if (aborted && task.receives) state[kGivenUp] = 0;
  });
  if (aborted) return;
  const std::int64_t tokens = state[kOwnTokens];
  if (sends) {
    if (!wait_for_room(task, epoch)) return;
    if (task.weights != nullptr) push_weights(task, epoch, tokens);
    reduce_rows<Wire>(task, epoch, static_cast<int>(state[kItems]));
  }
  if (task.receives) sum_tokens<Wire>(task, epoch, tokens);
}

using CombineByExpert = void (*)(ExpertCombineTask);

CombineByExpert kernel_for(Dtype wire, bool logarithmic) {
  if (logarithmic) return expert_combine<LogWire>;
  if (wire == Dtype::kBf16) return expert_combine<PlainWire<protocol::Bf16>>;
  if (wire == Dtype::kF16) return expert_combine<PlainWire<protocol::F16>>;
  return expert_combine<PlainWire<protocol::F32>>;
}

}  // namespace

void load_expert_combine() {
  cudaFuncAttributes attributes{};
  for (const Dtype wire : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    check(cudaFuncGetAttributes(&attributes, kernel_for(wire, false)), "loading a kernel of combine");
  }
  check(cudaFuncGetAttributes(&attributes, kernel_for(Dtype::kF32, true)), "loading a kernel of combine");
}

void launch_expert_combine(
    const ExpertCombineTask& task, Dtype wire, bool logarithmic, int blocks, cudaStream_t stream) {
  kernel_for(wire, logarithmic)<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a combine");
}

}  // namespace tokenyard::engine::cuda
