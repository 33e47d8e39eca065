// SPDX-License-Identifier: Apache-2.0
// C110: several chunks under way at once, their combines finished in any order: each has a handle of its own, and a
// group of its own where communications of a group take turns.
#include <array>

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

constexpr std::size_t kChunks = 3;

World chunk(std::size_t which, std::int64_t round) {
  CaseWorld made;
  made.params = {.num_experts = 4, .top_k = 2, .hidden_size = 32, .max_tokens_per_rank = 6, .dtype = Dtype::kF32};
  made.ids.resize(3);
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    const auto shift = static_cast<std::int64_t>(which) + round;
    for (std::int64_t token = 0; token < 6 - (rank + shift) % 3; ++token)
      made.ids[static_cast<std::size_t>(rank)].push_back({(token + shift) % 4, (token + 2 * rank + shift + 1) % 4});
  }
  return made.make();
}

// The tensors of one chunk's combine, which live until it is received.
struct Combine {
  Tensor rows, output;

  void send(Communication& communication, const World& world, DispatchResult& result) {
    rows = expert_rows(communication, world, {}, result, Experts::kIdentity);
    output = Tensor(Dtype::kF32, {world.rank(communication.rank()).num_tokens, 32});
    check_ok(communication.get<SplitPhases>()->combine_send(result.handle, {.expert_output = rows.view()}, {}),
             "combine_send");
  }

  void receive(Communication& communication, const World& world, DispatchResult& result) {
    TensorView view = output.view();
    check_ok(communication.get<SplitPhases>()->combine_receive(result.handle, view), "combine_receive");
    output.check_guards("the output of combine_receive");
    check_y(view, world, communication.rank(), Experts::kIdentity);
  }
};

class ChunkedCombines : public EachBackend {};

TEST_P(ChunkedCombines, AreReceivedInAnyOrder) {
  constexpr std::array<std::array<std::size_t, kChunks>, 3> kOrders{{{2, 1, 0}, {0, 1, 2}, {1, 2, 0}}};
  const GroupsAtOnce groups(GetParam(), 3, kChunks);
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    std::vector<Communication> communications;
    for (std::size_t which = 0; which < kChunks; ++which)
      communications.push_back(communication_for(groups.of(which, group), GetParam(), chunk(which, 0).spec));
    std::array<DispatchResult, kChunks> results;
    for (std::int64_t round = 0; round < 9; ++round) {
      std::array<Combine, kChunks> combines;
      for (std::size_t which = 0; which < kChunks; ++which) {
        const World world = chunk(which, round);
        dispatch_and_check(communications[which], world, {}, results[which]);
        combines[which].send(communications[which], world, results[which]);
      }
      // Each rank in another order.
      for (const std::size_t which : kOrders[static_cast<std::size_t>(round + group.rank()) % 3])
        combines[which].receive(communications[which], chunk(which, round), results[which]);
    }
  }));
}

// The same handle's halves, with the next chunk's dispatch between them.
TEST_P(ChunkedCombines, OverlapWithTheNextDispatch) {
  const GroupsAtOnce groups(GetParam(), 3, kChunks);
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    std::vector<Communication> communications;
    for (std::size_t which = 0; which < 2; ++which)
      communications.push_back(communication_for(groups.of(which, group), GetParam(), chunk(which, 0).spec));
    std::array<DispatchResult, 2> results;
    dispatch_and_check(communications[0], chunk(0, 0), {}, results[0]);
    for (std::int64_t round = 0; round < 20; ++round) {
      const auto now = static_cast<std::size_t>(round % 2);
      const std::size_t next = 1 - now;
      Combine combine;
      combine.send(communications[now], chunk(now, round), results[now]);
      dispatch_and_check(communications[next], chunk(next, round + 1), {}, results[next]);
      combine.receive(communications[now], chunk(now, round), results[now]);
    }
  }));
}

// Two chunks in one communication, where the contract has room for them.
class ChunksOfOneCommunication : public EachBackend {};

TEST_P(ChunksOfOneCommunication, KeepTheirHandlesApart) {
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), chunk(0, 0).spec);
    std::array<DispatchResult, 2> results;
    for (std::int64_t round = 0; round < 10; ++round) {
      const std::array<World, 2> worlds{chunk(0, round), chunk(1, round)};
      std::array<Combine, 2> combines;
      for (std::size_t which = 0; which < 2; ++which)
        dispatch_and_check(communication, worlds[which], {}, results[which]);
      for (std::size_t which = 0; which < 2; ++which)
        check_result(communication, worlds[which], {}, results[which]);
      for (std::size_t which = 0; which < 2; ++which)
        combines[which].send(communication, worlds[which], results[which]);
      for (std::size_t which = 0; which < 2; ++which)
        combines[which].receive(communication, worlds[which], results[which]);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, ChunkedCombines, ::testing::ValuesIn(kMovingBackends), backend_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ChunksOfOneCommunication);
INSTANTIATE_TEST_SUITE_P(Backends,
                         ChunksOfOneCommunication,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.max_in_flight >= 2;
                         })),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
