// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/memory.h"

#include <algorithm>
#include <string>

#include "tokenyard/error.h"

#include "engine/cuda/kernels.h"

namespace tokenyard::engine::cuda {

void check(cudaError_t outcome, const char* what) {
  if (outcome == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // so that the next call does not report it again
  throw Error(ErrorCode::kSystem, std::string(what)
                                          .append(" failed: ")
                                          .append(cudaGetErrorString(outcome))
                                          .append(" (")
                                          .append(cudaGetErrorName(outcome)) +
                                      ")");
}

DeviceScope::DeviceScope(int device) {
  check(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ == device) return;
  check(cudaSetDevice(device), "cudaSetDevice");
  changed_ = true;
}

DeviceScope::~DeviceScope() {
  if (changed_) static_cast<void>(cudaSetDevice(before_));
}

void FreeDevice::operator()(std::byte* memory) const noexcept {
  int before = 0;
  static_cast<void>(cudaGetDevice(&before));
  static_cast<void>(cudaSetDevice(device));
  static_cast<void>(cudaFree(memory));
  static_cast<void>(cudaSetDevice(before));
}

void FreePinned::operator()(std::byte* memory) const noexcept {
  static_cast<void>(cudaFreeHost(memory));
}

DeviceMemory make_device_memory(int device, std::int64_t bytes) {
  const DeviceScope scope(device);
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  void* memory = nullptr;
  check(cudaMalloc(&memory, size), "cudaMalloc");
  DeviceMemory owned(static_cast<std::byte*>(memory), FreeDevice{device});
  // Not on the default stream, which waits for others.
  check(cudaMemsetAsync(memory, 0, size, cudaStreamPerThread), "cudaMemsetAsync");
  check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  return owned;
}

PinnedMemory make_pinned_memory(int device, std::int64_t bytes) {
  const DeviceScope scope(device);
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, static_cast<std::size_t>(bytes), cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  std::fill_n(static_cast<std::byte*>(memory), bytes, std::byte{0});
  return PinnedMemory(static_cast<std::byte*>(memory));
}

void DestroyEvent::operator()(cudaEvent_t event) const noexcept {
  static_cast<void>(cudaEventDestroy(event));
}

Event make_event(int device) {
  const DeviceScope scope(device);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return Event(event);
}

// [masks] [ranks of tokens] [present] [rows sent] [rows received] [tokens] [state]
RouteBuffers::RouteBuffers(int device, const protocol::WindowLayout& layout) {
  const protocol::WindowShape& shape = layout.shape();
  const std::int64_t ranks = shape.num_ranks;
  view_.words = static_cast<int>(protocol::ceil_div(ranks, kWordBits));
  const std::int64_t masks = ranks * layout.max_chunks() * 8;
  const std::int64_t sets = shape.max_tokens * view_.words * 4;
  const std::int64_t present = ranks * SmallLayout::of(layout).tokens * 4;
  bytes_ = masks + sets + present + 3 * ranks * 4 + std::int64_t{kRouteWords} * 4;
  memory_ = make_device_memory(device, bytes_);
  std::byte* at = memory_.get();
  view_.masks = reinterpret_cast<std::uint64_t*>(at);
  view_.ranks_of_token = reinterpret_cast<std::uint32_t*>(at += masks);
  view_.present = reinterpret_cast<std::uint32_t*>(at += sets);
  view_.rows_sent = reinterpret_cast<std::uint32_t*>(at += present);
  view_.rows_received = reinterpret_cast<std::uint32_t*>(at += ranks * 4);
  view_.tokens_of = reinterpret_cast<std::int32_t*>(at += ranks * 4);
  view_.state = reinterpret_cast<std::uint32_t*>(at + ranks * 4);
}

void RouteBuffers::clear() const {
  const DeviceScope scope(memory_.get_deleter().device);
  check(cudaMemset(memory_.get(), 0, static_cast<std::size_t>(bytes_)), "cudaMemset");
}

}  // namespace tokenyard::engine::cuda
