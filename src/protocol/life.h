// SPDX-License-Identifier: Apache-2.0
// Signs of life: what a rank that waits, or has given up, tells its peers in one word (design.md part 8).
// The word guards no other data, so it is read and written without ordering.
#pragma once

#include <cstdint>

#include "protocol/host_device.h"

namespace tokenyard::protocol {

enum class LifeKind : std::uint8_t {
  kNone,     // never waited
  kWaiting,  // waits for `peer`
  kFaulted,  // gave up, and blames `peer`, or kNobody
};

// `Life::peer` of a rank that gave up in a cycle of ranks that wait for each other.
inline constexpr std::uint16_t kNobody = 0xFFF;

struct Life {
  LifeKind kind = LifeKind::kNone;
  std::uint8_t phase = 0;
  std::uint16_t heartbeat = 0;
  std::uint16_t peer = 0;
  std::uint32_t epoch = 0;
};

// bits 0-15 heartbeat, 16-27 peer, 28-29 kind, 30-31 phase, 32-63 epoch
TOKENYARD_HD constexpr std::uint64_t encode_life(const Life& life) {
  return static_cast<std::uint64_t>(life.heartbeat) | (static_cast<std::uint64_t>(life.peer & 0xFFFU) << 16) |
         (static_cast<std::uint64_t>(life.kind) << 28) | (static_cast<std::uint64_t>(life.phase & 3U) << 30) |
         (static_cast<std::uint64_t>(life.epoch) << 32);
}

TOKENYARD_HD constexpr Life decode_life(std::uint64_t word) {
  return {static_cast<LifeKind>((word >> 28) & 3U), static_cast<std::uint8_t>((word >> 30) & 3U),
          static_cast<std::uint16_t>(word & 0xFFFFU), static_cast<std::uint16_t>((word >> 16) & 0xFFFU),
          static_cast<std::uint32_t>(word >> 32)};
}

}  // namespace tokenyard::protocol
