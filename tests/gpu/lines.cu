// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "engine/cuda/small_lines.cuh"
#include "fabric/cuda/driver.h"
#include "gpu/lines.h"

namespace tokenyard::gpu_tests {
namespace {

using engine::cuda::Parts;
using engine::cuda::Slice;
using fabric::cuda::require;

// Two generations may be on their way at once.
std::int64_t bytes_of_generation(const LineTraffic& traffic) {
  return std::int64_t{traffic.blocks} * traffic.threads * engine::cuda::kLinesAtOnce * 16;
}

__device__ std::uint64_t word_of(unsigned generation, int k, int half) {
  const std::uint64_t seed = (std::uint64_t{generation} << 32) + blockIdx.x * 4096U + threadIdx.x * 4U + k * 2 + half;
  return seed * 0x9E3779B97F4A7C15U;
}

__device__ Parts parts_of(unsigned generation) {
  Parts parts{};
  for (int k = 0; k < engine::cuda::kLinesAtOnce; ++k)
    parts.pairs[k] = {word_of(generation, k, 0), word_of(generation, k, 1)};
  return parts;
}

// Lines of this thread whose flag is new and whose words here are not.
__device__ int torn_in(const Parts& seen, const Parts& right, std::uint64_t flag) {
  int torn = 0;
  for (int k = 0; k < engine::cuda::kLinesAtOnce; ++k) {
    const bool new_flag = engine::cuda::holds_flag() && seen.pairs[k].second == flag;
    const unsigned flags = __ballot_sync(engine::cuda::kAllLanes, static_cast<int>(new_flag));
    const unsigned holder =
        threadIdx.x % engine::cuda::kWarp / engine::cuda::kLineThreads * engine::cuda::kLineThreads +
        engine::cuda::kLineThreads - 1;
    const bool same = seen.pairs[k].first == right.pairs[k].first &&
                      (engine::cuda::holds_flag() || seen.pairs[k].second == right.pairs[k].second);
    if ((flags >> holder & 1U) != 0 && !same) ++torn;
  }
  return torn;
}

__global__ void exchange(LineTraffic traffic, std::int64_t generation_bytes, unsigned long long* counts) {
  constexpr int kPolls = 1 << 22;
  const unsigned lines = blockDim.x / engine::cuda::kLineThreads;
  const unsigned num_lines = lines * engine::cuda::kLinesAtOnce;
  const Slice slice{threadIdx.x / engine::cuda::kLineThreads, lines, false};
  unsigned long long torn = 0;
  for (unsigned generation = 1; generation <= static_cast<unsigned>(traffic.generations); ++generation) {
    const std::int64_t at =
        generation % 2 * generation_bytes + std::int64_t{blockIdx.x} * num_lines * engine::cuda::kDataLineBytes;
    const Parts right = parts_of(generation);
    const std::uint64_t flag = engine::cuda::flag_of(generation, 7);
    engine::cuda::store_lines(traffic.theirs + at, right, slice, num_lines, flag);
    bool there = false;
    for (int poll = 0; poll < kPolls && !there; ++poll) {
      const Parts seen = engine::cuda::load_lines(traffic.mine + at, slice, num_lines);
      torn += torn_in(seen, right, flag);
      const bool all = engine::cuda::are_there(seen, slice, num_lines, flag);
      there = __all_sync(engine::cuda::kAllLanes, static_cast<int>(all)) != 0;
    }
    if (!there) {
      atomicAdd(counts + 1, 1ULL);
      break;
    }
  }
  atomicAdd(counts, torn);
}

}  // namespace

std::int64_t bytes_of(const LineTraffic& traffic) {
  return 2 * bytes_of_generation(traffic);
}

LinesSeen exchange_lines(const LineTraffic& traffic) {
  unsigned long long* counts = nullptr;
  require(cudaMallocManaged(&counts, 2 * sizeof(*counts)), "cudaMallocManaged");
  counts[0] = counts[1] = 0;
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  exchange<<<traffic.blocks, traffic.threads, 0, stream>>>(traffic, bytes_of_generation(traffic), counts);
  require(cudaGetLastError(), "launching an exchange of lines");
  require(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const LinesSeen seen{.torn = static_cast<std::int64_t>(counts[0]), .awaited = static_cast<std::int64_t>(counts[1])};
  require(cudaStreamDestroy(stream), "cudaStreamDestroy");
  require(cudaFree(counts), "cudaFree");
  return seen;
}

}  // namespace tokenyard::gpu_tests
