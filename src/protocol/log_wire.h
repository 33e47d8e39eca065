// SPDX-License-Identifier: Apache-2.0
// The logarithmic wire of combine: rows of fp32 as 10-bit codes of their base-2 logarithms, for each 128 values two f32
// in front. This is the scalar definition that every engine matches bit for bit; docs/formats.md explains it.
//
//   block   f32 lowest, f32 step, then a code for each value, in little-endian bit order, padded to whole bytes
//   code    bits 0 to 8 level, bit 9 sign
//   level   0 zero, 1..509 two to the power of lowest + (level - 1) * step, 510 infinity, 511 NaN
//
// lowest is the logarithm of the smallest finite magnitude other than zero, but at least that of the largest less 32;
// step makes level 509 the largest. Smaller magnitudes become the nearer of zero and level 1. Every finite value comes
// back finite, within 2.25 % of itself or 2^-32 of its block's largest magnitude; where that is denormal in fp32, its
// own rounding adds 2^-150. A block of equal magnitudes comes back within 2^-17 of them, powers of two exactly.
//
// Logarithms and powers are fixed sequences of fp32 operations, each rounded, so all machines agree on every bit.
// Thread rule: pure functions. Rounding must be to nearest and denormals must not be flushed, as is the default.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/casts.h"
#include "protocol/formats.h"
#include "protocol/host_device.h"

