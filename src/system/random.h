// SPDX-License-Identifier: Apache-2.0
// Random numbers from the kernel.
// Thread rule: callable from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tokenyard::system {

void fill_random(std::span<std::byte> bytes);
[[nodiscard]] std::uint64_t random_u64();

}  // namespace tokenyard::system
