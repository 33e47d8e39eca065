// SPDX-License-Identifier: Apache-2.0
// The only assembler of the CUDA engine: loads, stores and atomics with the memory order and scope in their names.
// Words that other GPUs or processes see have system scope, words that only blocks of this GPU see device scope.
#pragma once

#include <cstdint>

namespace tokenyard::engine::cuda {

__device__ __forceinline__ std::uint64_t load_acquire_system(const std::uint64_t* word) {
  std::uint64_t value = 0;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_system(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ std::uint32_t add_acq_rel_device(std::uint32_t* word, std::uint32_t value) {
  std::uint32_t before = 0;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}

__device__ __forceinline__ std::uint32_t load_relaxed_device(const std::uint32_t* word) {
  std::uint32_t value = 0;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Nanoseconds of a clock that all multiprocessors share.
__device__ __forceinline__ std::uint64_t nanoseconds() {
  std::uint64_t value = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

}  // namespace tokenyard::engine::cuda
