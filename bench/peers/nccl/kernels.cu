// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include "checked.h"
#include "kernels.h"
#include "protocol/owner.h"

namespace tokenyard::bench {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kRowThreads = 512;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = ~0U;
constexpr int kPerChunk = 8;  // bf16 values of 16 bytes
constexpr int kInFlight = 4;  // loads of a thread before it stores

struct PackTarget {
  int4* row;
  std::int32_t* ids;
  float* weights;
};

// Where the row of a slot stands: in the block of a rank, or, for own rows, behind what ranks before this one sent.
__device__ std::int64_t row_of(const KernelShape& shape, const Buffers& buffers, int rank, int slot) {
  if (rank != shape.rank) return static_cast<std::int64_t>(rank) * shape.num_tokens + slot;
  std::int64_t row = slot;
  for (int source = 0; source < rank; ++source)
    row += buffers.receive_counts[source];
  return row;
}

// One block per destination: the place of each token's row among the rows that go there.
__global__ void __launch_bounds__(kPlanThreads) plan_rows(KernelShape shape, Buffers buffers) {
  __shared__ int in_warp[kPlanThreads / kWarp];
  const int owner = static_cast<int>(blockIdx.x);
  const int first = protocol::first_local_expert(shape.num_experts, shape.num_ranks, owner);
  const auto experts = static_cast<unsigned>(protocol::num_local_experts(shape.num_experts, shape.num_ranks, owner));
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int before = 0;
  for (int base = 0; base < shape.num_tokens; base += kPlanThreads) {
    const int token = base + static_cast<int>(threadIdx.x);
    bool goes = false;
    if (token < shape.num_tokens) {
      const std::int32_t* ids = buffers.ids + static_cast<std::int64_t>(token) * shape.top_k;
#pragma unroll 8
      for (int slot = 0; slot < shape.top_k; ++slot)
        goes |= static_cast<unsigned>(ids[slot] - first) < experts;
    }
    const unsigned going = __ballot_sync(kAllLanes, goes);
    if (lane == 0) in_warp[warp] = __popc(going);
    __syncthreads();
    int place = before + __popc(going & ((1U << lane) - 1));
    for (int each = 0; each < kPlanThreads / kWarp; ++each) {
      place += each < warp ? in_warp[each] : 0;
      before += in_warp[each];
    }
    if (token < shape.num_tokens)
      buffers.slots[static_cast<std::int64_t>(token) * shape.num_ranks + owner] = goes ? place : -1;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  buffers.send_counts[owner] = before;
  if (owner == shape.rank) buffers.receive_counts[owner] = before;
}

// One block per token, which is read once however many ranks get it.
__global__ void __launch_bounds__(kRowThreads) pack_rows(KernelShape shape, Buffers buffers) {
  __shared__ PackTarget targets[kMaxRanks];
  __shared__ int num_targets;
  const auto token = static_cast<std::int64_t>(blockIdx.x);
  const int chunks = shape.hidden_size / kPerChunk;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kWarp) {
    const int slot = thread < shape.num_ranks ? buffers.slots[token * shape.num_ranks + thread] : -1;
    const unsigned chosen = __ballot_sync(kAllLanes, slot >= 0);
    const bool own = thread == shape.rank;
    if (slot >= 0) {
      const std::int64_t row = row_of(shape, buffers, thread, slot);
      targets[__popc(chosen & ((1U << thread) - 1))] = {
          reinterpret_cast<int4*>(own ? buffers.received : buffers.packed) + row * chunks,
          (own ? buffers.received_ids : buffers.packed_ids) + row * shape.top_k,
          (own ? buffers.received_weights : buffers.packed_weights) + row * shape.top_k};
    }
    if (thread == 0) num_targets = __popc(chosen);
  }
  __syncthreads();
  const int4* source = reinterpret_cast<const int4*>(buffers.tokens) + token * chunks;
  const int step = static_cast<int>(blockDim.x);
  for (int base = thread; base < chunks; base += step * kInFlight) {
    int4 values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (base + i * step < chunks) values[i] = source[base + i * step];
    for (int target = 0; target < num_targets; ++target) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (base + i * step < chunks) targets[target].row[base + i * step] = values[i];
    }
  }
  for (int slot = thread; slot < shape.top_k; slot += step) {
    const std::int32_t id = buffers.ids[token * shape.top_k + slot];
    const float weight = buffers.weights[token * shape.top_k + slot];
    for (int target = 0; target < num_targets; ++target) {
      targets[target].ids[slot] = id;
      targets[target].weights[slot] = weight;
    }
  }
}

__device__ void add_chunk(float* sums, const int4& chunk) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&chunk);
#pragma unroll
  for (int i = 0; i < kPerChunk / 2; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    sums[2 * i] += pair.x;
    sums[2 * i + 1] += pair.y;
  }
}

__device__ int4 to_chunk(const float* values) {
  int4 chunk;
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&chunk);
#pragma unroll
  for (int i = 0; i < kPerChunk / 2; ++i)
    pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  return chunk;
}

