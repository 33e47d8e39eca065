// SPDX-License-Identifier: Apache-2.0
// Ordinary memory for received rows. It is not touched before a row is written, so that room which no round uses costs
// nothing. Thread rule: a pure function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "tokenyard/error.h"

namespace tokenyard::engine {

using UntouchedMemory =
    std::unique_ptr<std::byte[]>;  // NOLINT(modernize-avoid-c-arrays): its size is known at run time

// Throws kSystem where there is none.
[[nodiscard]] inline UntouchedMemory make_untouched_memory(std::int64_t bytes) {
  try {
    // NOLINTNEXTLINE(modernize-avoid-c-arrays): as above
    return std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kSystem, "no memory for " + std::to_string(bytes) + " bytes of received rows");
  }
}

}  // namespace tokenyard::engine
