// SPDX-License-Identifier: Apache-2.0
// The scalar casts against a reference that knows only the formats' definition, in double precision.
#include "protocol/casts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace tokenyard::protocol {
namespace {

// What the formats' standards say, written apart from casts.h.
struct Definition {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool infinity;      // all-ones exponents are infinity and NaN
  bool saturates;     // too large: the largest finite value instead of infinity
  double largest;     // finite
  std::uint32_t nan;  // canonical
};

template <class Format>
Definition definition();

template <>
Definition definition<Bf16>() {
  return {8, 7, 127, true, false, 0x1.FEp127, 0x7FFF};
}

template <>
Definition definition<F16>() {
  return {5, 10, 15, true, false, 65504.0, 0x7FFF};
}

template <>
Definition definition<F8e4m3>() {
  return {4, 3, 7, false, true, 448.0, 0x7F};
}

template <>
Definition definition<F8e5m2>() {
  return {5, 2, 15, true, true, 57344.0, 0x7F};
}

double value_of(const Definition& format, std::uint32_t code) {
  const std::uint32_t mantissa = code & ((1u << format.mantissa_bits) - 1u);
  const std::uint32_t max_exponent = (1u << format.exponent_bits) - 1u;
  const std::uint32_t exponent = (code >> format.mantissa_bits) & max_exponent;
  const bool negative = (code >> (format.mantissa_bits + format.exponent_bits)) & 1u;
  double magnitude = 0.0;
  const double fraction = std::ldexp(double(mantissa), -format.mantissa_bits);
  const bool all_ones = exponent == max_exponent && mantissa == (1u << format.mantissa_bits) - 1u;
  if (format.infinity && exponent == max_exponent) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (!format.infinity && all_ones) {
    magnitude = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, 1 - format.bias);
  } else {
    magnitude = std::ldexp(1.0 + fraction, int(exponent) - format.bias);
  }
  return negative ? -magnitude : magnitude;
}

// The nearest value of the format, ties to even, by rounding multiples of the quantum in double.
double nearest(const Definition& format, float value) {
  const double magnitude = std::abs(double(value));
  double rounded = magnitude;
  if (std::isfinite(value) && magnitude > 0) {
    const int exponent = std::max(std::ilogb(magnitude), 1 - format.bias);
    const double quantum = std::ldexp(1.0, exponent - format.mantissa_bits);
    rounded = std::nearbyint(magnitude / quantum) * quantum;
  }
  if (rounded > format.largest) rounded = format.saturates ? format.largest : std::numeric_limits<double>::infinity();
  return std::signbit(value) ? -rounded : rounded;
}

template <class Format>
::testing::AssertionResult encodes_right(float value) {
  const Definition format = definition<Format>();
  const std::uint32_t code = encode<Format>(value);
  const auto wrong = [&](double expected) {
    return ::testing::AssertionFailure() << std::hexfloat << value << " became code 0x" << std::hex << code
                                         << ", expected the code of " << std::hexfloat << expected;
  };
  if (std::isnan(value)) {
    return code == format.nan ? ::testing::AssertionSuccess() : wrong(std::numeric_limits<double>::quiet_NaN());
  }
  const double expected = nearest(format, value);
  const double got = value_of(format, code);
  const bool same = got == expected && std::signbit(got) == std::signbit(expected);
  return same ? ::testing::AssertionSuccess() : wrong(expected);
}

template <class Format>
class CastsTest : public ::testing::Test {};

using NarrowFormats = ::testing::Types<Bf16, F16, F8e4m3, F8e5m2>;
TYPED_TEST_SUITE(CastsTest, NarrowFormats);

TYPED_TEST(CastsTest, EveryCodeDecodesToItsValueAndEncodesBack) {
  using Format = TypeParam;
  const Definition format = definition<Format>();
  const std::uint32_t num_codes = 1u << (8 * sizeof(typename Format::Bits));
  for (std::uint32_t code = 0; code < num_codes; ++code) {
    const float decoded = decode<Format>(static_cast<typename Format::Bits>(code));
    const double expected = value_of(format, code);
    const std::uint32_t back = encode<Format>(decoded);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(decoded)) << "code 0x" << std::hex << code;
      ASSERT_EQ(back, format.nan) << "code 0x" << std::hex << code;
      continue;
    }
    ASSERT_EQ(double(decoded), expected) << "code 0x" << std::hex << code;
    ASSERT_EQ(std::signbit(decoded), std::signbit(expected)) << "code 0x" << std::hex << code;
    if (std::isinf(expected) && format.saturates) {
      ASSERT_EQ(value_of(format, back), std::copysign(format.largest, expected));
    } else {
      ASSERT_EQ(back, code);
    }
  }
}

