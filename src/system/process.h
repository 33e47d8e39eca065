// SPDX-License-Identifier: Apache-2.0
// The number that tells processes apart.
// Thread rule: callable from any thread.
#pragma once

#include <cstdint>

namespace tokenyard::system {

// Equal for all threads of a process, different in every other process, also right after fork().
[[nodiscard]] std::uint64_t process_nonce();

}  // namespace tokenyard::system
