// SPDX-License-Identifier: Apache-2.0
// The casts of DispatchCast: a row of values becomes f8e4m3 codes with one scale for each 128 of them. This is the
// scalar definition that every engine matches bit for bit; docs/formats.md explains it.
//
// A block's scale follows from the largest finite magnitude in it. value = code * scale, and that exact product is
// within  max(|x| / 17, scale * 2^-10)  of a finite x. Exactly so when scales are powers of two; the two roundings that
// other scales add widen it by less than 2^-18 of itself, and by no more when the product is rounded to fp32 too.
// Infinities become +-448, NaN stays NaN, -0 keeps its sign.
// Thread rule: pure functions. Rounding must be to nearest and denormals must not be flushed, as is the default.
#pragma once

#include <cstdint>

#include "tokenyard/dispatch.h"

#include "protocol/casts.h"
#include "protocol/formats.h"
#include "protocol/host_device.h"

namespace tokenyard::protocol {

inline constexpr std::int64_t kCastBlock = 128;
inline constexpr float kLargestF8e4m3 = 448.0f;
static_assert(decode<F8e4m3>(F8e4m3::kLargestFinite) == kLargestF8e4m3);

// kNone has no scales, and its values are not cast: both 0.
[[nodiscard]] TOKENYARD_HD constexpr RowBytes cast_row_bytes(DispatchCast cast, std::int64_t n) {
  if (cast == DispatchCast::kNone) return {};
  const std::int64_t bytes_per_scale = cast == DispatchCast::kFp8Block128Ue8m0 ? 1 : 4;
  return {.values = n, .scales = bytes_per_scale * ceil_div(n, kCastBlock)};
}

static_assert(cast_row_bytes(DispatchCast::kFp8Block128, 7168).scales == 224);
static_assert(cast_row_bytes(DispatchCast::kFp8Block128Ue8m0, 2880).scales == 23);

// The magnitude's fp32 bits, which order as magnitudes do; 0 for what does not count.
[[nodiscard]] TOKENYARD_HD constexpr std::uint32_t finite_magnitude(float value) {
  const std::uint32_t magnitude = cast_bits<std::uint32_t>(value) & kFloatMagnitude;
  return magnitude < kFloatInfinity ? magnitude : 0;
}

// The smallest power of two that is at least largest / 448, as e8m0: 448 is 1.75 * 2^8, so it is the exponent less 8,
// and one more when the mantissa is above 1.75, which the addition carries. Never less than 2^-126, never above 2^120.
[[nodiscard]] TOKENYARD_HD constexpr std::uint8_t power_of_two_scale(std::uint32_t largest) {
  if (largest == 0) return 127;
  const std::uint32_t exponent = (largest + 0x1FFFFFu) >> 23;
  return static_cast<std::uint8_t>(exponent > 9 ? exponent - 8 : 1);
}

// From the bits of the largest finite magnitude, 0 for a block without one other than zero.
[[nodiscard]] TOKENYARD_HD constexpr float block_scale(DispatchCast cast, std::uint32_t largest) {
  if (cast != DispatchCast::kFp8Block128) return decode_e8m0(power_of_two_scale(largest));
  if (largest == 0) return 1.0f;
  constexpr float kSmallest = 0x1p-126f;  // so that 1 / scale is finite
  const float scale = cast_bits<float>(largest) / kLargestF8e4m3;
  return scale > kSmallest ? scale : kSmallest;
}

// A power of two from 2^-126 on, as stored by kFp8Block128Ue8m0.
[[nodiscard]] TOKENYARD_HD constexpr std::uint8_t encode_e8m0(float scale) {
  return static_cast<std::uint8_t>(cast_bits<std::uint32_t>(scale) >> 23);
}

// `inverse` is 1.0f / scale, rounded once for the block; the product is rounded before it is encoded.
[[nodiscard]] TOKENYARD_HD constexpr std::uint8_t cast_to_block(float value, float inverse) {
  return encode<F8e4m3>(value * inverse);
}

// One block of at most 128 values. Returns its scale.
TOKENYARD_HD constexpr float cast_block(std::uint8_t* codes,
                                        const float* values,
                                        std::int64_t count,
                                        DispatchCast cast) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = finite_magnitude(values[i]);
    if (magnitude > largest) largest = magnitude;
  }
  const float scale = block_scale(cast, largest);
  const float inverse = 1.0f / scale;
  for (std::int64_t i = 0; i < count; ++i)
    codes[i] = cast_to_block(values[i], inverse);
  return scale;
}

}  // namespace tokenyard::protocol