// One block per received row.
__global__ void __launch_bounds__(kRowThreads) play_experts(KernelShape shape, Buffers buffers, bool all) {
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  std::int64_t rows = static_cast<std::int64_t>(shape.num_ranks) * shape.num_tokens;
  if (!all) {
    rows = 0;
    for (int rank = 0; rank < shape.num_ranks; ++rank)
      rows += buffers.receive_counts[rank];
  }
  if (row >= rows) return;
  float factor = 0;
  for (int slot = 0; slot < shape.top_k; ++slot) {
    const std::int32_t id = buffers.received_ids[row * shape.top_k + slot];
    if (id < 0 || id >= shape.num_experts) continue;
    if (protocol::owner_of(shape.num_experts, shape.num_ranks, id) != shape.rank) continue;
    factor += buffers.received_weights[row * shape.top_k + slot] * buffers.expert_factors[id];
  }
  const int chunks = shape.hidden_size / kPerChunk;
  const int4* source = reinterpret_cast<const int4*>(buffers.received) + row * chunks;
  int4* target = reinterpret_cast<int4*>(buffers.expert_output) + row * chunks;
  for (int chunk = static_cast<int>(threadIdx.x); chunk < chunks; chunk += static_cast<int>(blockDim.x)) {
    float values[kPerChunk] = {};
    add_chunk(values, source[chunk]);
#pragma unroll
    for (float& value : values)
      value *= factor;
    target[chunk] = to_chunk(values);
  }
}

// One block per token.
__global__ void __launch_bounds__(kRowThreads) sum_rows(KernelShape shape, Buffers buffers) {
  __shared__ const int4* sources[kMaxRanks];
  __shared__ int num_sources;
  const auto token = static_cast<std::int64_t>(blockIdx.x);
  const int chunks = shape.hidden_size / kPerChunk;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kWarp) {
    const int slot = thread < shape.num_ranks ? buffers.slots[token * shape.num_ranks + thread] : -1;
    const unsigned chosen = __ballot_sync(kAllLanes, slot >= 0);
    const bool own = thread == shape.rank;
    if (slot >= 0) {
      const std::int64_t row = row_of(shape, buffers, thread, slot);
      sources[__popc(chosen & ((1U << thread) - 1))] =
          reinterpret_cast<const int4*>(own ? buffers.expert_output : buffers.returned) + row * chunks;
    }
    if (thread == 0) num_sources = __popc(chosen);
  }
  __syncthreads();
  int4* target = reinterpret_cast<int4*>(buffers.output) + token * chunks;
  for (int chunk = thread; chunk < chunks; chunk += static_cast<int>(blockDim.x)) {
    float sums[kPerChunk] = {};
#pragma unroll 4
    for (int source = 0; source < num_sources; ++source)
      add_chunk(sums, sources[source][chunk]);
    target[chunk] = to_chunk(sums);
  }
}

template <typename... Parameters, typename... Arguments>
void launch(
    const char* name, void (*kernel)(Parameters...), dim3 blocks, cudaLaunchConfig_t config, Arguments... arguments) {
  config.gridDim = blocks;
  check(name, cudaLaunchKernelEx(&config, kernel, arguments...));
}

constexpr int divide_up(int value, int by) {
  return (value + by - 1) / by;
}

// Whole warps, as busy in the last pass over a row as in the first.
cudaLaunchConfig_t row_threads(const KernelShape& shape, cudaStream_t stream) {
  const int warps = divide_up(shape.hidden_size / kPerChunk, kWarp);
  const int passes = divide_up(warps, kRowThreads / kWarp);
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(static_cast<unsigned>(divide_up(warps, passes) * kWarp));
  config.stream = stream;
  return config;
}

}  // namespace

void launch_plan(const KernelShape& shape, const Buffers& buffers, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kPlanThreads);
  config.stream = stream;
  launch("launch of plan_rows", plan_rows, dim3(static_cast<unsigned>(shape.num_ranks)), config, shape, buffers);
}

void launch_pack(const KernelShape& shape, const Buffers& buffers, cudaStream_t stream) {
  launch("launch of pack_rows", pack_rows, dim3(static_cast<unsigned>(shape.num_tokens)), row_threads(shape, stream),
         shape, buffers);
}

void launch_experts(const KernelShape& shape, const Buffers& buffers, bool all, cudaStream_t stream) {
  launch("launch of play_experts", play_experts, dim3(static_cast<unsigned>(shape.num_ranks * shape.num_tokens)),
         row_threads(shape, stream), shape, buffers, all);
}

void launch_unpack(const KernelShape& shape, const Buffers& buffers, cudaStream_t stream) {
  launch("launch of sum_rows", sum_rows, dim3(static_cast<unsigned>(shape.num_tokens)), row_threads(shape, stream),
         shape, buffers);
}

}  // namespace tokenyard::bench
