// SPDX-License-Identifier: Apache-2.0
// Turns an errno into an Error whose message holds the system's reason.
// Thread rule: pure.
#pragma once

#include <string>
#include <system_error>

#include "tokenyard/error.h"

namespace tokenyard::system {

// strerror() shares a buffer between threads; the category does not.
[[nodiscard]] inline std::string errno_text(int error) {
  return std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

[[nodiscard]] inline Error system_error(const std::string& what, int error) {
  return {ErrorCode::kSystem, what + ": " + errno_text(error)};
}

}  // namespace tokenyard::system
