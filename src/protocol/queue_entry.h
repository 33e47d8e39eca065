// SPDX-License-Identifier: Apache-2.0
// What lies in a queue: entries of one size an operation, each a token's index and its payloads' rows, or an expert
// output row.
#pragma once

#include <cstdint>

#include "protocol/formats.h"
#include "protocol/host_device.h"
#include "protocol/planes.h"

namespace tokenyard::protocol {

inline constexpr std::int64_t kQueueEntryHeader = kRowAlignment;
inline constexpr std::int64_t kQueueEntryAlignment = 64;

TOKENYARD_HD constexpr std::int64_t queue_entry_bytes(std::int64_t bytes) {
  return align_up(bytes, kQueueEntryAlignment);
}

}  // namespace tokenyard::protocol
