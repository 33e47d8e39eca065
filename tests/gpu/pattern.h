// SPDX-License-Identifier: Apache-2.0
// Bytes that tell who wrote them and where: written and looked at by kernels, and by copies.
// Thread rule: free functions without state; those of kernels use the calling thread's current device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol/host_device.h"

namespace tokenyard::gpu_tests {

// Byte `index` of the pattern of `seed`: of a multiplicative hash, so that no shift of one pattern looks like another.
TOKENYARD_HD constexpr std::byte pattern_byte(std::uint64_t seed, std::int64_t index) {
  const std::uint64_t mixed =
      (static_cast<std::uint64_t>(index) + 1) * 0x9E3779B97F4A7C15U + seed * 0xBF58476D1CE4E5B9U;
  return static_cast<std::byte>((mixed ^ (mixed >> 29)) >> 24);
}

[[nodiscard]] std::vector<std::byte> pattern(std::uint64_t seed, std::int64_t bytes);

// By a kernel's stores; has happened on return.
void store_pattern(std::byte* to, std::int64_t bytes, std::uint64_t seed);
// How many bytes differ from the pattern, by a kernel's loads.
[[nodiscard]] std::int64_t count_differences(const std::byte* from, std::int64_t bytes, std::uint64_t seed);

// By copies; have happened on return.
void copy_to_device(std::byte* to, const std::vector<std::byte>& bytes);
[[nodiscard]] std::vector<std::byte> copy_from_device(const std::byte* from, std::int64_t bytes);

}  // namespace tokenyard::gpu_tests
