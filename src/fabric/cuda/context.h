// SPDX-License-Identifier: Apache-2.0
// A device of this process: its primary context, which the CUDA runtime uses too, and what it can do.
// Thread rule: a Context is immutable and may be shared; a CurrentContext belongs to the thread that made it.
#pragma once

#include <string>

#include "fabric/cuda/driver.h"
#include "fabric/cuda/owned.h"

namespace tokenyard::fabric::cuda {

[[nodiscard]] int device_count(const Driver& cu);

// "0000:3B:00.0".
[[nodiscard]] std::string bus_id(const Driver& cu, CUdevice device);

// What `device` lacks for windows in its memory, in words; empty when it has all.
[[nodiscard]] std::string missing_for_windows(const Driver& cu, CUdevice device);

// Keeps a device's primary context alive.
class Context {
 public:
  // `index` as the CUDA runtime counts. Throws kInvalidArgument when there is no such device.
  explicit Context(int index);

  [[nodiscard]] const Driver& driver() const { return *driver_; }

  [[nodiscard]] int index() const { return index_; }

  [[nodiscard]] CUdevice device() const { return retained_.get(); }

  [[nodiscard]] CUcontext native() const { return native_; }

  // "device 0 (0000:3B:00.0)".
  [[nodiscard]] std::string name() const;

 private:
  struct Retained {
    using Value = CUdevice;

    static void release(const Driver& cu, const Value& device) noexcept { cu.primary_ctx_release(device); }
  };

  const Driver* driver_;
  int index_;
  Owned<Retained> retained_;
  CUcontext native_ = nullptr;
};

// Makes a context the thread's current one for as long as it lives. Pushed and popped, where setting the runtime's
// device back could create a context on a device that the caller never touched.
class CurrentContext {
 public:
  explicit CurrentContext(const Context& context);

 private:
  struct Pushed {
    using Value = CUcontext;

    static void release(const Driver& cu, const Value& /*context*/) noexcept {
      CUcontext popped = nullptr;
      cu.ctx_pop_current(&popped);
    }
  };

  Owned<Pushed> pushed_;
};

}  // namespace tokenyard::fabric::cuda
