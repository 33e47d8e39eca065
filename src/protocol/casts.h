// SPDX-License-Identifier: Apache-2.0
// What a cast means: the scalar definition that every engine matches bit for bit.
//
// All casts go through fp32 and round once, to nearest even. Denormals are exact. A NaN becomes the target's one
// canonical NaN, which is positive, so NaN payloads never reach an output. bf16, f16 and f32 overflow to infinity;
// the two fp8 formats saturate, infinities included (the OCP saturating mode).
// Thread rule: pure functions. The thread's rounding mode must be to nearest, as it is by default.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
  #include <cuda_bf16.h>
  #include <cuda_fp16.h>
#endif

#include "protocol/host_device.h"

namespace tokenyard::protocol {

// A format is its description: sign bit, then kExponentBits, then kMantissaBits, low bits of `Bits`.
//   kHasInfinity     all-ones exponents mean infinity and NaN; otherwise only the all-ones magnitude is NaN
//   kSaturates       overflow and infinity encode as kLargestFinite instead of infinity
//   kLargestFinite   code of the largest finite magnitude
//   kNan             code of the canonical NaN
struct Bf16 {
  using Bits = std::uint16_t;
  static constexpr int kExponentBits = 8;
  static constexpr int kMantissaBits = 7;
  static constexpr int kBias = 127;
  static constexpr bool kHasInfinity = true;
  static constexpr bool kSaturates = false;
  static constexpr std::uint32_t kLargestFinite = 0x7F7F;
  static constexpr std::uint32_t kNan = 0x7FFF;
};

struct F16 {
  using Bits = std::uint16_t;
  static constexpr int kExponentBits = 5;
  static constexpr int kMantissaBits = 10;
  static constexpr int kBias = 15;
  static constexpr bool kHasInfinity = true;
  static constexpr bool kSaturates = false;
  static constexpr std::uint32_t kLargestFinite = 0x7BFF;
  static constexpr std::uint32_t kNan = 0x7FFF;
};

struct F8e4m3 {
  using Bits = std::uint8_t;
  static constexpr int kExponentBits = 4;
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr bool kHasInfinity = false;
  static constexpr bool kSaturates = true;
  static constexpr std::uint32_t kLargestFinite = 0x7E;  // 448
  static constexpr std::uint32_t kNan = 0x7F;
};

struct F8e5m2 {
  using Bits = std::uint8_t;
  static constexpr int kExponentBits = 5;
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr bool kHasInfinity = true;
  static constexpr bool kSaturates = true;
  static constexpr std::uint32_t kLargestFinite = 0x7B;  // 57344
  static constexpr std::uint32_t kNan = 0x7F;
};

struct F32 {
  using Bits = std::uint32_t;
  static constexpr int kExponentBits = 8;
  static constexpr int kMantissaBits = 23;
  static constexpr int kBias = 127;
  static constexpr bool kHasInfinity = true;
  static constexpr bool kSaturates = false;
  static constexpr std::uint32_t kLargestFinite = 0x7F7FFFFF;
  static constexpr std::uint32_t kNan = 0x7FFFFFFF;
};

inline constexpr std::uint32_t kFloatMagnitude = 0x7FFFFFFF;
inline constexpr std::uint32_t kFloatInfinity = 0x7F800000;
inline constexpr std::uint32_t kFloatNan = F32::kNan;

// What the casts of a format compute with, in terms of fp32 bits.
template <class Format>
struct CastConstants {
  static constexpr int kSignBit = Format::kExponentBits + Format::kMantissaBits;
  static constexpr int kShift = 23 - Format::kMantissaBits;  // places between the two mantissas
  static constexpr std::uint32_t kMagnitude = (1u << kSignBit) - 1u;
  static constexpr std::uint32_t kMaxExponent = (1u << Format::kExponentBits) - 1u;
  // bf16 and f32 have fp32's exponent, so that their denormals are no special case.
  static constexpr bool kWideExponent = Format::kExponentBits == 8;
  static constexpr std::uint32_t kRebias = std::uint32_t(127 - Format::kBias) << 23;
  // The smallest normal of the format, as fp32 bits; as a float it also turns an exponent of 0 into a denormal's.
  static constexpr std::uint32_t kSmallestNormal = kRebias + (1u << 23);
  // Adding this float leaves the magnitude, in units of the smallest denormal, in the low mantissa bits, rounded
  // to nearest even by the addition.
  static constexpr std::uint32_t kDenormalMagic = kSmallestNormal + (std::uint32_t(kShift) << 23);
  // Infinity and NaN: the all-ones exponent (rebiased already) becomes fp32's.
  static constexpr std::uint32_t kInfinityRebias = (0xFFu << 23) - (kMaxExponent << 23) - kRebias;
  // What a magnitude that is too large becomes; infinity is the code after the largest finite one.
  static constexpr std::uint32_t kOverflow = Format::kSaturates ? Format::kLargestFinite : Format::kLargestFinite + 1;
};

// nvcc takes std::bit_cast in device code only with --expt-relaxed-constexpr; the built-in needs no flag.
template <class To, class From>
[[nodiscard]] TOKENYARD_HD constexpr To cast_bits(From from) {
#if defined(__CUDACC__)
  return __builtin_bit_cast(To, from);
#else
  return std::bit_cast<To>(from);
#endif
}

// The value of a code; exact. A NaN gives some NaN.
template <class Format>
[[nodiscard]] TOKENYARD_HD constexpr float decode(typename Format::Bits bits) {
  using C = CastConstants<Format>;
  const std::uint32_t code = bits;
  if constexpr (C::kWideExponent) {
    return cast_bits<float>(code << C::kShift);
  } else {
    const std::uint32_t sign = (code >> C::kSignBit) << 31;
    const std::uint32_t magnitude = (code & C::kMagnitude) << C::kShift;
    if constexpr (!Format::kHasInfinity) {
      if ((code & C::kMagnitude) == C::kMagnitude) return cast_bits<float>(kFloatNan);
    }
    std::uint32_t value = magnitude + C::kRebias;
    if (magnitude < (1u << 23)) {
      const float raised = cast_bits<float>(magnitude + C::kSmallestNormal);
      value = cast_bits<std::uint32_t>(raised - cast_bits<float>(C::kSmallestNormal));
    } else if (Format::kHasInfinity && magnitude >= (C::kMaxExponent << 23)) {
      value += C::kInfinityRebias;
    }
    return cast_bits<float>(sign | value);
  }
}

// The code nearest to a value; ties to even. GPUs do it in one instruction, NaN included, where the format has 16 bits.
template <class Format>
[[nodiscard]] TOKENYARD_HD constexpr typename Format::Bits encode(float value) {
  using C = CastConstants<Format>;
  using Bits = typename Format::Bits;
#if defined(__CUDA_ARCH__)
  if (!__builtin_is_constant_evaluated()) {
    if constexpr (std::is_same_v<Format, Bf16>) return __bfloat16_as_ushort(__float2bfloat16_rn(value));
    if constexpr (std::is_same_v<Format, F16>) return __half_as_ushort(__float2half_rn(value));
  }
#endif
  const std::uint32_t bits = cast_bits<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & kFloatMagnitude;
  if (magnitude > kFloatInfinity) return static_cast<Bits>(Format::kNan);
  if constexpr (C::kShift == 0) {
    return static_cast<Bits>(bits);
  } else {
    std::uint32_t code = 0;
    if (!C::kWideExponent && magnitude < C::kSmallestNormal) {
      const float rounded = cast_bits<float>(magnitude) + cast_bits<float>(C::kDenormalMagic);
      code = cast_bits<std::uint32_t>(rounded) - C::kDenormalMagic;
    } else {
      const std::uint32_t half_less_one = (1u << (C::kShift - 1)) - 1u;
      const std::uint32_t odd = (magnitude >> C::kShift) & 1u;
      code = (magnitude - C::kRebias + half_less_one + odd) >> C::kShift;
      if (code > C::kOverflow) code = C::kOverflow;
    }
    return static_cast<Bits>(((bits >> 31) << C::kSignBit) | code);
  }
}

// An OCP MX scale: 2^(code - 127), and NaN for 0xFF.
[[nodiscard]] TOKENYARD_HD constexpr float decode_e8m0(std::uint8_t code) {
  if (code == 0xFF) return cast_bits<float>(kFloatNan);
  if (code == 0) return cast_bits<float>(std::uint32_t{1} << 22);  // 2^-127 is a denormal
  return cast_bits<float>(std::uint32_t{code} << 23);
}

}  // namespace tokenyard::protocol
