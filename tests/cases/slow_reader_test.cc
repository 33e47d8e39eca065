// SPDX-License-Identifier: Apache-2.0
// C106: a window that is written again while a slow rank still reads loses nothing, run after run.
// C107: a row is never seen before it is whole, with several writing threads and counters that wrap around.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "cases/case_round.h"
#include "support/casts.h"
#include "support/rng.h"

namespace tokenyard::support {
namespace {

class SlowReader : public EachBackend {};

constexpr int kHidden = 64;

// Two experts of weight 1 on x in {0, 1}: exactly 2 x, with one rank after the other slow between dispatch and combine.
TEST_P(SlowReader, LosesNothing) {
  CaseWorld made{.ids = std::vector<IdTable>(4)};
  made.params = {.num_experts = 8, .top_k = 2, .hidden_size = kHidden, .max_tokens_per_rank = 32};
  for (std::size_t rank = 0; rank < 4; ++rank) {
    for (std::int64_t token = 0; token < 32; ++token) {
      const std::int64_t first = (token + static_cast<std::int64_t>(rank)) % 8;
      made.ids[rank].push_back({first, (first + 3) % 8});
    }
  }
  const World plain = made.make();
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), plain.spec);
    DispatchResult result;
    World world = plain;
    for (std::uint64_t round = 0; round < 200; ++round) {
      Rng rng(round);
      for (RankData& data : world.ranks) {
        for (std::int64_t i = 0; i < 32 * kHidden; ++i)
          store(Dtype::kBf16, data.hidden.bytes.data(), i, static_cast<float>(rng.below(2)));
      }
      const RankTensors tensors(world, group.rank(), false);
      check_ok(communication.dispatch(tensors.input(), {}, result), "dispatch");
      const bool slow = round % 4 == static_cast<std::uint64_t>(group.rank());
      if (slow) std::this_thread::sleep_for(std::chrono::microseconds(rng.below(400)));
      check_result(communication, world, {}, result);
      const std::vector<std::byte> y = moe_combine(communication, world, {}, result, Experts::kIdentity);
      for (std::int64_t i = 0; i < 32 * kHidden; ++i) {
        const float x = load(Dtype::kBf16, world.rank(group.rank()).hidden.bytes.data(), i);
        check_eq(load(Dtype::kBf16, y.data(), i), 2 * x, "element " + std::to_string(i));
      }
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, SlowReader, ::testing::ValuesIn(kMovingBackends), backend_name);

class RowsAreWholeWhenSeen : public EachBackend {};

constexpr int kTokens = 128;
constexpr int kRounds = 200;

float sequence_number(int round, int source, std::int64_t token) {
  return static_cast<float>((round * 4 + source) * kTokens + static_cast<int>(token));
}

void check_numbers(const std::byte* row, float number) {
  for (std::int64_t column = 0; column < kHidden; ++column) {
    float value = 0;
    std::memcpy(&value, row + column * 4, 4);
    check_eq(value, number, "sequence number in column " + std::to_string(column));
  }
}

// 10^5 rows from four ranks of three threads each; every element of a row is the row's sequence number. No barrier and
// no check stands between a dispatch and the reading.
TEST_P(RowsAreWholeWhenSeen, WithWritersAndWrapAround) {
  CaseWorld made{.ids = std::vector<IdTable>(4)};
  made.params = {
      .num_experts = 4, .top_k = 1, .hidden_size = kHidden, .max_tokens_per_rank = kTokens, .dtype = Dtype::kF32};
  for (std::size_t rank = 0; rank < 4; ++rank) {
    for (std::int64_t token = 0; token < kTokens; ++token)
      made.ids[rank].push_back({(token / 3 + static_cast<std::int64_t>(rank)) % 4});
  }
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    CommunicationOptions options = test_options();
    options.num_threads = 3;
    options.initial_epoch = 0xFFFFFFFFU - kRounds / 2;
    Communication communication = communication_for(group, GetParam(), world.spec, options);
    const std::vector<ExpectedRow> rows = expect_dispatch(world, group.rank(), layout_rule(communication, {})).rows;
    const RankTensors tensors(world, group.rank(), false);
    const DispatchInput input = tensors.input();
    DispatchResult result;
    for (int round = 0; round < kRounds; ++round) {
      for (std::int64_t token = 0; token < kTokens; ++token)
        std::fill_n(reinterpret_cast<float*>(row_of(input.hidden_states, token)), kHidden,
                    sequence_number(round, group.rank(), token));
      check_ok(communication.dispatch(input, {}, result), "dispatch");
      for (const ExpectedRow& row : rows)
        check_numbers(row_of(result.hidden_states, row.position), sequence_number(round, row.source, row.token));
      result.handle = Handle();
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, RowsAreWholeWhenSeen, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
