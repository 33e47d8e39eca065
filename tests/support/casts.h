// SPDX-License-Identifier: Apache-2.0
// Casts of the plain reference, by arithmetic on doubles and from the formats' definitions alone.
// Thread rule: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tokenyard/tensor.h"

namespace tokenyard::support {

// Nearest, ties to even. bf16 and f16 overflow to infinity and every NaN becomes 0x7FFF; f8e4m3 saturates at 448, also
// from infinity, and every NaN becomes 0x7F; f32 keeps the bits.
[[nodiscard]] std::uint32_t encode(Dtype dtype, float value);
[[nodiscard]] float decode(Dtype dtype, std::uint32_t bits);

// The element at `index` of an array of `dtype`: f32, bf16, f16 or f8e4m3.
[[nodiscard]] float load(Dtype dtype, const std::byte* data, std::int64_t index);
void store(Dtype dtype, std::byte* data, std::int64_t index, float value);

}  // namespace tokenyard::support
