// SPDX-License-Identifier: Apache-2.0
// One piece of device memory for all buffers of a rank, so that NCCL is told of it once, and buffers stand at the same
// place in it on every rank, as NCCL's symmetric kernels want. Thread rule: one thread per rank.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>

namespace tokenyard::bench {

enum class MemoryKind {
  kPlain,       // cudaMalloc
  kRegistered,  // ncclMemAlloc and ncclCommRegister
  kSymmetric,   // ncclMemAlloc and ncclCommWindowRegister
};

// Lays buffers out; without memory it only counts.
class Placement {
 public:
  explicit Placement(std::byte* memory) : memory_(memory) {}

  template <typename T>
  T* take(std::int64_t count) {
    T* buffer = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return buffer;
  }

  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  static constexpr std::size_t kAlignment = 4096;

  std::byte* memory_;
  std::size_t used_ = 0;
};

class Arena {
 public:
  // Collective, with the same size on every rank.
  Arena(MemoryKind kind, ncclComm_t comm, std::size_t size);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  Arena(Arena&&) = delete;
  Arena& operator=(Arena&&) = delete;

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(memory_); }

  // False where NCCL took a window and gave none back, as it does where GPUs cannot reach each other's memory.
  [[nodiscard]] bool registered() const { return handle_ != nullptr || window_ != nullptr; }

 private:
  void release() noexcept;

  MemoryKind kind_;
  ncclComm_t comm_;
  void* memory_ = nullptr;
  void* handle_ = nullptr;
  ncclWindow_t window_ = nullptr;
};

}  // namespace tokenyard::bench
