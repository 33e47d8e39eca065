// SPDX-License-Identifier: Apache-2.0
#include "cli/cuda/limit_kernels.h"
#include "engine/cuda/verbs.cuh"
#include "fabric/cuda/driver.h"

namespace tokenyard::cli {
namespace {

using engine::cuda::load_acquire_system;
using engine::cuda::nanoseconds;
using engine::cuda::store_release_system;
using fabric::cuda::require;

constexpr int kThreads = 1024;
constexpr int kLoadsAtOnce = 8;  // by a thread, each of 16 bytes
constexpr int kTileBytes = 16 * 1024;
constexpr int kTiles = 4;
constexpr std::uint64_t kDeadline = 5'000'000'000;  // nanoseconds

static_assert(kLimitStep % (kThreads * kLoadsAtOnce * sizeof(uint4)) == 0 && kLimitStep % kTileBytes == 0);

__device__ uint4 some_value() {
  return {blockIdx.x, threadIdx.x, blockIdx.x ^ threadIdx.x, 0x5EED5EEDU};
}

__global__ void __launch_bounds__(kThreads) store_all(uint4* to, std::int64_t count) {
  const uint4 value = some_value();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step)
    to[i] = value;
}

// Calls `each(at)` with where a thread's next kLoadsAtOnce values begin; they lie kThreads apart.
template <class Each>
__device__ void for_each_part(std::int64_t count, const Each& each) {
  constexpr std::int64_t kPart = std::int64_t{kThreads} * kLoadsAtOnce;
  for (std::int64_t first = blockIdx.x * kPart; first < count; first += gridDim.x * kPart)
    each(first + threadIdx.x);
}

__device__ void load_part(uint4 (&values)[kLoadsAtOnce], const uint4* from) {
#pragma unroll
  for (int i = 0; i < kLoadsAtOnce; ++i)
    values[i] = from[i * kThreads];
}

__global__ void __launch_bounds__(kThreads) load_all(const uint4* from, std::int64_t count, std::uint32_t* sink) {
  std::uint32_t sum = 0;
  for_each_part(count, [&](std::int64_t at) {
    uint4 values[kLoadsAtOnce];
    load_part(values, from + at);
#pragma unroll
    for (const uint4& value : values)
      sum += value.x ^ value.y ^ value.z ^ value.w;
  });
  if (sum == 0xFFFFFFFFU) *sink = sum;
}

__global__ void __launch_bounds__(kThreads) copy_all(uint4* to, const uint4* from, std::int64_t count) {
  for_each_part(count, [&](std::int64_t at) {
    uint4 values[kLoadsAtOnce];
    load_part(values, from + at);
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i)
      to[at + i * kThreads] = values[i];
  });
}

__global__ void __launch_bounds__(kThreads) bulk_store_all(std::byte* to, std::int64_t bytes) {
  extern __shared__ __align__(128) std::byte tiles[];
  for (int i = static_cast<int>(threadIdx.x); i < kTiles * kTileBytes / static_cast<int>(sizeof(uint4)); i += kThreads)
    reinterpret_cast<uint4*>(tiles)[i] = some_value();
  // Bulk copies read shared memory by another path than the stores above.
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
  __syncthreads();
  if (threadIdx.x != 0) return;
  int tile = 0;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kTileBytes; at < bytes;
       at += static_cast<std::int64_t>(gridDim.x) * kTileBytes) {
    const auto from = static_cast<std::uint32_t>(__cvta_generic_to_shared(tiles + tile * kTileBytes));
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(to + at)), "r"(from), "n"(kTileBytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kTiles - 1) : "memory");
    tile = (tile + 1) % kTiles;
  }
  asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
}

__global__ void nothing() {}

// False at the deadline.
__device__ bool wait_for(const PairWords& words, std::uint64_t value) {
  constexpr int kPollsPerClock = 64;
  const std::uint64_t start = nanoseconds();
  while (true) {
    for (int i = 0; i < kPollsPerClock; ++i) {
      if (load_acquire_system(words.own) >= value) return true;
    }
    if (nanoseconds() - start < kDeadline) continue;
    *words.failed = 1;
    return false;
  }
}

// Epochs go on from launch to launch, so that no word is ever set back.
__global__ void ping_pong(PairWords words, int turns, bool first) {
  if (*words.failed != 0) return;
  const std::uint64_t before = *words.epoch;
  for (std::uint64_t turn = before + 1; turn <= before + turns; ++turn) {
    if (first) store_release_system(words.peer, turn);
    if (!wait_for(words, turn)) return;
    if (!first) store_release_system(words.peer, turn);
  }
  *words.epoch = before + turns;
}

__global__ void pair_barrier(PairWords words) {
  if (*words.failed != 0) return;
  const std::uint64_t epoch = *words.epoch + 1;
  store_release_system(words.peer, epoch);
  if (wait_for(words, epoch)) *words.epoch = epoch;
}

std::int64_t count_of(std::int64_t bytes) {
  return bytes / static_cast<std::int64_t>(sizeof(uint4));
}

template <class Kernel>
void load(Kernel* kernel) {
  cudaFuncAttributes attributes{};
  require(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "cudaFuncGetAttributes");
}

}  // namespace

void load_limit_kernels() {
  load(store_all);
  load(load_all);
  load(copy_all);
  load(bulk_store_all);
  load(nothing);
  load(ping_pong);
  load(pair_barrier);
  require(cudaFuncSetAttribute(bulk_store_all, cudaFuncAttributeMaxDynamicSharedMemorySize, kTiles * kTileBytes),
          "cudaFuncSetAttribute");
}

void launch_stores(std::byte* to, std::int64_t bytes, int blocks, cudaStream_t stream) {
  store_all<<<blocks, kThreads, 0, stream>>>(reinterpret_cast<uint4*>(to), count_of(bytes));
  require(cudaGetLastError(), "the launch of stores");
}

void launch_bulk_stores(std::byte* to, std::int64_t bytes, int blocks, cudaStream_t stream) {
  bulk_store_all<<<blocks, kThreads, kTiles * kTileBytes, stream>>>(to, bytes);
  require(cudaGetLastError(), "the launch of bulk stores");
}

void launch_loads(const std::byte* from, std::int64_t bytes, int blocks, std::uint32_t* sink, cudaStream_t stream) {
  load_all<<<blocks, kThreads, 0, stream>>>(reinterpret_cast<const uint4*>(from), count_of(bytes), sink);
  require(cudaGetLastError(), "the launch of loads");
}

void launch_copy(std::byte* to, const std::byte* from, std::int64_t bytes, int blocks, cudaStream_t stream) {
  copy_all<<<blocks, kThreads, 0, stream>>>(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from),
                                            count_of(bytes));
  require(cudaGetLastError(), "the launch of a copy");
}

void launch_nothing(cudaStream_t stream) {
  nothing<<<1, 1, 0, stream>>>();
  require(cudaGetLastError(), "the launch of an empty kernel");
}

void launch_ping_pong(const PairWords& words, int turns, bool first, cudaStream_t stream) {
  ping_pong<<<1, 1, 0, stream>>>(words, turns, first);
  require(cudaGetLastError(), "the launch of a ping-pong");
}

void launch_pair_barrier(const PairWords& words, cudaStream_t stream) {
  pair_barrier<<<1, 1, 0, stream>>>(words);
  require(cudaGetLastError(), "the launch of a barrier");
}

}  // namespace tokenyard::cli
