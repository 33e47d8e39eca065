// SPDX-License-Identifier: Apache-2.0
// Sums of rows against the scalar casts, bit for bit, on every instruction set of this machine.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "engine/host/rows.h"
#include "unit/rows_reference.h"

namespace tokenyard::engine::host {
namespace {

struct SumCase {
  Dtype rows_dtype;
  Dtype output_dtype;
  std::size_t num_rows;
  std::size_t num_biases;
  std::size_t n;
};

void check_sum(const SumCase& c, std::size_t misalignment, std::mt19937& random) {
  std::vector<Row> inputs;
  std::vector<const std::byte*> rows;
  std::vector<const std::byte*> biases;
  inputs.reserve(c.num_rows + c.num_biases);
  for (std::size_t r = 0; r < c.num_rows + c.num_biases; ++r) {
    const Dtype dtype = r < c.num_rows ? c.rows_dtype : c.output_dtype;
    inputs.emplace_back(random_row(dtype, c.n, random), (misalignment * 3 + r * 5) % 16);
    (r < c.num_rows ? rows : biases).push_back(inputs.back().data());
  }
  for (const bool stream : {false, true}) {
    Row output(bytes_of(c.output_dtype, c.n), misalignment);
    const RowSum sum{.rows = rows,
                     .rows_dtype = c.rows_dtype,
                     .biases = biases,
                     .output = output.data(),
                     .output_dtype = c.output_dtype,
                     .n = static_cast<std::int64_t>(c.n),
                     .stream = stream};
    sum_rows(sum);
    flush_streams();
    ASSERT_EQ(output.content(), sum_by_definition(sum))
        << name(c.rows_dtype) << " to " << name(c.output_dtype) << ", " << c.num_rows << " rows, " << c.num_biases
        << " biases, " << c.n << " elements, misaligned by " << misalignment << ", stream " << stream;
    ASSERT_TRUE(output.canaries_live()) << c.n << " elements, misaligned by " << misalignment;
  }
}

TEST(RowSumsTest, SumsEqualTheDefinition) {
  std::mt19937 random(4);
  on_every_target([&] {
    for (const Dtype rows_dtype : kFloats) {
      for (const Dtype output_dtype : kOutputs) {
        for (std::size_t num_rows = 0; num_rows <= 9; ++num_rows) {
          for (const std::size_t n : {7, 66, 2880}) {
            const SumCase c{rows_dtype, output_dtype, num_rows, random() % 3, n};
            ASSERT_NO_FATAL_FAILURE(check_sum(c, random() % 64, random));
          }
        }
      }
    }
  });
}

TEST(RowSumsTest, SumsTakeAnySizeAndAlignment) {
  std::mt19937 random(5);
  on_every_target([&] {
    for (const std::size_t n : sizes()) {
      for (std::size_t misalignment = 0; misalignment < 16; ++misalignment) {
        if (n > 128 && misalignment % 5 != 0) continue;
        for (const Dtype output_dtype : kOutputs) {
          ASSERT_NO_FATAL_FAILURE(check_sum({Dtype::kBf16, output_dtype, 3, 1, n}, misalignment, random));
        }
        ASSERT_NO_FATAL_FAILURE(check_sum({Dtype::kF8e4m3, Dtype::kBf16, 2, 0, n}, misalignment, random));
        ASSERT_NO_FATAL_FAILURE(check_sum({Dtype::kF16, Dtype::kF16, 2, 2, n}, misalignment, random));
      }
    }
  });
}

// The sums of one column, as floats of a wide dtype.
float sum_of(const std::vector<float>& column, Dtype dtype) {
  std::vector<std::vector<std::byte>> storage;
  std::vector<const std::byte*> rows;
  constexpr std::size_t kColumns = 70;
  for (const float value : column) {
    std::vector<std::byte>& row = storage.emplace_back(bytes_of(dtype, kColumns));
    for (std::size_t i = 0; i < kColumns; ++i)
      store(dtype, row.data(), i, value);
  }
  rows.reserve(storage.size());
  for (const auto& row : storage)
    rows.push_back(row.data());
  std::vector<std::byte> output(bytes_of(dtype, kColumns), kCanary);
  sum_rows(
      {.rows = rows, .rows_dtype = dtype, .biases = {}, .output = output.data(), .output_dtype = dtype, .n = kColumns});
  for (std::size_t i = 1; i < kColumns; ++i) {
    EXPECT_EQ(std::memcmp(output.data(), output.data() + bytes_of(dtype, i), bytes_of(dtype, 1)), 0) << i;
  }
  return load(dtype, output.data(), 0);
}

TEST(RowSumsTest, SumsOfSpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  on_every_target([&] {
    for (const Dtype dtype : kOutputs) {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(sum_of({}, dtype)), 0u);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(sum_of({-0.0f}, dtype)), 0u) << "0 + -0 is +0";
      EXPECT_EQ(std::bit_cast<std::uint32_t>(sum_of({-0.0f, -0.0f}, dtype)), 0u);
      EXPECT_EQ(sum_of({infinity, 1.0f}, dtype), infinity);
      const auto nan_bits = std::bit_cast<std::uint32_t>(sum_of({infinity, -infinity}, dtype));
      EXPECT_EQ(nan_bits, dtype == Dtype::kBf16  ? 0x7FFF0000u
                          : dtype == Dtype::kF16 ? 0x7FFFE000u
                                                 : 0x7FFFFFFFu)
          << "NaN is canonical";
      // (0 + 2^11) + 1 + 1 is exact in fp32; rounding after each row to 8 or 11 bits would lose the ones.
      EXPECT_EQ(sum_of({-2048.0f, 1.0f, 1.0f, 2048.0f}, dtype), 2.0f);
      EXPECT_EQ(sum_of({1.0f, 0x1p-24f, 0x1p-24f}, Dtype::kF32), 1.0f) << "row order, one rounding a row";
      EXPECT_EQ(sum_of({0x1p-24f, 0x1p-24f, 1.0f}, Dtype::kF32), 1.0f + 0x1p-23f);
    }
  });
}

TEST(RowSumsTest, SumsMayOverwriteAnInputOfTheOutputsWidth) {
  std::mt19937 random(6);
  on_every_target([&] {
    for (const std::size_t n : sizes()) {
      for (const Dtype rows_dtype : {Dtype::kBf16, Dtype::kF16}) {
        Row first(random_row(rows_dtype, n, random), 2);
        const Row second(random_row(rows_dtype, n, random), 6);
        const std::array<const std::byte*, 2> rows = {first.data(), second.data()};
        const RowSum sum{.rows = rows,
                         .rows_dtype = rows_dtype,
                         .biases = {},
                         .output = first.data(),
                         .output_dtype = Dtype::kBf16,
                         .n = static_cast<std::int64_t>(n)};
        const std::vector<std::byte> expected = sum_by_definition(sum);
        sum_rows(sum);
        ASSERT_EQ(first.content(), expected) << n;
        ASSERT_TRUE(first.canaries_live());
      }
    }
  });
}

}  // namespace
}  // namespace tokenyard::engine::host
