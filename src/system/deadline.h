// SPDX-License-Identifier: Apache-2.0
// A moment on the steady clock after which a wait gives up.
// Thread rule: a value; share copies freely.
#pragma once

#include <chrono>
#include <limits>

namespace tokenyard::system {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // A wait that would pass the end of the clock never expires; a negative one has expired.
  [[nodiscard]] static Deadline after(std::chrono::milliseconds wait) {
    const Clock::time_point now = Clock::now();
    const auto longest = std::chrono::floor<std::chrono::milliseconds>(Clock::time_point::max() - now);
    if (wait >= longest) return Deadline(Clock::time_point::max());
    return Deadline(wait.count() <= 0 ? now : now + wait);
  }

  [[nodiscard]] static Deadline never() { return Deadline(Clock::time_point::max()); }

  [[nodiscard]] Clock::time_point at() const { return at_; }

  [[nodiscard]] bool expired() const { return at_ != Clock::time_point::max() && Clock::now() >= at_; }

  // For poll(): rounded up, so that a wait ends after the deadline and does not spin just before it; -1 for ever.
  [[nodiscard]] int poll_timeout() const {
    if (at_ == Clock::time_point::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
    if (left <= 0) return 0;
    return left > std::numeric_limits<int>::max() ? std::numeric_limits<int>::max() : static_cast<int>(left);
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}

  Clock::time_point at_;
};

}  // namespace tokenyard::system
