// SPDX-License-Identifier: Apache-2.0
// The logarithmic wire against its definition, bit for bit, on every instruction set of this machine, and the error
// that it promises, in double precision.
#include "protocol/log_wire.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "engine/host/wire_rows.h"
#include "unit/log_wire_reference.h"
#include "unit/rows_reference.h"

namespace tokenyard::engine::host {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

float float_of(std::uint64_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
}

void check_scalar(const std::vector<float>& row, const reference::LogRow& expected) {
  std::vector<std::byte> bytes(expected.bytes.size());
  std::vector<float> decoded(row.size());
  for (std::size_t first = 0; first < row.size(); first += 128) {
    const auto count = static_cast<std::int64_t>(std::min<std::size_t>(128, row.size() - first));
    std::byte* block = bytes.data() + protocol::log_row_bytes(static_cast<std::int64_t>(first));
    protocol::encode_log_block(block, row.data() + first, count);
    protocol::decode_log_block(decoded.data() + first, block, count);
  }
  ASSERT_EQ(bytes, expected.bytes) << "scalar definition, " << row.size() << " values";
  ASSERT_TRUE(same_bits(decoded, expected.decoded)) << "scalar definition, " << row.size() << " values";
}

void check_row(const std::vector<float>& row) {
  const reference::LogRow expected = reference::log_row(row);
  const auto n = static_cast<std::int64_t>(row.size());
  ASSERT_EQ(protocol::log_row_bytes(n), static_cast<std::int64_t>(expected.bytes.size()));
  ASSERT_NO_FATAL_FAILURE(check_scalar(row, expected));
  on_every_target([&] {
    for (const std::size_t misalignment : {0, 4, 7}) {
      Row values(row.size() * sizeof(float), misalignment);
      if (n > 0) std::memcpy(values.data(), row.data(), row.size() * sizeof(float));
      Row wire(expected.bytes.size(), misalignment * 5 % 16);
      encode_log_row(wire.data(), reinterpret_cast<const float*>(values.data()), n);
      ASSERT_EQ(wire.content(), expected.bytes) << n << " values";
      ASSERT_TRUE(wire.canaries_live()) << n << " values";
      decode_log_row(reinterpret_cast<float*>(values.data()), wire.data(), n);
      ASSERT_TRUE(n == 0 || std::memcmp(values.data(), expected.decoded.data(), row.size() * sizeof(float)) == 0) << n;
      ASSERT_TRUE(values.canaries_live()) << n << " values";
    }
  });
}

// A block of magnitudes that spread over at most `spread` powers of two below a random exponent; some are special.
void append_block(std::vector<float>& row, std::size_t count, bool specials, std::mt19937& random) {
  const std::uint32_t top = random_bits(random) % 255;
  const std::uint32_t spread = random_bits(random) % 50;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = random_bits(random);
    const std::uint32_t below = (bits >> 8) % (spread + 1);
    float value = float_of((bits & 0x807FFFFFu) | ((top > below ? top - below : 0) << 23));
    if (specials && random_bits(random) % 16 == 0) value = float_of(0x7F800000u | (bits & 0x80000001u));
    if (specials && random_bits(random) % 16 == 0) value = float_of(bits & 0x80000003u);
    row.push_back(value);
  }
}

TEST(LogWireTest, RowsEqualTheDefinition) {
  std::mt19937 random(31);
  for (const std::size_t n : {0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 127, 128, 129, 255, 2048, 2880, 7168}) {
    for (const bool specials : {false, true}) {
      std::vector<float> row;
      while (row.size() < n)
        append_block(row, std::min<std::size_t>(128, n - row.size()), specials, random);
      ASSERT_NO_FATAL_FAILURE(check_row(row));
    }
  }
}

