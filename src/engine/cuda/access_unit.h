// SPDX-License-Identifier: Apache-2.0
// How wide the accesses of a copy may be.
#pragma once

#include <cstdint>

namespace tokenyard::engine::cuda {

// Bytes of the widest access, a power of two up to 16, that divides all of what was or-ed together.
inline int unit_of(std::uint64_t addresses_and_sizes) {
  const std::uint64_t bits = addresses_and_sizes | 16U;
  return static_cast<int>(bits & (~bits + 1));
}

inline std::uint64_t bits_of(const void* address) {
  return reinterpret_cast<std::uint64_t>(address);
}

inline std::uint64_t bits_of(std::int64_t size) {
  return static_cast<std::uint64_t>(size);
}

}  // namespace tokenyard::engine::cuda
