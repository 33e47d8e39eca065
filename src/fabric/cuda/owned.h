// SPDX-License-Identifier: Apache-2.0
// Ownership of one object of the CUDA driver, given back exactly once.
// Thread rule: a value; one thread at a time per object.
#pragma once

#include <utility>

#include "fabric/cuda/driver.h"

namespace tokenyard::fabric::cuda {

// `Kind` has a type `Value` and `static void release(const Driver&, const Value&) noexcept`, whose failures nobody
// could act on. It keeps the driver, because asking for it anew may throw.
template <class Kind>
class Owned {
 public:
  using Value = typename Kind::Value;

  Owned() = default;

  Owned(const Driver& cu, const Value& value) : driver_(&cu), value_(value) {}

  Owned(Owned&& other) noexcept : driver_(std::exchange(other.driver_, nullptr)), value_(other.value_) {}

  // Swaps, so that a class of several of these gives back in its own order what it held before.
  Owned& operator=(Owned&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(value_, other.value_);
    return *this;
  }

  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  ~Owned() {
    if (driver_ != nullptr) Kind::release(*driver_, value_);
  }

  [[nodiscard]] const Value& get() const { return value_; }

 private:
  const Driver* driver_ = nullptr;
  Value value_{};
};

}  // namespace tokenyard::fabric::cuda
