// SPDX-License-Identifier: Apache-2.0
// Weighted sums of rows against their definition, bit for bit, on every instruction set of this machine.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tokenyard/error.h"

#include "engine/host/wire_rows.h"
#include "unit/rows_reference.h"

namespace tokenyard::engine::host {
namespace {

std::vector<std::byte> weighted_by_definition(const WeightedSum& sum) {
  const auto n = static_cast<std::size_t>(sum.n);
  std::vector<std::byte> output(bytes_of(sum.output_dtype, n));
  for (std::size_t i = 0; i < n; ++i) {
    float total = 0.0f;
    for (std::size_t r = 0; r < sum.rows.size(); ++r) {
      total = std::fma(sum.weights[r], load(sum.rows_dtype, sum.rows[r], i), total);
    }
    store(sum.output_dtype, output.data(), i, total);
  }
  return output;
}

struct WeightedCase {
  Dtype rows_dtype;
  Dtype output_dtype;
  std::size_t num_rows;
  std::size_t n;
};

float random_weight(std::mt19937& random) {
  constexpr float kHard[] = {0.0f, -0.0f, 1.0f, -1.0f, 0x1p-140f, 0x1p100f, 3.0f};
  if (random() % 8 == 0) return kHard[random() % std::size(kHard)];
  if (random() % 64 == 0) return std::bit_cast<float>(std::uint32_t(random()));
  return float(random() % (1u << 24)) * 0x1p-24f;
}

void check_weighted(const WeightedCase& c, std::size_t misalignment, std::mt19937& random) {
  std::vector<Row> inputs;
  std::vector<const std::byte*> rows;
  std::vector<float> weights;
  inputs.reserve(c.num_rows);
  for (std::size_t r = 0; r < c.num_rows; ++r) {
    inputs.emplace_back(random_row(c.rows_dtype, c.n, random), (misalignment * 3 + r * 5) % 16);
    rows.push_back(inputs.back().data());
    weights.push_back(random_weight(random));
  }
  for (const bool stream : {false, true}) {
    Row output(bytes_of(c.output_dtype, c.n), misalignment);
    const WeightedSum sum{.rows = rows,
                          .rows_dtype = c.rows_dtype,
                          .weights = weights,
                          .output = output.data(),
                          .output_dtype = c.output_dtype,
                          .n = static_cast<std::int64_t>(c.n),
                          .stream = stream};
    weighted_sum_rows(sum);
    flush_streams();
    ASSERT_EQ(output.content(), weighted_by_definition(sum))
        << name(c.rows_dtype) << " to " << name(c.output_dtype) << ", " << c.num_rows << " rows, " << c.n
        << " elements, misaligned by " << misalignment << ", stream " << stream;
    ASSERT_TRUE(output.canaries_live()) << c.n << " elements, misaligned by " << misalignment;
  }
}

TEST(WeightedSumTest, SumsEqualTheDefinition) {
  std::mt19937 random(21);
  on_every_target([&] {
    for (const Dtype rows_dtype : kOutputs) {
      for (const Dtype output_dtype : kOutputs) {
        for (std::size_t num_rows = 0; num_rows <= 9; ++num_rows) {
          for (const std::size_t n : {1, 7, 127, 128, 129, 2880}) {
            ASSERT_NO_FATAL_FAILURE(check_weighted({rows_dtype, output_dtype, num_rows, n}, random() % 64, random));
          }
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(check_weighted({Dtype::kBf16, Dtype::kBf16, 8, 7168}, 0, random));
    ASSERT_NO_FATAL_FAILURE(check_weighted({Dtype::kBf16, Dtype::kF32, 64, 2048}, 4, random));
  });
}

TEST(WeightedSumTest, SumsTakeAnySizeAndAlignment) {
  std::mt19937 random(22);
  on_every_target([&] {
    for (const std::size_t n : sizes()) {
      for (std::size_t misalignment = 0; misalignment < 16; ++misalignment) {
        if (n > 128 && misalignment % 5 != 0) continue;
        ASSERT_NO_FATAL_FAILURE(check_weighted({Dtype::kBf16, Dtype::kBf16, 3, n}, misalignment, random));
        ASSERT_NO_FATAL_FAILURE(check_weighted({Dtype::kBf16, Dtype::kF32, 2, n}, misalignment, random));
        ASSERT_NO_FATAL_FAILURE(check_weighted({Dtype::kF16, Dtype::kF16, 2, n}, misalignment, random));
      }
    }
  });
}

// The weighted sum of one column, in fp32.
float sum_of(const std::vector<float>& column, const std::vector<float>& weights) {
  constexpr std::size_t kColumns = 70;
  std::vector<std::vector<float>> storage;
  std::vector<const std::byte*> rows;
  storage.reserve(column.size());
  for (const float value : column)
    rows.push_back(reinterpret_cast<const std::byte*>(storage.emplace_back(kColumns, value).data()));
  std::vector<float> output(kColumns, 1e30f);
  weighted_sum_rows({.rows = rows,
                     .rows_dtype = Dtype::kF32,
                     .weights = weights,
                     .output = reinterpret_cast<std::byte*>(output.data()),
                     .output_dtype = Dtype::kF32,
                     .n = kColumns});
  for (const float value : output)
    EXPECT_EQ(std::bit_cast<std::uint32_t>(value), std::bit_cast<std::uint32_t>(output[0]));
  return output[0];
}

TEST(WeightedSumTest, RoundsEachProductAndItsSumOnce) {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto bits = [](float value) { return std::bit_cast<std::uint32_t>(value); };
  on_every_target([&] {
    EXPECT_EQ(bits(sum_of({}, {})), 0u);
    EXPECT_EQ(bits(sum_of({-0.0f}, {1.0f})), 0u) << "0 + -0 is +0";
    EXPECT_EQ(bits(sum_of({0.0f}, {infinity})), protocol::kFloatNan) << "NaN is canonical";
    EXPECT_EQ(bits(sum_of({infinity, infinity}, {1.0f, -1.0f})), protocol::kFloatNan);
    EXPECT_EQ(sum_of({infinity, 1.0f}, {0.5f, 2.0f}), infinity);
    // (1 + 2^-12)^2 is 1 + 2^-11 + 2^-24: a product that is rounded on its own drops the last term.
    const float a = 1.0f + 0x1p-12f;
    EXPECT_EQ(sum_of({1.0f + 0x1p-11f, a}, {-1.0f, a}), 0x1p-24f);
    EXPECT_EQ(sum_of({1.0f, 0x1p-24f, 0x1p-24f}, {1.0f, 1.0f, 1.0f}), 1.0f) << "in order";
    EXPECT_EQ(sum_of({0x1p-24f, 0x1p-24f, 1.0f}, {1.0f, 1.0f, 1.0f}), 1.0f + 0x1p-23f) << "in order";
  });
}

TEST(WeightedSumTest, MayOverwriteARowOfItsWidth) {
  std::mt19937 random(23);
  on_every_target([&] {
    for (const std::size_t n : sizes()) {
      Row first(random_row(Dtype::kBf16, n, random), 2);
      const Row second(random_row(Dtype::kBf16, n, random), 6);
      const std::array<const std::byte*, 2> rows = {first.data(), second.data()};
      const std::array<float, 2> weights = {0.3f, 0.7f};
      const WeightedSum sum{
          .rows = rows, .weights = weights, .output = first.data(), .n = static_cast<std::int64_t>(n)};
      const std::vector<std::byte> expected = weighted_by_definition(sum);
      weighted_sum_rows(sum);
      ASSERT_EQ(first.content(), expected) << n;
      ASSERT_TRUE(first.canaries_live());
    }
  });
}

TEST(WeightedSumTest, RefusesWhatHasNoMeaning) {
  std::byte byte{};
  const std::array<const std::byte*, 1> rows = {&byte};
  const std::array<float, 2> weights = {1.0f, 1.0f};
  EXPECT_THROW(weighted_sum_rows({.rows = {}, .rows_dtype = Dtype::kF8e4m3, .weights = {}, .output = &byte, .n = 1}),
               Error);
  EXPECT_THROW(weighted_sum_rows({.rows = {}, .weights = {}, .output = &byte, .output_dtype = Dtype::kF8e5m2, .n = 1}),
               Error);
  try {
    weighted_sum_rows({.rows = rows, .weights = weights, .output = &byte, .n = 1});
    FAIL() << "two weights for one row";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("1 rows and 2 weights"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tokenyard::engine::host
