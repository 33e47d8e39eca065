// SPDX-License-Identifier: Apache-2.0
// Units that tell of their own arrival: two words, each with a tag beside it in the 8 bytes that are stored at once.
#pragma once

#include <cstdint>

#include "protocol/host_device.h"

namespace tokenyard::engine::cuda {

inline constexpr std::int64_t kTaggedBytes = 16;  // a unit
inline constexpr int kTaggedWords = 2;            // of data in it

// Never 0, which is what memory holds that nobody wrote; the neighbours that share a tag differ in their slot.
TOKENYARD_HD constexpr std::uint32_t tag_of(std::uint32_t epoch) {
  return epoch == 0xFFFFFFFFU ? 1 : epoch + 1;
}

}  // namespace tokenyard::engine::cuda