TEST(LogWireTest, EveryBf16ValueEqualsTheDefinition) {
  std::vector<float> near;
  std::vector<float> spread;
  for (std::uint32_t code = 0; code < 65536; ++code) {
    near.push_back(float_of(std::uint64_t{code} << 16));
    spread.push_back(float_of(std::uint64_t{code * 40503u % 65536u} << 16));
  }
  ASSERT_NO_FATAL_FAILURE(check_row(near));
  ASSERT_NO_FATAL_FAILURE(check_row(spread));
  std::vector<reference::LogRow> expected;
  for (const float value : near)
    expected.push_back(reference::log_row({value}));
  on_every_target([&] {
    std::vector<std::byte> bytes(10);
    for (std::size_t code = 0; code < near.size(); ++code) {
      encode_log_row(bytes.data(), &near[code], 1);
      ASSERT_EQ(bytes, expected[code].bytes) << "bf16 " << code;
      float decoded = 0;
      decode_log_row(&decoded, bytes.data(), 1);
      ASSERT_TRUE(same_bits({decoded}, expected[code].decoded)) << "bf16 " << code;
    }
  });
}

TEST(LogWireTest, EveryExponentEqualsTheDefinition) {
  std::mt19937 random(32);
  std::vector<float> row;
  for (std::uint32_t exponent = 0; exponent < 256; ++exponent) {
    // Around the ends of the mantissa's interval, and anything else of this exponent and of those below it.
    for (const std::uint32_t mantissa : {0u, 1u, 0x3504F2u, 0x3504F3u, 0x3504F4u, 0x400000u, 0x7FFFFFu})
      row.push_back(float_of((exponent << 23) | mantissa));
    while (row.size() % 128 != 0) {
      const std::uint32_t below = random_bits(random) % 36;
      const std::uint32_t reduced = exponent > below ? exponent - below : 0;
      row.push_back(float_of((random_bits(random) & 0x807FFFFFu) | (reduced << 23)));
    }
  }
  ASSERT_NO_FATAL_FAILURE(check_row(row));
}

TEST(LogWireTest, EveryCodeDecodesAsDefined) {
  std::mt19937 random(33);
  for (int trial = 0; trial < 50; ++trial) {
    reference::LogBlock block;
    block.lowest = trial == 0
                       ? -149.0f
                       : float(int(random_bits(random) % 245) - 149) + float(random_bits(random) % 1024) * 0x1p-10f;
    block.step = trial == 1 ? 0.0f : float(random_bits(random) % 65536) * 0x1p-16f * (32.0f / 508.0f);
    std::vector<std::byte> bytes;
    std::vector<float> expected;
    for (int first = 0; first < 1024; first += 128) {
      block.codes.clear();
      for (int code = first; code < first + 128; ++code)
        block.codes.push_back(code);
      const std::vector<std::byte> one = reference::log_bytes(block);
      bytes.insert(bytes.end(), one.begin(), one.end());
      for (const int code : block.codes)
        expected.push_back(reference::log_value(block, code));
    }
    on_every_target([&] {
      std::vector<float> decoded(1024);
      decode_log_row(decoded.data(), bytes.data(), 1024);
      ASSERT_TRUE(same_bits(decoded, expected)) << block.lowest << " + level * " << block.step;
    });
  }
}

std::vector<float> round_trip(const std::vector<float>& row) {
  const auto n = static_cast<std::int64_t>(row.size());
  std::vector<std::byte> bytes(static_cast<std::size_t>(protocol::log_row_bytes(n)));
  std::vector<float> decoded(row.size());
  encode_log_row(bytes.data(), row.data(), n);
  decode_log_row(decoded.data(), bytes.data(), n);
  return decoded;
}

