// SPDX-License-Identifier: Apache-2.0
// C86, C88: scales stay row-aligned and linear, so that a kernel's tiles of 128 rows can be made of all received rows
// at once; scales that a sender has tiled, whose rows are padded, are refused.
#include <array>

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

constexpr int kHidden = 128;
constexpr std::int64_t kScales = kHidden / 16;

// Where a kernel's 128 x 4 tiles have the scale (row, column).
std::size_t tiled(std::int64_t row, std::int64_t column) {
  return static_cast<std::size_t>((row / 128 * (kScales / 4) + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 +
                                  column % 4);
}

TEST(LinearScales, TilesOfTheTest) {
  constexpr std::array<std::array<std::int64_t, 3>, 8> kPlaces{
      {{0, 0, 0}, {1, 0, 16}, {32, 0, 4}, {33, 1, 21}, {127, 3, 511}, {0, 4, 512}, {128, 0, 1024}, {129, 7, 1555}}};
  for (const auto& [row, column, place] : kPlaces)
    EXPECT_EQ(tiled(row, column), static_cast<std::size_t>(place)) << row << " " << column;
}

// 100 and 30 tokens, scale = (8 row + column) mod 251 with rows counted over both ranks; every token to both ranks.
World nvfp4_world() {
  WorldSpec spec;
  spec.params = {.num_experts = 4,
                 .top_k = 2,
                 .hidden_size = kHidden,
                 .max_tokens_per_rank = 100,
                 .dispatch_format = DispatchFormat::kNvfp4};
  spec.num_ranks = 2;
  spec.num_tokens = {100, 30};
  World world = make_world(spec);
  std::int64_t first = 0;
  for (RankData& data : world.ranks) {
    for (std::int64_t i = 0; i < data.num_tokens * kScales; ++i)
      data.scale.bytes[static_cast<std::size_t>(i)] = static_cast<std::byte>((first * kScales + i) % 251);
    for (std::int64_t token = 0; token < data.num_tokens; ++token) {
      data.ids[static_cast<std::size_t>(2 * token)] = 0;
      data.ids[static_cast<std::size_t>(2 * token + 1)] = 2;
    }
    first += data.num_tokens;
  }
  return world;
}

class LinearScalesOf : public EachBackend {};

TEST_P(LinearScalesOf, MakeTheTilesOfAllRows) {
  const World world = nvfp4_world();
  std::vector<std::byte> whole(2048);
  for (std::int64_t row = 0; row < 130; ++row) {
    for (std::int64_t column = 0; column < kScales; ++column)
      whole[tiled(row, column)] = static_cast<std::byte>((row * kScales + column) % 251);
  }
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    for (int round = 0; round < 2; ++round) {
      dispatch_and_check(communication, world, {}, result);
      std::vector<std::byte> tiles(2048);
      std::int64_t next = 0;
      for (const ExpectedRow& row : expect_dispatch(world, group.rank(), layout_rule(communication, {})).rows) {
        for (std::int64_t column = 0; column < kScales; ++column)
          tiles[tiled(next, column)] = row_of(result.hidden_states_scale, row.position)[column];
        ++next;
      }
      check_eq(next, 130, "rows received");
      check_bytes(tiles.data(), whole, "tiles of the received scales");
      combine_and_check(communication, world, {}, result, result.handle);
    }
  }));
}

// A tiled shard has rows up to the next 128.
TEST_P(LinearScalesOf, TiledShardsAreRefused) {
  const World world = nvfp4_world();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    DispatchInput input = tensors.input();
    const Tensor shard(Dtype::kF8e4m3, {128, kScales});
    input.hidden_states_scale = shard.view();
    check_throws(ErrorCode::kInvalidArgument, {"hidden_states_scale", "128", group.rank() == 0 ? "100" : "30"},
                 [&] { (void)communication.dispatch(input, {}, result); });
    play_round(communication, world, {}, result);
  }));
}

// Expert-major results have two dimensions of rows; a kernel tiles them expert by expert.
INSTANTIATE_TEST_SUITE_P(Backends,
                         LinearScalesOf,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.output_layout != OutputLayout::kExpertMajor;
                         })),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
