// SPDX-License-Identifier: Apache-2.0
// C79, C80, C82, C83, C85: casts on the way. Each block of 128 values has its own scale, chosen before the values are
// rounded; the largest magnitude of f8e4m3 is 448; zeros, infinities and NaN stay in their block.
// Driven by the backends whose contract takes a cast.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cases/case_round.h"
#include "support/casts.h"

namespace tokenyard::support {
namespace {

constexpr std::int64_t kBlock = 128;
constexpr float kLargest = 448.0F;

using Row = std::vector<float>;

bool takes_cast(const Contract& contract) {
  return contract.takes_cast;
}

// Rows of each of two ranks in bf16 or f32; every token goes to the one expert of the other rank that it names, so row
// t of the result is token t of the other rank.
World world_of(const std::vector<Row>& rows, Dtype dtype) {
  const auto tokens = static_cast<std::int64_t>(rows.size());
  CaseWorld made;
  made.params = {.num_experts = 4,
                 .top_k = 1,
                 .hidden_size = static_cast<int>(rows.front().size()),
                 .max_tokens_per_rank = static_cast<int>(tokens),
                 .dtype = dtype};
  made.ids = {repeated(tokens, {2}), repeated(tokens, {0})};
  World world = made.make();
  for (RankData& data : world.ranks) {
    for (std::size_t row = 0; row < rows.size(); ++row) {
      for (std::size_t column = 0; column < rows[row].size(); ++column)
        store(dtype, data.hidden.bytes.data(), static_cast<std::int64_t>(row * rows[row].size() + column),
              rows[row][column]);
    }
  }
  return world;
}

// The dispatched row as numbers and scales.
struct CastRow {
  std::vector<std::byte> codes{};
  Row scales{}, values{};
  std::vector<std::byte> scale_bytes{};

  friend bool operator==(const CastRow&, const CastRow&) = default;
};

float scale_at(const TensorView& scales, std::int64_t row, std::int64_t block) {
  if (scales.dtype == Dtype::kF32) return load(Dtype::kF32, row_of(scales, row), block);
  const int exponent = std::to_integer<int>(row_of(scales, row)[block]);
  return exponent == 0xFF ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0F, exponent - 127);
}

CastRow read_row(const DispatchResult& result, std::int64_t row, std::int64_t hidden) {
  CastRow read;
  read.codes.assign(row_of(result.hidden_states, row), row_of(result.hidden_states, row) + hidden);
  const std::byte* scale = row_of(result.hidden_states_scale, row);
  read.scale_bytes.assign(scale, scale + last_dim_bytes(result.hidden_states_scale));
  for (std::int64_t block = 0; block * kBlock < hidden; ++block)
    read.scales.push_back(scale_at(result.hidden_states_scale, row, block));
  for (std::int64_t column = 0; column < hidden; ++column) {
    read.values.push_back(load(Dtype::kF8e4m3, read.codes.data(), column) *
                          read.scales[static_cast<std::size_t>(column / kBlock)]);
  }
  return read;
}

// What arrives of `rows` on rank 0, after a check that rank 1 sees the same.
std::vector<CastRow> cast_rows(std::string_view backend,
                               const std::vector<Row>& rows,
                               DispatchCast cast,
                               Dtype dtype = Dtype::kF32) {
  const World world = world_of(rows, dtype);
  const auto hidden = static_cast<std::int64_t>(rows.front().size());
  std::vector<std::vector<CastRow>> seen(2);
  run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, backend, world.spec);
    const RankTensors tensors(world, group.rank(), false);
    DispatchResult result;
    check_ok(communication.dispatch(tensors.input(), {.cast = cast}, result), "dispatch");
    check_eq(name(result.hidden_states.dtype), name(Dtype::kF8e4m3), "dtype of the rows");
    const bool packed = cast == DispatchCast::kFp8Block128Ue8m0;
    check_eq(name(result.hidden_states_scale.dtype), name(packed ? Dtype::kE8m0 : Dtype::kF32), "dtype of the scales");
    for (std::int64_t row = 0; row < std::ssize(rows); ++row)
      seen[static_cast<std::size_t>(group.rank())].push_back(read_row(result, row, hidden));
    result.handle = Handle();
    tensors.check_unchanged();
  });
  for (std::size_t row = 0; row < rows.size(); ++row)
    check(seen[0][row].codes == seen[1][row].codes, "the ranks cast differently, row " + std::to_string(row));
  return seen[0];
}