namespace tokenyard::protocol {

inline constexpr std::int64_t kLogBlock = 128;
inline constexpr std::int64_t kLogHeaderBytes = 8;
inline constexpr int kLogCodeBits = 10;
inline constexpr std::uint32_t kLogLevelMask = 511;
inline constexpr std::uint32_t kLogSign = 512;
inline constexpr std::uint32_t kLogNan = 511;
inline constexpr std::uint32_t kLogInfinity = 510;
inline constexpr std::int32_t kLogSteps = 508;  // from level 1 to level 509
inline constexpr float kLogRange = 32.0f;

[[nodiscard]] TOKENYARD_HD constexpr std::int64_t log_block_bytes(std::int64_t count) {
  return kLogHeaderBytes + ceil_div(count * kLogCodeBits, 8);
}

[[nodiscard]] TOKENYARD_HD constexpr std::int64_t log_row_bytes(std::int64_t n) {
  const std::int64_t rest = n % kLogBlock;
  return n / kLogBlock * log_block_bytes(kLogBlock) + (rest > 0 ? log_block_bytes(rest) : 0);
}

static_assert(log_block_bytes(kLogBlock) == 168);
static_assert(log_row_bytes(7168) == 9408 && log_row_bytes(2880) == 3784 && log_row_bytes(1) == 10);

// log2(1 + t) = k1 t + k2 t^2 + ..., within 1e-7 for 1 + t in [sqrt(1/2), sqrt(2)].
struct Log2Terms {
  static constexpr float k1 = 0x1.715476p+0f;
  static constexpr float k2 = -0x1.71552cp-1f;
  static constexpr float k3 = 0x1.ec756ep-2f;
  static constexpr float k4 = -0x1.70dedep-2f;
  static constexpr float k5 = 0x1.262f0ep-2f;
  static constexpr float k6 = -0x1.fe823ap-3f;
  static constexpr float k7 = 0x1.dc78f4p-3f;
  static constexpr float k8 = -0x1.245f38p-3f;
};

// 2^f = 1 + k1 f + k2 f^2 + ..., within 2.1e-7 of itself for f in [-1/2, 1/2].
struct Exp2Terms {
  static constexpr float k1 = 0x1.62e430p-1f;
  static constexpr float k2 = 0x1.ebfa4cp-3f;
  static constexpr float k3 = 0x1.c6afeep-5f;
  static constexpr float k4 = 0x1.3cbf60p-7f;
  static constexpr float k5 = 0x1.5ec866p-10f;
};

inline constexpr std::uint32_t kRootHalf = 0x3F3504F3;  // sqrt(1/2), as fp32 bits
// Adding it to a float of a magnitude below 2^22 rounds that to an integer, ties to even, in the low bits.
inline constexpr float kRounder = 0x1.8p+23f;
inline constexpr std::uint32_t kRounderBits = 0x4B400000;
inline constexpr float kLargestFloat = 0x1.fffffep+127f;

// c + x * (c of the next power + x * ...), from the inside out.
[[nodiscard]] TOKENYARD_HD constexpr float horner(float /*x*/, float last) {
  return last;
}

template <class... Terms>
[[nodiscard]] TOKENYARD_HD constexpr float horner(float x, float first, Terms... rest) {
  return horner(x, rest...) * x + first;
}

// The base-2 logarithm of the magnitude with these fp32 bits, which is finite and not zero. Powers of two are exact.
[[nodiscard]] TOKENYARD_HD constexpr float log2_of(std::uint32_t magnitude) {
  using T = Log2Terms;
  const bool denormal = magnitude < (1u << 23);
  // The bits of a denormal are the number of times that it holds 2^-149.
  const float normal =
      denormal ? static_cast<float>(static_cast<std::int32_t>(magnitude)) : cast_bits<float>(magnitude);
  const std::uint32_t bits = cast_bits<std::uint32_t>(normal);
  const std::int32_t exponent = static_cast<std::int32_t>(bits - kRootHalf) >> 23;
  const float t = cast_bits<float>(bits - (static_cast<std::uint32_t>(exponent) << 23)) - 1.0f;
  const float terms = horner(t, T::k1, T::k2, T::k3, T::k4, T::k5, T::k6, T::k7, T::k8);
  return static_cast<float>(exponent - (denormal ? 149 : 0)) + terms * t;
}

// Two to the power of y, at most the largest finite float; y in [-150, 129]. Integers are exact.
[[nodiscard]] TOKENYARD_HD constexpr float exp2_of(float y) {
  using T = Exp2Terms;
  const float shifted = y + kRounder;
  const std::int32_t exponent = static_cast<std::int32_t>(cast_bits<std::uint32_t>(shifted) - kRounderBits);
  const float f = y - (shifted - kRounder);
  const float mantissa = horner(f, 1.0f, T::k1, T::k2, T::k3, T::k4, T::k5);
  // In two factors: the first product is exact, so a denormal is rounded only once.
  const std::int32_t half = exponent >> 1;
  const float first = cast_bits<float>(static_cast<std::uint32_t>(half + 127) << 23);
  const float second = cast_bits<float>(static_cast<std::uint32_t>(exponent - half + 127) << 23);
  const float power = mantissa * first * second;
  return power < kLargestFloat ? power : kLargestFloat;
}

struct LogScale {
  float lowest = 0.0f;
  float step = 0.0f;
};

// From the bits of the smallest and the largest finite magnitude other than zero; largest is 0 when there is none.
[[nodiscard]] TOKENYARD_HD constexpr LogScale log_scale(std::uint32_t smallest, std::uint32_t largest) {
  if (largest == 0) return {};
  const float highest = log2_of(largest);
  const float floor = highest - kLogRange;
  const float lowest = log2_of(smallest);
  const float raised = lowest > floor ? lowest : floor;
  return {.lowest = raised, .step = (highest - raised) / static_cast<float>(kLogSteps)};
}

// What encode_log_level multiplies with.
[[nodiscard]] TOKENYARD_HD constexpr float inverse_step(LogScale scale) {
  return scale.step > 0.0f ? 1.0f / scale.step : 0.0f;
}

// The level of a finite magnitude, given by its bits.
[[nodiscard]] TOKENYARD_HD constexpr std::uint32_t encode_log_level(std::uint32_t magnitude,
                                                                    float lowest,
                                                                    float inverse) {
  if (magnitude == 0) return 0;
  const float above = log2_of(magnitude) - lowest;
  if (above < -1.0f) return 0;
  const float rounded = above * inverse + kRounder;
  const std::int32_t steps = static_cast<std::int32_t>(cast_bits<std::uint32_t>(rounded) - kRounderBits);
  const std::int32_t at_least = steps > 0 ? steps : 0;
  return static_cast<std::uint32_t>(at_least < kLogSteps ? at_least : kLogSteps) + 1;
}

[[nodiscard]] TOKENYARD_HD constexpr std::uint32_t encode_log_code(float value, float lowest, float inverse) {
  const std::uint32_t bits = cast_bits<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & kFloatMagnitude;
  if (magnitude > kFloatInfinity) return kLogNan;
  const std::uint32_t sign = bits >> 31 ? kLogSign : 0;
  if (magnitude == kFloatInfinity) return sign | kLogInfinity;
  return sign | encode_log_level(magnitude, lowest, inverse);
}

[[nodiscard]] TOKENYARD_HD constexpr float decode_log_code(std::uint32_t code, LogScale scale) {
  const std::uint32_t level = code & kLogLevelMask;
  if (level == kLogNan) return cast_bits<float>(kFloatNan);
  const std::uint32_t sign = (code & kLogSign) << 22;
  if (level == 0) return cast_bits<float>(sign);
  if (level == kLogInfinity) return cast_bits<float>(sign | kFloatInfinity);
  const float steps = static_cast<float>(static_cast<std::int32_t>(level) - 1);
  const float magnitude = exp2_of(scale.lowest + steps * scale.step);
  return cast_bits<float>(sign | cast_bits<std::uint32_t>(magnitude));
}

TOKENYARD_HD constexpr void store_log_float(std::byte* to, float value) {
  const std::uint32_t bits = cast_bits<std::uint32_t>(value);
  for (int i = 0; i < 4; ++i)
    to[i] = static_cast<std::byte>(bits >> (8 * i));
}

[[nodiscard]] TOKENYARD_HD constexpr float load_log_float(const std::byte* from) {
  std::uint32_t bits = 0;
  for (int i = 0; i < 4; ++i)
    bits |= static_cast<std::uint32_t>(from[i]) << (8 * i);
  return cast_bits<float>(bits);
}

[[nodiscard]] TOKENYARD_HD constexpr LogScale log_scale_of(const float* values, std::int64_t count) {
  std::uint32_t smallest = kFloatMagnitude;
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = cast_bits<std::uint32_t>(values[i]) & kFloatMagnitude;
    if (magnitude == 0 || magnitude >= kFloatInfinity) continue;
    if (magnitude < smallest) smallest = magnitude;
    if (magnitude > largest) largest = magnitude;
  }
  return log_scale(smallest, largest);
}

