// SPDX-License-Identifier: Apache-2.0
// Copies and casts of rows against the scalar casts, bit for bit, on every instruction set of this machine.
#include "engine/host/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tokenyard/error.h"

#include "unit/rows_reference.h"

namespace tokenyard::engine::host {
namespace {

TEST(RowsTest, CopyTakesAnySizeAndAlignment) {
  std::vector<std::size_t> lengths = sizes();
  for (std::size_t n = 1000; n <= 1300; n += 7)
    lengths.push_back(n);
  for (const std::size_t n : {511, 512, 513, 1024, 8191, 8192, 8193, 14336})
    lengths.push_back(n);
  std::mt19937 random(1);
  on_every_target([&] {
    for (const std::size_t n : lengths) {
      const std::vector<std::byte> content = random_row(Dtype::kF8e4m3, n, random);
      for (std::size_t misalignment = 0; misalignment<64; misalignment += n> 4096 ? 5 : 1) {
        const Row from(content, (misalignment * 5 + n) % 16);
        Row to(n, misalignment);
        copy_row(to.data(), from.data(), static_cast<std::int64_t>(n), misalignment % 7 != 3);
        flush_streams();
        ASSERT_EQ(to.content(), content) << n << " bytes, misaligned by " << misalignment;
        ASSERT_TRUE(to.canaries_live()) << n << " bytes, misaligned by " << misalignment;
      }
    }
  });
  copy_row(nullptr, nullptr, 0);
}

TEST(RowsTest, CastsEqualTheDefinition) {
  std::mt19937 random(2);
  for (const Dtype from_dtype : kFloats) {
    const std::vector<std::byte> all = random_row(from_dtype, 7171, random);
    for (const Dtype to_dtype : kFloats) {
      SCOPED_TRACE(std::string(name(from_dtype)) + " to " + std::string(name(to_dtype)));
      const std::vector<std::byte> expected =
          from_dtype == to_dtype ? all : cast_by_definition(all, from_dtype, to_dtype);
      on_every_target([&] {
        for (const std::size_t n : sizes()) {
          for (std::size_t misalignment = 0; misalignment<16; misalignment += n> 128 ? 3 : 1) {
            const auto end = all.begin() + static_cast<std::ptrdiff_t>(bytes_of(from_dtype, n));
            const Row from(std::vector<std::byte>(all.begin(), end), (misalignment * 7 + n) % 16);
            Row to(bytes_of(to_dtype, n), misalignment);
            cast_row(to.data(), to_dtype, from.data(), from_dtype, static_cast<std::int64_t>(n));
            ASSERT_TRUE(std::equal(to.data(), to.data() + bytes_of(to_dtype, n), expected.data())) << n << " elements";
            ASSERT_TRUE(to.canaries_live()) << n << " elements, misaligned by " << misalignment;
          }
        }
      });
    }
  }
}

// Every code of the narrow formats, and fp32 values of every exponent around every rounding step.
std::vector<std::byte> thorough_row(Dtype dtype) {
  if (dtype != Dtype::kF32) {
    const std::size_t num_codes = std::size_t{1} << (8 * size_of(dtype));
    std::vector<std::byte> row(bytes_of(dtype, num_codes));
    for (std::size_t code = 0; code < num_codes; ++code) {
      const auto bits = static_cast<std::uint16_t>(code);
      std::memcpy(row.data() + bytes_of(dtype, code), &bits, static_cast<std::size_t>(size_of(dtype)));
    }
    return row;
  }
  std::vector<std::uint32_t> bits;
  for (std::uint32_t upper = 0; upper < (1u << 16); ++upper) {
    for (const std::uint32_t lower :
         {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xF000u, 0x1000u, 0x0FFFu, 0x1001u}) {
      bits.push_back((upper << 16) | lower);
    }
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(bits.data());
  return {bytes, bytes + bits.size() * sizeof(std::uint32_t)};
}

TEST(RowsTest, CastsOfEveryCodeEqualTheDefinition) {
  for (const Dtype from_dtype : kFloats) {
    const std::vector<std::byte> from = thorough_row(from_dtype);
    const std::size_t n = from.size() / static_cast<std::size_t>(size_of(from_dtype));
    for (const Dtype to_dtype : kFloats) {
      if (from_dtype == to_dtype) continue;
      SCOPED_TRACE(std::string(name(from_dtype)) + " to " + std::string(name(to_dtype)));
      const std::vector<std::byte> expected = cast_by_definition(from, from_dtype, to_dtype);
      on_every_target([&] {
        std::vector<std::byte> to(expected.size());
        cast_row(to.data(), to_dtype, from.data(), from_dtype, static_cast<std::int64_t>(n));
        const auto differ = std::mismatch(to.begin(), to.end(), expected.begin());
        const auto at = static_cast<std::size_t>(differ.first - to.begin());
        ASSERT_TRUE(differ.first == to.end()) << "element " << at / static_cast<std::size_t>(size_of(to_dtype));
      });
    }
  }
}

TEST(RowsTest, CastsInPlaceWhenTheTargetIsNotWider) {
  std::mt19937 random(3);
  for (const Dtype from_dtype : kFloats) {
    for (const Dtype to_dtype : kFloats) {
      if (size_of(to_dtype) > size_of(from_dtype)) continue;
      on_every_target([&] {
        for (const std::size_t n : sizes()) {
          const std::vector<std::byte> content = random_row(from_dtype, n, random);
          std::vector<std::byte> expected =
              from_dtype == to_dtype ? content : cast_by_definition(content, from_dtype, to_dtype);
          Row row(content, n % 16);
          cast_row(row.data(), to_dtype, row.data(), from_dtype, static_cast<std::int64_t>(n));
          ASSERT_TRUE(std::equal(expected.begin(), expected.end(), row.data()))
              << name(from_dtype) << " to " << name(to_dtype) << ", " << n << " elements";
          ASSERT_TRUE(row.canaries_live());
        }
      });
    }
  }
}

TEST(RowsTest, RefusesDtypesWithoutAMeaning) {
  std::byte byte{};
  EXPECT_THROW(cast_row(&byte, Dtype::kI32, &byte, Dtype::kBf16, 1), Error);
  EXPECT_THROW(cast_row(&byte, Dtype::kBf16, &byte, Dtype::kU8, 1), Error);
  const RowSum to_fp8{
      .rows = {}, .rows_dtype = Dtype::kBf16, .biases = {}, .output = &byte, .output_dtype = Dtype::kF8e4m3, .n = 1};
  EXPECT_THROW(sum_rows(to_fp8), Error);
  try {
    sum_rows(to_fp8);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("f8e4m3"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tokenyard::engine::host
