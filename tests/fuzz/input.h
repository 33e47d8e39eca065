// SPDX-License-Identifier: Apache-2.0
// Reads numbers out of the fuzzer's bytes, from the front. Past the end everything is 0, so every input means something
// and a longer one says more.
// Thread rule: one thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>

namespace tokenyard::fuzz {

class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : left_(bytes) {}

  [[nodiscard]] bool empty() const { return left_.empty(); }

  // Any value of an integer type, little-endian.
  template <class Integer>
  [[nodiscard]] Integer take() {
    Integer value = 0;
    const std::size_t size = std::min(sizeof(value), left_.size());
    if (size > 0) std::memcpy(&value, left_.data(), size);
    left_ = left_.subspan(size);
    return value;
  }

  // In [0, bound), from as few bytes as that takes; bound > 0.
  [[nodiscard]] std::int64_t below(std::int64_t bound) {
    if (bound <= 0x100) return take<std::uint8_t>() % bound;
    if (bound <= 0x10000) return take<std::uint16_t>() % bound;
    return static_cast<std::int64_t>(take<std::uint64_t>() % static_cast<std::uint64_t>(bound));
  }

  [[nodiscard]] bool flip() { return (take<std::uint8_t>() & 1U) != 0; }

  // One of the list.
  template <class T, std::size_t kCount>
  [[nodiscard]] T pick(const std::array<T, kCount>& choices) {
    return choices[static_cast<std::size_t>(below(static_cast<std::int64_t>(kCount)))];
  }

  // A number that code about sizes finds hard: small, next to a power of two, next to a limit, or any at all.
  template <class Integer>
  [[nodiscard]] Integer hostile() {
    using Limits = std::numeric_limits<Integer>;
    const auto nudge = static_cast<Integer>(below(5) - 2);
    switch (below(6)) {
      case 0:
        return static_cast<Integer>(below(9));
      case 1:
        return static_cast<Integer>(below(0x10000));
      case 2:
        return static_cast<Integer>((Integer{1} << below(Limits::digits)) + (nudge > 0 ? -nudge : nudge));
      case 3:
        return static_cast<Integer>(Limits::max() - (nudge > 0 ? nudge : 0));
      case 4:
        return nudge < 0 ? Limits::min() : static_cast<Integer>(-nudge);
      default:
        return take<Integer>();
    }
  }

  // The next `size` bytes, or what is left.
  [[nodiscard]] std::span<const std::byte> take_bytes(std::size_t size) {
    const auto taken = left_.first(std::min(size, left_.size()));
    left_ = left_.subspan(taken.size());
    return taken;
  }

  [[nodiscard]] std::span<const std::byte> rest() const { return left_; }

 private:
  std::span<const std::byte> left_;
};

}  // namespace tokenyard::fuzz
