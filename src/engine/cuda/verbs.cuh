// SPDX-License-Identifier: Apache-2.0
// The only assembler of the CUDA engine: loads, stores and atomics with the memory order and scope in their names, and
// bulk copies (from sm_90 on) with what they are told by.
// Words that other GPUs or processes see have system scope, words that only blocks of this GPU see device scope.
#pragma once

#include <cstddef>
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

__device__ __forceinline__ void store_relaxed_system(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ std::uint64_t load_relaxed_system(const std::uint64_t* word) {
  std::uint64_t value = 0;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ std::uint32_t add_acq_rel_device(std::uint32_t* word, std::uint32_t value) {
  std::uint32_t before = 0;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}

// For one lane of a warp: compilers make of atomicAdd one for all lanes, and wait for it at once to share it out.
__device__ __forceinline__ std::uint32_t add_relaxed_device(std::uint32_t* word, std::uint32_t value) {
  std::uint32_t before = 0;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}

__device__ __forceinline__ std::uint32_t load_relaxed_device(const std::uint32_t* word) {
  std::uint32_t value = 0;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// 16 bytes, no order between the two halves.
struct Pair {
  std::uint64_t first;
  std::uint64_t second;
};

__device__ __forceinline__ void store_pair_system(std::byte* to, const Pair& pair) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
               :
               : "l"(to), "l"(pair.first), "l"(pair.second)
               : "memory");
}

__device__ __forceinline__ Pair load_pair_system(const std::byte* from) {
  Pair pair{};
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pair.first), "=l"(pair.second)
               : "l"(from)
               : "memory");
  return pair;
}

// The value, of which nothing is computed before this: else compilers do so as early as they can, where threads wait
// for the load that gives it before they issue those that follow.
__device__ __forceinline__ std::uint32_t used_from_here(std::uint32_t value) {
  asm volatile("" : "+r"(value) : : "memory");
  return value;
}

// Launches that overlap (from sm_90 on): returns when all kernels before this one on its stream have ended and what
// they wrote is seen; at once where the launch does not overlap.
__device__ __forceinline__ void wait_for_kernels_before() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// When all blocks have come here the next kernel may start, if its launch overlaps; it then waits as above.
__device__ __forceinline__ void let_next_kernel_start() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

// Nanoseconds of a clock that all multiprocessors share.
__device__ __forceinline__ std::uint64_t nanoseconds() {
  std::uint64_t value = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* generic) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(generic));
}

// Barriers of a part of a block, of `threads` threads, a multiple of the warp's. Barrier 0 is __syncthreads'. What one
// did before is seen by all after.
__device__ __forceinline__ void wait_at(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// Bulk copies see memory through the async proxy: this orders what the thread did, or acquired, before its later ones.
__device__ __forceinline__ void fence_before_bulk_copies() {
  asm volatile("fence.proxy.async;" : : : "memory");
}

// A counter in shared memory of bytes on their way. Its phases follow each other: each begins with `expect_bytes` and
// ends when as many have arrived.
__device__ __forceinline__ void init_byte_counter(std::uint64_t* counter) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(shared_address(counter)) : "memory");
}

__device__ __forceinline__ void expect_bytes(std::uint64_t* counter, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(counter)), "r"(bytes)
               : "memory");
}

// Whether the phase of this parity (0 for the first) has ended; waits a while for it.
__device__ __forceinline__ bool bytes_arrived(std::uint64_t* counter, std::uint32_t parity) {
  std::uint32_t arrived = 0;
  asm volatile(
      "{\n\t"
      ".reg .pred ended;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, ended;\n\t"
      "}"
      : "=r"(arrived)
      : "r"(shared_address(counter)), "r"(parity)
      : "memory");
  return arrived != 0;
}

// Addresses and sizes are multiples of 16 bytes.
__device__ __forceinline__ void load_bulk(std::byte* shared,
                                          const std::byte* from,
                                          std::uint32_t bytes,
                                          std::uint64_t* counter) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(shared_address(shared)), "l"(from), "r"(bytes), "r"(shared_address(counter))
               : "memory");
}

__device__ __forceinline__ void store_bulk(std::byte* to, const std::byte* shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(to), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Makes one group of the thread's bulk stores since the last call; it may be empty.
__device__ __forceinline__ void close_bulk_stores() {
  asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// Waits until all of the thread's groups but the last `Pending` are complete: written, not only read.
template <int Pending>
__device__ __forceinline__ void wait_bulk_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" : : "n"(Pending) : "memory");
}

// The same, until they have been read: shared memory may be filled again.
template <int Pending>
__device__ __forceinline__ void wait_bulk_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(Pending) : "memory");
}

}  // namespace tokenyard::engine::cuda