// One block of at most 128 values; writes log_block_bytes(count) bytes.
TOKENYARD_HD constexpr void encode_log_block(std::byte* to, const float* from, std::int64_t count) {
  const LogScale scale = log_scale_of(from, count);
  store_log_float(to, scale.lowest);
  store_log_float(to + 4, scale.step);
  to += kLogHeaderBytes;
  const float inverse = inverse_step(scale);
  std::uint32_t pending = 0;  // bits that are not yet stored
  int num_pending = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    pending |= encode_log_code(from[i], scale.lowest, inverse) << num_pending;
    for (num_pending += kLogCodeBits; num_pending >= 8; num_pending -= 8, pending >>= 8)
      *to++ = static_cast<std::byte>(pending & 0xFF);
  }
  if (num_pending > 0) *to = static_cast<std::byte>(pending);
}

TOKENYARD_HD constexpr void decode_log_block(float* to, const std::byte* from, std::int64_t count) {
  const LogScale scale{.lowest = load_log_float(from), .step = load_log_float(from + 4)};
  from += kLogHeaderBytes;
  for (std::int64_t i = 0; i < count; ++i) {
    // A code lies in two bytes.
    const std::byte* at = from + i * kLogCodeBits / 8;
    const std::uint32_t pair = static_cast<std::uint32_t>(at[0]) | (static_cast<std::uint32_t>(at[1]) << 8);
    to[i] = decode_log_code(pair >> (i * kLogCodeBits % 8), scale);
  }
}

}  // namespace tokenyard::protocol
