// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/driver.h"
#include "gpu/pattern.h"

namespace tokenyard::gpu_tests {
namespace {

using fabric::cuda::require;

constexpr int kBlocks = 32;
constexpr int kThreads = 256;

__device__ std::int64_t first_index() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ std::int64_t num_threads() {
  return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

__global__ void store(std::byte* to, std::int64_t bytes, std::uint64_t seed) {
  for (std::int64_t i = first_index(); i < bytes; i += num_threads())
    to[i] = pattern_byte(seed, i);
}

__global__ void compare(const std::byte* from,
                        std::int64_t bytes,
                        std::uint64_t seed,
                        unsigned long long* differences) {
  unsigned long long found = 0;
  for (std::int64_t i = first_index(); i < bytes; i += num_threads())
    found += from[i] != pattern_byte(seed, i) ? 1 : 0;
  if (found != 0) atomicAdd(differences, found);
}

// Zeroed memory of the current device for one number.
class DeviceCounter {
 public:
  DeviceCounter() {
    require(cudaMalloc(&value_, sizeof(*value_)), "cudaMalloc");
    const cudaError_t error = cudaMemset(value_, 0, sizeof(*value_));
    if (error != cudaSuccess) cudaFree(value_);
    require(error, "cudaMemset");
  }

  DeviceCounter(const DeviceCounter&) = delete;
  DeviceCounter& operator=(const DeviceCounter&) = delete;

  ~DeviceCounter() { cudaFree(value_); }

  unsigned long long* data() const { return value_; }

  std::int64_t read() const {
    unsigned long long value = 0;
    require(cudaMemcpy(&value, value_, sizeof(value), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return static_cast<std::int64_t>(value);
  }

 private:
  unsigned long long* value_ = nullptr;
};

}  // namespace

std::vector<std::byte> pattern(std::uint64_t seed, std::int64_t bytes) {
  std::vector<std::byte> result(static_cast<std::size_t>(bytes));
  for (std::int64_t i = 0; i < bytes; ++i)
    result[static_cast<std::size_t>(i)] = pattern_byte(seed, i);
  return result;
}

void store_pattern(std::byte* to, std::int64_t bytes, std::uint64_t seed) {
  store<<<kBlocks, kThreads>>>(to, bytes, seed);
  require(cudaGetLastError(), "the launch of store");
  require(cudaDeviceSynchronize(), "store");
}

std::int64_t count_differences(const std::byte* from, std::int64_t bytes, std::uint64_t seed) {
  const DeviceCounter differences;
  compare<<<kBlocks, kThreads>>>(from, bytes, seed, differences.data());
  require(cudaGetLastError(), "the launch of compare");
  require(cudaDeviceSynchronize(), "compare");
  return differences.read();
}

void copy_to_device(std::byte* to, const std::vector<std::byte>& bytes) {
  require(cudaMemcpy(to, bytes.data(), bytes.size(), cudaMemcpyDefault), "cudaMemcpy to the device");
  // From pageable memory the call returns before the bytes have arrived.
  require(cudaDeviceSynchronize(), "cudaMemcpy to the device");
}

std::vector<std::byte> copy_from_device(const std::byte* from, std::int64_t bytes) {
  std::vector<std::byte> result(static_cast<std::size_t>(bytes));
  require(cudaMemcpy(result.data(), from, result.size(), cudaMemcpyDefault), "cudaMemcpy from the device");
  return result;
}

}  // namespace tokenyard::gpu_tests
