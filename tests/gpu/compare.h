// SPDX-License-Identifier: Apache-2.0
// Comparing on the device, so that rounds can be looked at without waiting for them.
// Thread rule: free functions without state; those of kernels use the calling thread's current device.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace tokenyard::gpu_tests {

// Enqueues the addition of the number of bytes that differ to `count`, which lies on the device.
void count_differences(
    const std::byte* one, const std::byte* other, std::int64_t bytes, unsigned long long* count, cudaStream_t stream);

// Makes its kernel resident, so that no launch of it loads code while another rank's kernel waits.
void load_comparison();

}  // namespace tokenyard::gpu_tests
