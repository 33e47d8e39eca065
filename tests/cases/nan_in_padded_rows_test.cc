// SPDX-License-Identifier: Apache-2.0
// C83: rows without a live id may hold anything; what they hold reaches no received row and no result.
#include <cmath>
#include <limits>

#include "cases/case_round.h"
#include "support/casts.h"

namespace tokenyard::support {
namespace {

constexpr int kHidden = 128;

class NanInPaddedRows : public EachBackend {
 protected:
  // Two ranks, four tokens each, of which the last two have no expert.
  static CaseWorld padded(Dtype dtype) {
    CaseWorld made{.ids = std::vector<IdTable>(2, IdTable{{0, 3}, {2, 1}, {-1, -1}, {-1, -1}})};
    made.params = {.num_experts = 4, .top_k = 2, .hidden_size = kHidden, .max_tokens_per_rank = 4, .dtype = dtype};
    return made;
  }
};

void spoil(World& world) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (RankData& data : world.ranks) {
    for (std::int64_t i = 2 * kHidden; i < 4 * kHidden; ++i)
      store(data.hidden.dtype, data.hidden.bytes.data(), i, i % 3 == 0 ? -kInfinity : kNan);
  }
}

// A round of clean rows in between: what stays in a window from a spoiled round must not show either.
TEST_P(NanInPaddedRows, OfPlainRows) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    const World clean = padded(dtype).make();
    World spoiled = clean;
    spoil(spoiled);
    EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
      Communication communication = communication_for(group, GetParam(), clean.spec);
      DispatchResult result;
      for (int round = 0; round < 6; ++round) {
        const World& world = round % 2 == 0 ? spoiled : clean;
        dispatch_and_check(communication, world, {}, result);
        for (const ExpectedRow& row : expect_dispatch(world, group.rank(), layout_rule(communication, {})).rows) {
          for (std::int64_t column = 0; column < kHidden; ++column) {
            check(std::isfinite(load(dtype, row_of(result.hidden_states, row.position), column)), "a row is spoiled");
          }
        }
        moe_combine(communication, world, {}, result);  // y of the last two tokens is 0
      }
    })) << name(dtype);
  }
}

// Rows that the caller quantised, with scales that are NaN too.
TEST_P(NanInPaddedRows, OfQuantisedRows) {
  WorldSpec spec;
  spec.params = padded(Dtype::kBf16).params;
  spec.params.dispatch_format = DispatchFormat::kFp8Block128;
  spec.num_ranks = 2;
  spec.num_tokens = {4, 4};
  World world = make_world(spec);
  for (RankData& data : world.ranks) {
    data.ids = {0, 3, 2, 1, -1, -1, -1, -1};
    for (std::size_t i = 0; i < data.hidden.bytes.size(); ++i)
      data.hidden.bytes[i] = i < 2 * kHidden ? std::byte{0x38} : std::byte{0x7F};
    for (std::int64_t row = 0; row < 4; ++row)
      store(Dtype::kF32, data.scale.bytes.data(), row, row < 2 ? 0.5F : std::numeric_limits<float>::quiet_NaN());
  }
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    for (int round = 0; round < 3; ++round) {
      dispatch_and_check(communication, world, {}, result);
      for (const ExpectedRow& row : expect_dispatch(world, group.rank(), layout_rule(communication, {})).rows) {
        check_eq(load(Dtype::kF32, row_of(result.hidden_states_scale, row.position), 0), 0.5F, "scale");
        check_eq(load(Dtype::kF8e4m3, row_of(result.hidden_states, row.position), 1), 1.0F, "value");
      }
      combine_and_check(communication, world, {.special_values = false}, result, result.handle);
    }
  }));
}

// A backend that does not route sends every row, these too.
INSTANTIATE_TEST_SUITE_P(Backends, NanInPaddedRows, ::testing::ValuesIn(moving_backends_that(routes)), backend_name);

}  // namespace
}  // namespace tokenyard::support