TYPED_TEST(CastsTest, EveryExponentRoundsToNearestEven) {
  using Format = TypeParam;
  // The kept mantissa bits, the half bit and one below in all combinations; the rest all 0, just above 0 and all 1.
  const int free_bits = std::min(Format::kMantissaBits + 2, 23);
  const int rest_bits = 23 - free_bits;
  for (std::uint32_t sign_exponent = 0; sign_exponent < 512; ++sign_exponent) {
    for (std::uint32_t upper = 0; upper < (1u << free_bits); ++upper) {
      for (const std::uint32_t rest : {0u, 1u, (1u << rest_bits) - 1u}) {
        const std::uint32_t bits = (sign_exponent << 23) | (upper << rest_bits) | rest;
        ASSERT_TRUE(encodes_right<Format>(std::bit_cast<float>(bits)));
      }
    }
  }
}

TYPED_TEST(CastsTest, TiesBetweenNeighboursGoToTheEvenCode) {
  using Format = TypeParam;
  const Definition format = definition<Format>();
  for (std::uint32_t code = 0; code < Format::kLargestFinite; ++code) {
    const double middle = 0.5 * (value_of(format, code) + value_of(format, code + 1));
    const auto tie = static_cast<float>(middle);
    ASSERT_EQ(double(tie), middle);
    ASSERT_EQ(encode<Format>(tie), code + (code & 1u));
    ASSERT_EQ(encode<Format>(std::nextafter(tie, 0.0f)), code);
    ASSERT_EQ(encode<Format>(std::nextafter(tie, std::numeric_limits<float>::infinity())), code + 1);
  }
}

TYPED_TEST(CastsTest, RandomFloatsMatchTheReference) {
  using Format = TypeParam;
  std::mt19937 random(7);
  for (int i = 0; i < 500'000; ++i)
    ASSERT_TRUE(encodes_right<Format>(std::bit_cast<float>(std::uint32_t(random()))));
}

TYPED_TEST(CastsTest, OverflowAndInfinity) {
  using Format = TypeParam;
  const std::uint32_t sign = 1u << CastConstants<Format>::kSignBit;
  const std::uint32_t too_large = Format::kSaturates ? Format::kLargestFinite : Format::kLargestFinite + 1;
  for (const float value : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::max()}) {
    EXPECT_EQ(encode<Format>(value), too_large);
    EXPECT_EQ(encode<Format>(-value), sign | too_large);
  }
  for (const std::uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFFFFFFFFu, 0x7FFFFFFFu}) {
    EXPECT_EQ(encode<Format>(std::bit_cast<float>(nan)), Format::kNan) << std::hex << nan;
  }
  EXPECT_EQ(encode<Format>(-0.0f), sign);
  EXPECT_EQ(encode<Format>(std::numeric_limits<float>::denorm_min()), 0u);
}

TEST(CastsValuesTest, KnownCodes) {
  EXPECT_EQ(encode<F8e4m3>(448.0f), 0x7E);
  EXPECT_EQ(encode<F8e4m3>(-1000.0f), 0xFE);
  EXPECT_EQ(encode<F8e4m3>(0x1p-9f), 0x01);
  EXPECT_EQ(encode<F8e4m3>(0x1p-10f), 0x00);
  EXPECT_EQ(encode<F8e4m3>(0x1.8p-10f), 0x01);
  EXPECT_EQ(encode<F8e5m2>(57344.0f), 0x7B);
  EXPECT_EQ(encode<F8e5m2>(0x1p-16f), 0x01);
  EXPECT_EQ(encode<F16>(65519.0f), 0x7BFF);
  EXPECT_EQ(encode<F16>(65520.0f), 0x7C00);
  EXPECT_EQ(encode<F16>(0x1p-24f), 0x0001);
  EXPECT_EQ(encode<F16>(0x1p-25f), 0x0000);
  EXPECT_EQ(encode<Bf16>(1.0f), 0x3F80);
  EXPECT_EQ(encode<Bf16>(0x1p-133f), 0x0001);
  EXPECT_EQ(encode<Bf16>(std::numeric_limits<float>::max()), 0x7F80);
}

TEST(CastsValuesTest, Fp32KeepsEverythingButNanPayloads) {
  std::mt19937 random(11);
  for (int i = 0; i < 100'000; ++i) {
    const std::uint32_t bits = std::uint32_t(random());
    const bool nan = (bits & kFloatMagnitude) > kFloatInfinity;
    ASSERT_EQ(encode<F32>(std::bit_cast<float>(bits)), nan ? 0x7FFFFFFFu : bits);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(decode<F32>(bits)), bits);
  }
  EXPECT_EQ(encode<F32>(std::bit_cast<float>(0xFF800001u)), 0x7FFFFFFFu);
  EXPECT_EQ(encode<F32>(-std::numeric_limits<float>::infinity()), 0xFF800000u);
}

TEST(CastsValuesTest, E8m0IsAPowerOfTwo) {
  for (int code = 0; code < 255; ++code) {
    ASSERT_EQ(double(decode_e8m0(static_cast<std::uint8_t>(code))), std::ldexp(1.0, code - 127)) << code;
  }
  EXPECT_TRUE(std::isnan(decode_e8m0(0xFF)));
}

static_assert(encode<F16>(1.0f) == 0x3C00 && decode<F8e5m2>(0x01) == 0x1p-16f, "casts are constant expressions");

}  // namespace
}  // namespace tokenyard::protocol
