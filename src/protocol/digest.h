// SPDX-License-Identifier: Apache-2.0
// A digest of the arguments that must agree on all ranks: FNV-1a over 64-bit words (the published constants of the
// Fowler-Noll-Vo hash), enough to tell honest mistakes apart.
#pragma once

#include <cstdint>

#include "protocol/host_device.h"

namespace tokenyard::protocol {

class Digest {
 public:
  TOKENYARD_HD constexpr void add(std::uint64_t word) {
    for (int i = 0; i < 8; ++i) {
      value_ ^= (word >> (8 * i)) & 0xFFU;
      value_ *= 0x100000001B3ULL;
    }
  }

  TOKENYARD_HD constexpr std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xCBF29CE484222325ULL;
};

// In place of a value that must agree, none of which are negative.
[[nodiscard]] TOKENYARD_HD constexpr std::int64_t as_agreed(const Digest& digest) {
  return static_cast<std::int64_t>(digest.value() >> 1);
}

}  // namespace tokenyard::protocol