class Fp8Scales : public EachBackend {};

// Block b holds 2^(b % 5): its own exponent byte, also when the blocks do not fill the last word (C79).
TEST_P(Fp8Scales, EachBlockHasItsOwnByte) {
  for (const std::int64_t blocks : {1, 2, 4, 5, 7}) {
    Row row;
    for (std::int64_t i = 0; i < blocks * kBlock; ++i)
      row.push_back(std::ldexp(1.0F, static_cast<int>(i / kBlock % 5)));
    EXPECT_NO_THROW({
      const CastRow got = cast_rows(GetParam(), {row}, DispatchCast::kFp8Block128Ue8m0).front();
      check_lists_eq(got.values, row, "values of " + std::to_string(blocks) + " blocks");
      for (std::int64_t block = 0; block < blocks; ++block) {
        // 2^k / 448 lies between 2^(k - 9) and 2^(k - 8).
        check_eq(std::to_integer<int>(got.scale_bytes[static_cast<std::size_t>(block)]),
                 119 + static_cast<int>(block % 5), "exponent of block " + std::to_string(block));
      }
      for (std::size_t unused = static_cast<std::size_t>(blocks); unused < got.scale_bytes.size(); ++unused)
        check_eq(std::to_integer<int>(got.scale_bytes[unused]), 0, "byte beyond the blocks");
    });
  }
}

struct Rounded {
  float largest;
  int exponent;  // of the scale
  float code;    // the largest magnitude, cast
};

// The scale becomes a power of two first and the values are cast with that one (C80).
TEST_P(Fp8Scales, AreRoundedBeforeTheValues) {
  for (const Rounded& want :
       {Rounded{1.0F, -8, 256.0F}, {448.0F, 0, 448.0F}, {449.0F, 1, 224.0F}, {3.0F, -7, 384.0F}}) {
    Row row;
    for (std::int64_t i = 0; i < kBlock; ++i)
      row.push_back(want.largest * static_cast<float>(kBlock - i) / static_cast<float>(kBlock));
    for (const DispatchCast cast : {DispatchCast::kFp8Block128PowerOfTwo, DispatchCast::kFp8Block128Ue8m0}) {
      EXPECT_NO_THROW({
        const CastRow got = cast_rows(GetParam(), {row}, cast).front();
        check_eq(got.scales.front(), std::ldexp(1.0F, want.exponent), "scale");
        check_eq(load(Dtype::kF8e4m3, got.codes.data(), 0), want.code, "largest code");
        for (std::size_t i = 0; i < row.size(); ++i) {
          // Three mantissa bits; below 2^-6 the steps are 2^-9.
          const float scaled = row[i] / got.scales.front();
          const float step = std::ldexp(1.0F, std::max(std::ilogb(scaled), -6) - 3);
          check(std::abs(got.values[i] / got.scales.front() - scaled) <= step / 2, "more than half a step off");
        }
      }) << want.largest;
    }
  }
}

