// SPDX-License-Identifier: Apache-2.0
// One payload on its way: where token 0's row is, and where row 0 goes inside a payload space.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine/host/rows.h"

namespace tokenyard::engine::host {

struct Lane {
  const std::byte* from = nullptr;
  std::int64_t from_stride = 0;
  std::int64_t offset = 0;
  std::int64_t stride = 0;
  std::int64_t row_bytes = 0;
  std::int64_t thread_stride = 0;  // rows made by a thread lie in memory of its own
  std::int64_t entry_offset = 0;   // in an entry of a queue
};

// Below this a call of the vectorised copy costs more than it saves.
inline constexpr std::int64_t kSmallRow = 256;

inline void copy_lane_row(std::byte* to, const std::byte* from, std::int64_t bytes, bool stream) {
  if (bytes < kSmallRow) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  } else {
    copy_row(to, from, bytes, stream);
  }
}

}  // namespace tokenyard::engine::host
