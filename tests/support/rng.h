// SPDX-License-Identifier: Apache-2.0
// Seeded random numbers that are the same on every rank, machine and standard library.
// Thread rule: one generator belongs to one thread.
#pragma once

#include <cstdint>

namespace tokenyard::support {

// One step of a counter-based mixer: good enough for data, and usable as a hash of coordinates.
[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(mix(seed)) {}

  [[nodiscard]] std::uint64_t next() { return mix(state_++); }

  // In [0, bound); bound > 0.
  [[nodiscard]] std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
  }

  [[nodiscard]] double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

}  // namespace tokenyard::support