// The format's own maximum: a block up to 448 has scale 1, and one up to 240 has not (C82).
TEST_P(Fp8Scales, UseTheMaximumOfTheFormat) {
  EXPECT_NO_THROW({
    const std::vector<CastRow> got = cast_rows(
        GetParam(), {Row(kBlock, kLargest), Row(kBlock, -240.0F), Row(kBlock, 1.0F)}, DispatchCast::kFp8Block128);
    check_eq(got[0].scales.front(), 1.0F, "scale of 448");
    check_eq(got[1].scales.front(), 240.0F / kLargest, "scale of 240");
    check_eq(got[2].scales.front(), 1.0F / kLargest, "scale of 1");
    for (const CastRow& row : got) {
      check_eq(std::abs(load(Dtype::kF8e4m3, row.codes.data(), 5)), kLargest, "code of the largest value");
      for (const float value : row.values)
        check(std::isfinite(value), "the largest value became infinite or NaN");
    }
  });
}

// Zeros, an infinity, a NaN and denormals: rows beside them, and the other block of theirs, are as without them (C85).
TEST_P(Fp8Scales, OddValuesStayInTheirBlock) {
  Row plain;
  for (std::int64_t i = 0; i < 2 * kBlock; ++i)
    plain.push_back(static_cast<float>(i % 15 - 7));
  std::vector<Row> rows(6, plain);
  const Row zeros(2 * kBlock, 0.0F);
  rows[0] = zeros;
  rows[1][3] = std::numeric_limits<float>::infinity();
  rows[2][200] = std::numeric_limits<float>::quiet_NaN();
  rows[4] = Row(2 * kBlock, 1e-38F);
  for (const DispatchCast cast :
       {DispatchCast::kFp8Block128, DispatchCast::kFp8Block128PowerOfTwo, DispatchCast::kFp8Block128Ue8m0}) {
    EXPECT_NO_THROW({
      const std::vector<CastRow> clean = cast_rows(GetParam(), std::vector<Row>(6, plain), cast);
      const std::vector<CastRow> got = cast_rows(GetParam(), rows, cast);
      check(got[3] == clean[3] && got[5] == clean[5], "a row beside the odd ones changed");
      check_lists_eq(got[0].values, zeros, "zeros");
      const auto same_block = [&](std::size_t row, std::size_t block) {
        for (std::size_t i = block * kBlock; i < (block + 1) * kBlock; ++i)
          check_eq(got[row].values[i], clean[row].values[i], "the block beside the odd one");
      };
      same_block(1, 1);
      same_block(2, 0);
      check(std::isnan(got[2].values[200]), "a NaN became a number");
      for (const std::size_t row : {0U, 4U}) {
        for (const float scale : got[row].scales)
          check(std::isfinite(scale) && scale >= 0, "a scale of zeros or denormals is no number");
        for (const float value : got[row].values)
          check(std::isfinite(value) && std::abs(value) <= 1e-37F, "zeros or denormals grew");
      }
    });
  }
}

// Rows without a live id are not read (C83).
TEST_P(Fp8Scales, NanInPaddedRowsIsNotRead) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const World clean =
      world_of({Row(kBlock, 1.0F), Row(kBlock, 2.0F), Row(kBlock, kNan), Row(kBlock, kNan)}, Dtype::kBf16);
  World world = clean;
  for (RankData& data : world.ranks)
    data.ids[2] = data.ids[3] = -1;
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    const RankTensors tensors(world, group.rank(), false);
    DispatchResult result;
    for (int round = 0; round < 3; ++round) {
      check_ok(communication.dispatch(tensors.input(), {.cast = DispatchCast::kFp8Block128}, result), "dispatch");
      check_lists_eq(result.counts.rows_per_expert, std::vector<std::int64_t>{2, 0}, "rows per expert");
      for (std::int64_t row = 0; row < 2; ++row) {
        for (const float value : read_row(result, row, kBlock).values)
          check_eq(value, static_cast<float>(row + 1), "value");
      }
      result.handle = Handle();
    }
  }));
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Fp8Scales);
INSTANTIATE_TEST_SUITE_P(Backends, Fp8Scales, ::testing::ValuesIn(moving_backends_that(takes_cast)), backend_name);

}  // namespace
}  // namespace tokenyard::support
