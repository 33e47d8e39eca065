// SPDX-License-Identifier: Apache-2.0
// Dispatch by expert, in one launch or one for each half: rows cross once for each rank, cast on the way when asked to,
// and are then copied to their experts. A kernel for each way that rows are loaded.
#include <algorithm>
#include <string>

#include "engine/cuda/expert_kernels.h"
#include "engine/cuda/expert_receive.cuh"
#include "engine/cuda/expert_rows.cuh"
#include "engine/cuda/expert_send.cuh"
#include "engine/cuda/expert_state.cuh"
#include "engine/cuda/overlap.cuh"

namespace tokenyard::engine::cuda {
namespace {

__device__ SentTable sent_table(const ExpertDispatchTask& task, std::int32_t* table) {
  const int experts = task.experts.num_experts;
  return {.rows = table, .routes = table + experts, .per_rank = table + 2 * experts};
}

__device__ ReceivedTable received_table(const ExpertDispatchTask& task, std::int32_t* table) {
  const int ranks = task.common.num_ranks;
  return {.base = table + 2 * ranks,
          .tokens_of = table,
          .row_base = table + ranks,
          .routes = table + 2 * ranks + ranks * task.experts.num_local};
}

template <class Row>
__global__ void __launch_bounds__(kThreads, 1)
    expert_dispatch(const __grid_constant__ ExpertDispatchTask task, int table_bytes) {
  extern __shared__ __align__(16) std::byte memory[];  // NOLINT(modernize-avoid-c-arrays): device code
  auto* table = reinterpret_cast<std::int32_t*>(memory);
  std::byte* lines = memory + table_bytes;
  const Common& common = task.common;
  std::uint32_t* state = task.route.state;
  const SentTable sent = sent_table(task, table);
  fetch_parameters(task);
  if (task.sends) clear_table(task, sent);
  wait_for_kernels_before();
  const Start start = read_start(common, protocol::kDispatchPhase);
  const std::uint32_t of_round = task.sends ? 0 : state[kDispatchEpoch];
  Sender<Row> sender(task, sent, lines);
  if (task.sends) sender.begin();
  const std::uint32_t epoch = task.sends ? start.epoch + 1 : of_round;
  // Before any wait: what this rank has read since may be what it waits for itself, as its peers do.
  const bool closes = task.receives && task.values_to.data != nullptr;
  if (start.failed == 0) tend_board(common, *task.state, {protocol::kDispatchPhase, epoch, task.sends, closes});
  const bool goes_on = start.failed == 0 && (!task.sends || wait_for_space(common, epoch));
  if (__syncthreads_and(static_cast<int>(goes_on)) == 0) return;
  if (task.sends) advance_block(common, protocol::kDispatchPhase, epoch);
  if (task.sends && is_warden() && threadIdx.x == 0) {
    state[kDispatchEpoch] = epoch;
    state[kCombineGivenUp] = 0;
  }
  if (task.sends) sender.send(epoch);
  let_next_kernel_start();
  if (!task.receives) return;
  __syncthreads();
  receive_all(task, epoch, received_table(task, table), reinterpret_cast<Piece*>(lines));
}

using DispatchKernel = void (*)(ExpertDispatchTask, int);

DispatchKernel kernel_for(DispatchCast cast, Dtype rows) {
  if (cast == DispatchCast::kNone) return expert_dispatch<PlainRow>;
  if (rows == Dtype::kBf16) return expert_dispatch<CastRow<protocol::Bf16>>;
  if (rows == Dtype::kF16) return expert_dispatch<CastRow<protocol::F16>>;
  return expert_dispatch<CastRow<protocol::F32>>;
}

// Senders: rows and routes of each expert, rows for each rank. Receivers: for each source its tokens, its first row,
// and rows of each local expert; then routes of these.
std::int64_t table_bytes_of(int num_experts, int num_ranks) {
  const std::int64_t local = protocol::ceil_div(num_experts, num_ranks);
  const std::int64_t sent = 2 * std::int64_t{num_experts} + num_ranks;
  const std::int64_t received = num_ranks * (2 + local) + local;
  return protocol::align_up(std::max(sent, received) * 4, 16);
}

}  // namespace

// Behind the tables: a row of a sender, or the pieces that a receiver's warps are at.
std::int64_t expert_shared_bytes(const ExpertLayout& extra, const Experts& experts, int num_ranks, std::int64_t row) {
  const std::int64_t lines = extra.in_lines() ? std::max<std::int64_t>(row, kWarps * sizeof(Piece)) : 0;
  return table_bytes_of(experts.num_experts, num_ranks) + lines;
}

void load_expert_dispatch(std::int64_t shared_bytes) {
  int device = 0;
  int most = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  for (const DispatchCast cast : {DispatchCast::kNone, DispatchCast::kFp8Block128}) {
    for (const Dtype rows : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      const DispatchKernel kernel = kernel_for(cast, rows);
      cudaFuncAttributes attributes{};
      check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel of dispatch");
      const std::int64_t room = most - static_cast<std::int64_t>(attributes.sharedSizeBytes);
      if (shared_bytes > room) {
        throw Error(ErrorCode::kUnsupported, "so many experts and ranks take " + std::to_string(shared_bytes) +
                                                 " bytes of a block's shared memory, and this device has " +
                                                 std::to_string(room));
      }
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
            "loading a kernel of dispatch");
    }
  }
}

void launch_expert_dispatch(const ExpertDispatchTask& task,
                            std::int64_t shared_bytes,
                            int blocks,
                            cudaStream_t stream) {
  const auto table_bytes = static_cast<int>(table_bytes_of(task.experts.num_experts, task.common.num_ranks));
  const Launch launch{
      .blocks = blocks, .shared_bytes = static_cast<std::size_t>(shared_bytes), .overlaps = task.overlaps};
  launch_overlapping(kernel_for(task.cast, task.rows_dtype), launch, stream, task, table_bytes);
}

}  // namespace tokenyard::engine::cuda
