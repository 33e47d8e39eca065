// SPDX-License-Identifier: Apache-2.0
// Kernels of one block: what a rank tells its peers of an expert-major round when it gives an operation up, or will not
// receive one that it sent.
#include "engine/cuda/expert_combine.cuh"
#include "engine/cuda/expert_kernels.h"
#include "engine/cuda/expert_state.cuh"

namespace tokenyard::engine::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) abort_expert_dispatch(const __grid_constant__ ExpertNotice notice) {
  const Common& common = notice.common;
  const Start start = read_start(common, protocol::kDispatchPhase);
  if (__syncthreads_or(static_cast<int>(start.failed)) != 0) return;
  const std::uint32_t epoch = start.epoch + 1;
  begin_operation(common, *notice.state, {protocol::kDispatchPhase, epoch, true, true});
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    if (!wait_for_space_at(common, epoch, peer)) continue;
    std::byte* header = window_of(common, peer) + notice.extra.header(epoch, common.rank);
    for (int unit = 0; unit < kExpertHeaderUnits; ++unit) {
      const auto status = static_cast<std::uint32_t>(protocol::HeaderStatus::kAborted);
      store_tagged(header + unit * kTaggedBytes, {{0, unit == 2 ? status : 0}}, tag_of(epoch));
    }
  }
}

__global__ void __launch_bounds__(kThreads) abort_expert_combine(const __grid_constant__ ExpertNotice notice) {
  const Common& common = notice.common;
  std::uint32_t* state = notice.route.state;
  const Start start = read_start(common, protocol::kCombinePhase);
  const bool aborted = state[kGivenUp] != 0;
  if (__syncthreads_or(static_cast<int>(start.failed)) != 0) return;
  const std::uint32_t epoch = start.epoch + 1;
  begin_operation(common, *notice.state, {protocol::kCombinePhase, epoch, !aborted, !aborted});
  if (threadIdx.x == 0) state[kGivenUp] = 0;
  if (aborted) return;
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    const bool owes = notice.route.rows_received[peer] > 0;
    const bool gives = notice.route.rows_sent[peer] > 0;
    if ((!owes && !gives) || !wait_for_combine_space(common, epoch, peer, owes, gives)) continue;
    protocol::HeaderLine* header = header_of(common, peer, protocol::kCombinePhase, epoch, common.rank);
    header->status = protocol::HeaderStatus::kAborted;
    store_release_system(&header->stamp, protocol::encode_stamp(epoch, 0));
  }
}

__global__ void __launch_bounds__(kThreads)
    forget_expert_operation(const __grid_constant__ ExpertNotice notice, int phase) {
  const Start start = read_start(notice.common, phase);
  std::uint32_t* state = notice.route.state;
  // The combine of a round that was given up was not sent.
  const bool combine = phase == protocol::kCombinePhase;
  const bool sent = !combine || state[kGivenUp] == 0;
  const std::uint32_t epoch = state[combine ? kCombineEpoch : kDispatchEpoch];
  if (__syncthreads_or(static_cast<int>(start.failed)) != 0) return;
  begin_operation(notice.common, *notice.state, {phase, epoch, false, sent});
}

}  // namespace

void load_expert_notices() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, abort_expert_dispatch), "loading a kernel");
  check(cudaFuncGetAttributes(&attributes, abort_expert_combine), "loading a kernel");
  check(cudaFuncGetAttributes(&attributes, forget_expert_operation), "loading a kernel");
}

void launch_expert_abort_dispatch(const ExpertNotice& notice, cudaStream_t stream) {
  abort_expert_dispatch<<<1, kThreads, 0, stream>>>(notice);
  check(cudaGetLastError(), "launching the end of a dispatch");
}

void launch_expert_abort_combine(const ExpertNotice& notice, cudaStream_t stream) {
  abort_expert_combine<<<1, kThreads, 0, stream>>>(notice);
  check(cudaGetLastError(), "launching the end of a combine");
}

void launch_expert_forget(const ExpertNotice& notice, int phase, cudaStream_t stream) {
  forget_expert_operation<<<1, kThreads, 0, stream>>>(notice, phase);
  check(cudaGetLastError(), "launching the end of a half");
}

}  // namespace tokenyard::engine::cuda
