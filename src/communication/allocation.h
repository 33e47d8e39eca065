// SPDX-License-Identifier: Apache-2.0
// Outputs in memory of CommunicationOptions::allocate_output. Thread rule: as the caller's function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "tokenyard/error.h"
#include "tokenyard/tensor.h"

namespace tokenyard::communication {

using Allocate = std::function<void*(std::int64_t bytes, Device device)>;

// Null for no bytes, of which the caller's function is not asked. Throws kSystem when it gives nothing.
[[nodiscard]] inline std::byte* allocate_output(const Allocate& allocate, std::int64_t bytes, Device device) {
  if (bytes == 0) return nullptr;
  auto* memory = static_cast<std::byte*>(allocate(bytes, device));
  if (memory != nullptr) return memory;
  throw Error(ErrorCode::kSystem, "allocate_output gave no memory for " + std::to_string(bytes) + " bytes");
}

}  // namespace tokenyard::communication
