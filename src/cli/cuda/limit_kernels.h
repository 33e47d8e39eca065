// SPDX-License-Identifier: Apache-2.0
// Kernels that find out what a machine can do at best, for host code. Each call enqueues one launch on a stream of the
// current device. Sizes are multiples of kLimitStep.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace tokenyard::cli {

inline constexpr std::int64_t kLimitStep = std::int64_t{1} << 20;

// Makes all of them resident on the current device, so that no launch loads code while another device waits.
void load_limit_kernels();

// What is written does not come from memory.
void launch_stores(std::byte* to, std::int64_t bytes, int blocks, cudaStream_t stream);
// The same from shared memory, by the copy engine of each multiprocessor.
void launch_bulk_stores(std::byte* to, std::int64_t bytes, int blocks, cudaStream_t stream);
// What is read goes nowhere; `sink` is never written but for an unlikely sum.
void launch_loads(const std::byte* from, std::int64_t bytes, int blocks, std::uint32_t* sink, cudaStream_t stream);
void launch_copy(std::byte* to, const std::byte* from, std::int64_t bytes, int blocks, cudaStream_t stream);
void launch_nothing(cudaStream_t stream);

// Words of a pair of devices: `own` lies on the current one and `peer` on the other.
struct PairWords {
  std::uint64_t* own = nullptr;
  std::uint64_t* peer = nullptr;
  std::uint64_t* epoch = nullptr;   // on the current device; how many there were
  std::uint32_t* failed = nullptr;  // on the current device; set by waits that reached their deadline
};

// `turns` times to the other device and back. One of the two is first.
void launch_ping_pong(const PairWords& words, int turns, bool first, cudaStream_t stream);
// Ends when the other device's has begun.
void launch_pair_barrier(const PairWords& words, cudaStream_t stream);

}  // namespace tokenyard::cli
