// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include "gpu/compare.h"

namespace tokenyard::gpu_tests {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 8;

__global__ void compare(const std::byte* one, const std::byte* other, std::int64_t bytes, unsigned long long* count) {
  unsigned long long differences = 0;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < bytes; i += kThreads * gridDim.x)
    differences += one[i] != other[i] ? 1 : 0;
  if (differences != 0) atomicAdd(count, differences);
}

void require(cudaError_t outcome) {
  if (outcome != cudaSuccess) throw std::runtime_error(cudaGetErrorString(outcome));
}

}  // namespace

void count_differences(
    const std::byte* one, const std::byte* other, std::int64_t bytes, unsigned long long* count, cudaStream_t stream) {
  compare<<<kBlocks, kThreads, 0, stream>>>(one, other, bytes, count);
  require(cudaGetLastError());
}

void load_comparison() {
  cudaFuncAttributes attributes{};
  require(cudaFuncGetAttributes(&attributes, compare));
}

}  // namespace tokenyard::gpu_tests
