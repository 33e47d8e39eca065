// SPDX-License-Identifier: Apache-2.0
// C64: a load that is all on one expert, and more than any queue holds, arrives once and in order of its source.
// C152: a queue without room is refused, and local groups need none.
#include <variant>

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

// Where rows go through a queue, it holds sixteen of them.
BackendConfig short_queues(std::string_view backend, const WorldSpec& spec) {
  const std::int64_t row = spec.params.hidden_size * size_of(spec.params.dtype) + 12 * spec.params.top_k;
  if (backend == "two_sided") return TwoSidedConfig{.queue_bytes_per_peer = 16 * row};
  return config_for(backend, spec);
}

class SkewBeyondTheQueue : public EachBackend {};

TEST_P(SkewBeyondTheQueue, AllToOneExpert) {
  CaseWorld made{.ids = std::vector<IdTable>(4, repeated(64, {0}))};
  made.params.max_tokens_per_rank = 64;
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Communication communication =
        create_communication(group, world.spec.params, short_queues(GetParam(), world.spec), test_options());
    DispatchResult result;
    for (int round = 0; round < 10; ++round) {
      moe_round(communication, world, {}, result);
      if (!routes(communication.contract())) continue;
      check_lists_eq(result.counts.rows_per_source, std::vector<std::int64_t>(4, group.rank() == 0 ? 64 : 0), "rows");
    }
  }));
}

// The loaded expert moves from rank to rank while everybody else's queue is empty.
TEST_P(SkewBeyondTheQueue, TheLoadMoves) {
  std::vector<World> worlds;
  for (std::int64_t round = 0; round < 12; ++round) {
    CaseWorld made{.ids = std::vector<IdTable>(4, repeated(64, {round % 4}))};
    made.params.max_tokens_per_rank = 64;
    made.ids[static_cast<std::size_t>(round % 3)] = {};
    worlds.push_back(made.make());
  }
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    const WorldSpec& spec = worlds.front().spec;
    Communication communication =
        create_communication(group, spec.params, short_queues(GetParam(), spec), test_options());
    DispatchResult result;
    for (const World& world : worlds)
      moe_round(communication, world, {}, result);
  }));
}

// A group of this process alone, with the backend's default config: no queue is divided by.
TEST_P(SkewBeyondTheQueue, LocalGroupsOfEverySize) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    CaseWorld made{.ids = std::vector<IdTable>(static_cast<std::size_t>(ranks), IdTable{{0, 7}, {3, 4}, {6, 1}})};
    made.params.num_experts = 8;
    made.params.top_k = 2;
    const World world = made.make();
    EXPECT_NO_THROW(run_ranks(ranks, [&](const Group& group) {
      Communication communication = create_communication(group, world.spec.params, GetParam(), test_options());
      DispatchResult result;
      for (int round = 0; round < 2; ++round)
        moe_round(communication, world, {}, result);
    })) << ranks;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, SkewBeyondTheQueue, ::testing::ValuesIn(kMovingBackends), backend_name);

class QueueWithoutRoom : public EachBackend {};

TEST_P(QueueWithoutRoom, IsRefused) {
  const World world = CaseWorld{.ids = std::vector<IdTable>(2, repeated(2, {0}))}.make();
  for (const std::int64_t bytes : {-1, 8}) {  // 0 asks for the default
    EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
      check_throws(ErrorCode::kInvalidArgument, {"queue_bytes_per_peer", std::to_string(bytes)}, [&] {
        (void)create_communication(group, world.spec.params, TwoSidedConfig{.queue_bytes_per_peer = bytes});
      });
    })) << bytes;
  }
}

std::vector<std::string_view> queued_backends() {
  std::vector<std::string_view> queued;
  for (const std::string_view backend : kMovingBackends) {
    if (std::holds_alternative<TwoSidedConfig>(find_backend(backend).default_config)) queued.push_back(backend);
  }
  return queued;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(QueueWithoutRoom);
INSTANTIATE_TEST_SUITE_P(Backends, QueueWithoutRoom, ::testing::ValuesIn(queued_backends()), backend_name);

}  // namespace
}  // namespace tokenyard::support
