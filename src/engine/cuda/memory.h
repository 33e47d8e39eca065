// SPDX-License-Identifier: Apache-2.0
// What the CUDA engine owns on a device. Move-only; freed on the device it came from, whatever the current one is.
// Making and freeing may synchronise the device, so neither happens inside a round.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/cuda/tasks.h"
#include "engine/round.h"

namespace tokenyard::engine::cuda {

// Makes `device` the thread's current one for as long as it lives.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  DeviceScope(DeviceScope&&) = delete;
  DeviceScope& operator=(DeviceScope&&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

struct FreeDevice {
  int device = 0;
  void operator()(std::byte* memory) const noexcept;
};

struct FreePinned {
  void operator()(std::byte* memory) const noexcept;
};

using DeviceMemory = std::unique_ptr<std::byte, FreeDevice>;
using PinnedMemory = std::unique_ptr<std::byte, FreePinned>;

// Zeroed; complete on return. Throw kSystem with CUDA's words.
[[nodiscard]] DeviceMemory make_device_memory(int device, std::int64_t bytes);
// Reached by the device under the same address.
[[nodiscard]] PinnedMemory make_pinned_memory(int device, std::int64_t bytes);

struct DestroyEvent {
  void operator()(cudaEvent_t event) const noexcept;
};

// An event without timing.
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;
[[nodiscard]] Event make_event(int device);

// The route of one handle.
class RouteBuffers final : public RoundMemory {
 public:
  RouteBuffers(int device, const protocol::WindowLayout& layout);

  [[nodiscard]] const RouteMemory& view() const { return view_; }

  // As new. No kernel may use it.
  void clear() const;

  bool in_use = false;            // a dispatch has added to it, and no combine was enqueued that clears it
  bool ended_by_combine = false;  // its views: nothing is left to tell the peers
  bool small = false;             // the round goes in lines
  bool received = false;          // its receive half was enqueued
  bool own_shown = false;         // own rows of a small round are where they were first shown, and nowhere else

 private:
  DeviceMemory memory_;
  std::int64_t bytes_ = 0;
  RouteMemory view_{};
};

}  // namespace tokenyard::engine::cuda