TEST(LogWireTest, ErrorsKeepTheBound) {
  std::mt19937 random(34);
  std::vector<float> row;
  double worst = 0;
  for (std::size_t done = 0; done < 10'000'000; done += row.size()) {
    row.clear();
    while (row.size() < 7168)
      append_block(row, 128, false, random);
    const std::vector<float> decoded = round_trip(row);
    for (std::size_t first = 0; first < row.size(); first += 128) {
      double largest = 0;
      for (std::size_t i = first; i < first + 128; ++i)
        largest = std::max(largest, std::abs(double(row[i])));
      for (std::size_t i = first; i < first + 128; ++i) {
        const double x = row[i];
        const double error = std::abs(double(decoded[i]) - x);
        const double denormal = std::abs(decoded[i]) < std::numeric_limits<float>::min() ? 0x1p-150 : 0.0;
        ASSERT_LE(error, std::max(0.0221 * std::abs(x), largest * 0x1p-32) + denormal) << x << " of " << largest;
        ASSERT_EQ(std::signbit(decoded[i]), std::signbit(row[i])) << x;
        if (error > largest * 0x1p-32 && denormal == 0) worst = std::max(worst, error / std::abs(x));
      }
    }
  }
  EXPECT_GT(worst, 0.021) << "the values never met the largest step, so the bound was not tried";
}

TEST(LogWireTest, EqualMagnitudesComeBack) {
  std::mt19937 random(35);
  for (int trial = 0; trial < 200'000; ++trial) {
    const float value = float_of(random_bits(random) % 0x7F800000u);
    const std::vector<float> decoded = round_trip({value, -value, 0.0f});
    const double error = std::abs(double(decoded[0]) - double(value));
    ASSERT_LE(error, std::abs(value) * 0x1p-17 + 0x1p-150) << value;
    ASSERT_EQ(decoded[1], -decoded[0]);
    ASSERT_EQ(decoded[2], 0.0f);
  }
  for (int exponent = -149; exponent < 128; ++exponent) {
    const float power = std::ldexp(1.0f, exponent);
    ASSERT_TRUE(same_bits(round_trip({power, -power}), {power, -power})) << exponent;
  }
}

TEST(LogWireTest, SpecialValues) {
  on_every_target([&] {
    const float nan = std::bit_cast<float>(0x7FFFFFFFu);
    const std::vector<float> row = {-0.0f, 0.0f, kInfinity, -kInfinity, std::bit_cast<float>(0xFF800001u), 1.0f, -4.0f};
    EXPECT_TRUE(same_bits(round_trip(row), {-0.0f, 0.0f, kInfinity, -kInfinity, nan, 1.0f, -4.0f}));
    EXPECT_TRUE(same_bits(round_trip({0.0f, -0.0f}), {0.0f, -0.0f}));
    EXPECT_TRUE(same_bits(round_trip({-kInfinity, nan}), {-kInfinity, nan}));
    // Finite values stay finite, also at the end of the range, and the smallest is not lost.
    EXPECT_TRUE(same_bits(round_trip({kLargest, -kLargest}), {kLargest, -kLargest}));
    EXPECT_TRUE(same_bits(round_trip({0x1p-149f, -0x1p-149f}), {0x1p-149f, -0x1p-149f}));
    // 32 powers of two reach from level 1 to level 509; below, what is nearer to zero becomes zero.
    const std::vector<float> deep = {1.0f, 0x1p-32f, 0x1.1p-33f, -0x1.Fp-34f, -0x1p-100f, 0x1p-149f};
    EXPECT_TRUE(same_bits(round_trip(deep), {1.0f, 0x1p-32f, 0x1p-32f, -0.0f, -0.0f, 0.0f}));
  });
}

TEST(LogWireTest, SizesOfRows) {
  EXPECT_EQ(protocol::log_row_bytes(0), 0);
  EXPECT_EQ(protocol::log_row_bytes(1), 10);
  EXPECT_EQ(protocol::log_row_bytes(4), 13);
  EXPECT_EQ(protocol::log_row_bytes(127), 167);
  EXPECT_EQ(protocol::log_row_bytes(128), 168);
  EXPECT_EQ(protocol::log_row_bytes(129), 178);
  EXPECT_EQ(protocol::log_row_bytes(7168), 9408);
}

}  // namespace
}  // namespace tokenyard::engine::host
