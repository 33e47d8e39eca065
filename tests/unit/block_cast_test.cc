// SPDX-License-Identifier: Apache-2.0
// Casts of rows to blocks of fp8 against their definition, bit for bit, on every instruction set of this machine, and
// the error that the definition allows.
#include "protocol/block_cast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tokenyard/error.h"

#include "engine/host/wire_rows.h"
#include "unit/block_cast_reference.h"
#include "unit/rows_reference.h"

namespace tokenyard::engine::host {
namespace {

using reference::kCasts;

std::vector<float> floats_of(const std::vector<std::byte>& row, Dtype dtype) {
  std::vector<float> values(row.size() / bytes_of(dtype, 1));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = load(dtype, row.data(), i);
  return values;
}

std::vector<std::byte> bytes_of_floats(const std::vector<float>& values) {
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
  return {bytes, bytes + values.size() * sizeof(float)};
}

reference::CastRow cast_row_on_this_target(const std::vector<std::byte>& content, Dtype dtype, DispatchCast cast) {
  const auto n = static_cast<std::int64_t>(content.size() / bytes_of(dtype, 1));
  const protocol::RowBytes bytes = protocol::cast_row_bytes(cast, n);
  const auto misalignment = content.size() % 13;
  const Row from(content, misalignment);
  Row values(static_cast<std::size_t>(bytes.values), misalignment * 3 % 16);
  Row scales(static_cast<std::size_t>(bytes.scales), misalignment * 5 % 16);
  cast_row_to_fp8_blocks({.values = values.data(),
                          .scales = scales.data(),
                          .from = from.data(),
                          .from_dtype = dtype,
                          .n = n,
                          .cast = cast});
  EXPECT_TRUE(values.canaries_live() && scales.canaries_live()) << n << " values";
  return {.values = values.content(), .scales = scales.content()};
}

void check_row(const std::vector<std::byte>& content, Dtype dtype, DispatchCast cast) {
  const std::vector<float> values = floats_of(content, dtype);
  const reference::CastRow expected = reference::cast_row(values, cast);
  std::vector<std::uint8_t> codes(values.size());
  for (std::size_t first = 0; first < values.size(); first += 128) {
    const auto count = static_cast<std::int64_t>(std::min<std::size_t>(128, values.size() - first));
    const float scale = protocol::cast_block(codes.data() + first, values.data() + first, count, cast);
    ASSERT_EQ(scale, reference::scale_of(expected.scales.data(), first / 128, cast));
  }
  ASSERT_EQ(std::memcmp(codes.data(), expected.values.data(), codes.size()), 0) << "scalar definition";
  on_every_target([&] {
    const reference::CastRow row = cast_row_on_this_target(content, dtype, cast);
    ASSERT_EQ(row.scales, expected.scales) << name(dtype) << ", " << values.size() << " values, cast " << int(cast);
    ASSERT_EQ(row.values, expected.values) << name(dtype) << ", " << values.size() << " values, cast " << int(cast);
  });
}

TEST(BlockCastTest, RowsEqualTheDefinition) {
  std::mt19937 random(11);
  for (const DispatchCast cast : kCasts) {
    for (const Dtype dtype : kOutputs) {
      for (const std::size_t n : {1, 2, 7, 31, 33, 64, 127, 128, 129, 2048, 2880, 7168}) {
        ASSERT_NO_FATAL_FAILURE(check_row(random_row(dtype, n, random), dtype, cast));
      }
    }
  }
}

TEST(BlockCastTest, EveryBf16ValueInBlocksEqualsTheDefinition) {
  std::vector<std::byte> row(2 * 65536);
  for (std::uint32_t code = 0; code < 65536; ++code) {
    // Neighbours in value; then far apart.
    const auto near = static_cast<std::uint16_t>(code);
    std::memcpy(row.data() + std::size_t{2} * code, &near, 2);
  }
  std::vector<std::byte> spread(row.size());
  for (std::size_t i = 0; i < 65536; ++i)
    std::memcpy(spread.data() + 2 * i, row.data() + 2 * (i * 40503 % 65536), 2);
  for (const DispatchCast cast : kCasts) {
    ASSERT_NO_FATAL_FAILURE(check_row(row, Dtype::kBf16, cast));
    ASSERT_NO_FATAL_FAILURE(check_row(spread, Dtype::kBf16, cast));
  }
}

TEST(BlockCastTest, EveryBf16ValueAloneEqualsTheDefinition) {
  for (const DispatchCast cast : kCasts) {
    std::vector<reference::CastRow> expected;
    for (std::uint32_t code = 0; code < 65536; ++code)
      expected.push_back(reference::cast_row({decode<Bf16>(static_cast<std::uint16_t>(code))}, cast));
    on_every_target([&] {
      for (std::uint32_t code = 0; code < 65536; ++code) {
        const auto from = static_cast<std::uint16_t>(code);
        std::byte value{};
        std::vector<std::byte> scale(expected[code].scales.size());
        cast_row_to_fp8_blocks({.values = &value,
                                .scales = scale.data(),
                                .from = reinterpret_cast<const std::byte*>(&from),
                                .n = 1,
                                .cast = cast});
        ASSERT_EQ(value, expected[code].values[0]) << "bf16 " << code;
        ASSERT_EQ(scale, expected[code].scales) << "bf16 " << code;
      }
    });
  }
}

TEST(BlockCastTest, EveryExponentOfFloatsEqualsTheDefinition) {
  std::mt19937 random(12);
  for (const DispatchCast cast : kCasts) {
    std::vector<float> row;
    for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
      for (const std::uint32_t mantissa : {0u, 1u, 0x3FFFFFu, 0x5FFFFFu, 0x600000u, 0x600001u, 0x7FFFFFu}) {
        // A whole block below its first value, and all rounding steps of it.
        const std::uint32_t first = (exponent << 23) | mantissa;
        row.push_back(std::bit_cast<float>(first));
        for (int i = 1; i < 128; ++i) {
          const std::uint32_t below = std::min(first, std::uint32_t(random_bits(random) % 20) << 23);
          const std::uint32_t rounding = ((random_bits(random) % 16) << 19) + random_bits(random) % 3 - 1;
          const std::uint32_t bits = std::min(first, (first - below) ^ (rounding & 0x7FFFFF));
          row.push_back(std::bit_cast<float>(bits | ((random_bits(random) % 2) << 31)));
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(check_row(bytes_of_floats(row), Dtype::kF32, cast));
  }
}

TEST(BlockCastTest, EveryFp8CodeSurvives) {
  std::vector<float> row(256);
  for (std::size_t code = 0; code < 256; ++code)
    row[code] = float(reference::fp8_value(static_cast<std::uint8_t>(code)));
  on_every_target([&] {
    for (const DispatchCast cast : kCasts) {
      for (const float factor : {1.0f, 0x1p-100f, 0x1p100f}) {
        std::vector<float> scaled = row;
        for (float& value : scaled)
          value *= factor;
        const reference::CastRow result = cast_row_on_this_target(bytes_of_floats(scaled), Dtype::kF32, cast);
        for (std::size_t code = 0; code < 256; ++code) {
          const std::size_t expected = code % 128 == 127 ? 127 : code;
          ASSERT_EQ(std::to_integer<std::size_t>(result.values[code]), expected);
        }
        ASSERT_EQ(reference::scale_of(result.scales.data(), 1, cast), factor);
      }
    }
  });
}

TEST(BlockCastTest, SpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  on_every_target([&] {
    for (const DispatchCast cast : kCasts) {
      const std::vector<float> row = {infinity, -infinity, nan, -nan, -0.0f, 0.0f, 224.0f};
      const reference::CastRow result = cast_row_on_this_target(bytes_of_floats(row), Dtype::kF32, cast);
      const std::vector<std::byte> expected = {std::byte{0x7E}, std::byte{0xFE}, std::byte{0x7F}, std::byte{0x7F},
                                               std::byte{0x80}, std::byte{0x00}, std::byte{0x7E}};
      EXPECT_EQ(result.values, expected) << "neither infinity nor NaN changes the scale";
      EXPECT_EQ(reference::scale_of(result.scales.data(), 0, cast), 0.5);
      for (const std::vector<float>& blank : {std::vector<float>(128, 0.0f),
                                              std::vector<float>(5, -0.0f),
                                              std::vector<float>(9, nan),
                                              {infinity, 0.0f}}) {
        const reference::CastRow zeros = cast_row_on_this_target(bytes_of_floats(blank), Dtype::kF32, cast);
        EXPECT_EQ(reference::scale_of(zeros.scales.data(), 0, cast), 1.0);
      }
    }
  });
}

TEST(BlockCastTest, ScalesArePowersOfTwoFromTheBits) {
  for (int exponent = -100; exponent <= 119; ++exponent) {
    const float exact = std::ldexp(448.0f, exponent);
    const auto code = [](float largest) { return protocol::power_of_two_scale(std::bit_cast<std::uint32_t>(largest)); };
    EXPECT_EQ(code(exact), exponent + 127) << exact;
    EXPECT_EQ(code(std::nextafter(exact, 0.0f)), exponent + 127) << exact;
    EXPECT_EQ(code(std::nextafter(exact, HUGE_VALF)), exponent + 128) << exact;
  }
  EXPECT_EQ(protocol::power_of_two_scale(1), 1) << "the smallest denormal";
  EXPECT_EQ(protocol::power_of_two_scale(0x7F7FFFFF), 247) << "the largest float";
}

// A block whose magnitudes spread over 2^0 to 2^40 below a random exponent.
void fill_block(std::vector<float>& row, std::size_t first, std::mt19937& random) {
  const std::uint32_t top = random_bits(random) % 254 + 1;
  const std::uint32_t spread = random_bits(random) % 41;
  for (std::size_t i = first; i < std::min(first + 128, row.size()); ++i) {
    const std::uint32_t bits = random_bits(random);
    const std::uint32_t below = spread == 0 ? 0 : (bits >> 8) % (spread + 1);
    row[i] = std::bit_cast<float>((bits & 0x807FFFFFu) | ((top > below ? top - below : 0) << 23));
  }
}

TEST(BlockCastTest, ErrorsKeepTheBound) {
  constexpr std::size_t kN = 7168;
  std::mt19937 random(13);
  std::vector<float> row(kN);
  std::vector<std::byte> values(kN);
  std::vector<std::byte> scales(4 * kN / 128);
  for (std::size_t done = 0; done < 10'000'000; done += kN) {
    for (std::size_t first = 0; first < kN; first += 128)
      fill_block(row, first, random);
    for (const DispatchCast cast : kCasts) {
      cast_row_to_fp8_blocks({.values = values.data(),
                              .scales = scales.data(),
                              .from = reinterpret_cast<const std::byte*>(row.data()),
                              .from_dtype = Dtype::kF32,
                              .n = kN,
                              .cast = cast});
      const double slack = cast == DispatchCast::kFp8Block128 ? 1 + 0x1p-18 : 1;
      for (std::size_t i = 0; i < kN; ++i) {
        const double scale = reference::scale_of(scales.data(), i / 128, cast);
        const double product = reference::fp8_value(std::to_integer<std::uint8_t>(values[i])) * scale;
        const double x = row[i];
        const double bound = std::max(std::abs(x) / 17, scale * 0x1p-10) * slack;
        // 1/17 itself is rounded in double.
        ASSERT_LE(std::abs(product - x), bound * (1 + 0x1p-50)) << x << " cast " << int(cast);
        if (float(product) == product || std::abs(product) > std::numeric_limits<float>::max()) continue;
        ASSERT_LE(std::abs(double(float(product)) - x), bound * (1 + 0x1p-18) + 0x1p-150) << x << " as fp32";
      }
    }
  }
}

TEST(BlockCastTest, TheBoundIsReached) {
  for (const DispatchCast cast : kCasts) {
    const std::vector<float> row = {448.0f, 1.0625f, 0x1p-10f};
    const reference::CastRow result = cast_row_on_this_target(bytes_of_floats(row), Dtype::kF32, cast);
    EXPECT_EQ(reference::fp8_value(std::to_integer<std::uint8_t>(result.values[1])), 1.0) << "1/17 of 1.0625 is lost";
    EXPECT_EQ(reference::fp8_value(std::to_integer<std::uint8_t>(result.values[2])), 0.0) << "half a denormal is lost";
  }
}

TEST(BlockCastTest, SizesAndMisuse) {
  using protocol::cast_row_bytes;
  EXPECT_EQ(cast_row_bytes(DispatchCast::kFp8Block128, 1).scales, 4);
  EXPECT_EQ(cast_row_bytes(DispatchCast::kFp8Block128PowerOfTwo, 129).scales, 8);
  EXPECT_EQ(cast_row_bytes(DispatchCast::kFp8Block128Ue8m0, 129).scales, 2);
  EXPECT_EQ(cast_row_bytes(DispatchCast::kFp8Block128Ue8m0, 2880).values, 2880);
  EXPECT_EQ(cast_row_bytes(DispatchCast::kNone, 128).values, 0);
  std::byte byte{};
  EXPECT_THROW(cast_row_to_fp8_blocks({.values = &byte, .scales = &byte, .from = &byte, .from_dtype = Dtype::kI32}),
               Error);
  EXPECT_THROW(cast_row_to_fp8_blocks({.from_dtype = Dtype::kF8e4m3}), Error);
  EXPECT_THROW(cast_row_to_fp8_blocks({.cast = DispatchCast::kNone}), Error);
  cast_row_to_fp8_blocks({});
}

}  // namespace
}  // namespace tokenyard::engine::host
