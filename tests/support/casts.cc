// SPDX-License-Identifier: Apache-2.0
#include "support/casts.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/check.h"

namespace tokenyard::support {
namespace {

struct FloatFormat {
  int bits;
  int mantissa_bits;
  int bias;
  double max_finite;
  bool saturates;
  std::uint32_t nan_bits;
};

FloatFormat format_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return {16, 7, 127, std::ldexp(2.0 - 0x1p-7, 127), false, 0x7FFF};
    case Dtype::kF16:
      return {16, 10, 15, 65504.0, false, 0x7FFF};
    case Dtype::kF8e4m3:
      return {8, 3, 7, 448.0, true, 0x7F};
    default:
      throw CheckFailure("no reference cast for " + std::string(name(dtype)));
  }
}

}  // namespace

std::uint32_t encode(Dtype dtype, float value) {
  if (dtype == Dtype::kF32) return std::bit_cast<std::uint32_t>(value);
  const FloatFormat format = format_of(dtype);
  if (std::isnan(value)) return format.nan_bits;
  const std::uint32_t sign = std::signbit(value) ? 1U << (format.bits - 1) : 0U;
  const auto exponent_of_max = static_cast<std::uint32_t>(std::ilogb(format.max_finite) + format.bias);
  const double magnitude = std::fabs(static_cast<double>(value));
  const int min_exponent = 1 - format.bias;
  const int exponent =
      magnitude == 0.0 || std::isinf(magnitude) ? min_exponent : std::max(std::ilogb(magnitude), min_exponent);
  const double quantum = std::ldexp(1.0, exponent - format.mantissa_bits);
  double rounded = std::isinf(magnitude) ? magnitude : std::nearbyint(magnitude / quantum) * quantum;
  if (rounded > format.max_finite) {
    if (!format.saturates) return sign | ((exponent_of_max + 1) << format.mantissa_bits);
    rounded = format.max_finite;
  }
  const double one = std::ldexp(1.0, min_exponent);  // the smallest normal number
  if (rounded < one) {
    return sign | static_cast<std::uint32_t>(std::ldexp(rounded, format.mantissa_bits - min_exponent));
  }
  const int rounded_exponent = std::ilogb(rounded);
  const double fraction = std::ldexp(rounded, -rounded_exponent) - 1.0;
  return sign | (static_cast<std::uint32_t>(rounded_exponent + format.bias) << format.mantissa_bits) |
         static_cast<std::uint32_t>(std::ldexp(fraction, format.mantissa_bits));
}

float decode(Dtype dtype, std::uint32_t bits) {
  if (dtype == Dtype::kF32) return std::bit_cast<float>(bits);
  const FloatFormat format = format_of(dtype);
  const std::uint32_t mantissa = bits & ((1U << format.mantissa_bits) - 1U);
  const int exponent_bits = format.bits - 1 - format.mantissa_bits;
  const std::uint32_t biased = (bits >> format.mantissa_bits) & ((1U << exponent_bits) - 1U);
  const float sign = (bits >> (format.bits - 1)) != 0 ? -1.0F : 1.0F;
  if (format.saturates) {  // no infinity: only the all-ones pattern is special
    if (biased == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  } else if (biased == (1U << exponent_bits) - 1U) {
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  const double significand = static_cast<double>(mantissa + (biased == 0 ? 0U : 1U << format.mantissa_bits));
  const int exponent = (biased == 0 ? 1 : static_cast<int>(biased)) - format.bias - format.mantissa_bits;
  return sign * static_cast<float>(std::ldexp(significand, exponent));
}

float load(Dtype dtype, const std::byte* data, std::int64_t index) {
  std::uint32_t bits = 0;
  const auto size = static_cast<std::size_t>(size_of(dtype));
  std::memcpy(&bits, data + index * size_of(dtype), size);
  return decode(dtype, bits);
}

void store(Dtype dtype, std::byte* data, std::int64_t index, float value) {
  const std::uint32_t bits = encode(dtype, value);
  std::memcpy(data + index * size_of(dtype), &bits, static_cast<std::size_t>(size_of(dtype)));
}

}  // namespace tokenyard::support
