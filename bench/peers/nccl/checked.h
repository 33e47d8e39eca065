// SPDX-License-Identifier: Apache-2.0
// Turns what CUDA and NCCL return into exceptions that name the call. Thread rule: any thread.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <string>

namespace tokenyard::bench {

// Throw std::runtime_error.
void check(const char* call, cudaError_t result);
void check(const char* call, ncclResult_t result);

// For destructors: to stderr instead.
void report(const char* call, cudaError_t result) noexcept;
void report(const char* call, ncclResult_t result) noexcept;

// Of the library that runs, as in 2.28.9.
[[nodiscard]] std::string nccl_version();

}  // namespace tokenyard::bench
