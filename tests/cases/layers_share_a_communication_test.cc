// SPDX-License-Identifier: Apache-2.0
// C56: layers of different shapes in turn, each with its own communication or all with one that grew to the largest.
// C61: sizes that change from call to call move no control word: counts stay exact.
#include <array>

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

World layer(int hidden_size, int top_k, int num_experts, std::int64_t shift) {
  CaseWorld made{.ids = std::vector<IdTable>(3)};
  made.params = {.num_experts = num_experts,
                 .top_k = top_k,
                 .hidden_size = hidden_size,
                 .max_tokens_per_rank = 5,
                 .dtype = Dtype::kF32};
  for (int rank = 0; rank < 3; ++rank) {
    for (std::int64_t token = 0; token < 5 - rank; ++token) {
      std::vector<std::int64_t> row;
      for (int slot = 0; slot < top_k; ++slot)
        row.push_back((3 * rank + 5 * token + 3 * slot + shift) % num_experts);
      made.ids[static_cast<std::size_t>(rank)].push_back(row);
    }
  }
  return made.make();
}

// Layers A and B as ABA and BAB, round after round.
constexpr std::array<std::size_t, 6> kOrder{0, 1, 0, 1, 0, 1};

class LayersOfDifferentShape : public EachBackend {};

TEST_P(LayersOfDifferentShape, WithACommunicationEach) {
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    std::vector<Communication> layers;
    layers.push_back(communication_for(group, GetParam(), layer(16, 2, 8, 0).spec));
    layers.push_back(communication_for(group, GetParam(), layer(64, 4, 16, 0).spec));
    std::array<DispatchResult, 2> results;
    for (std::int64_t round = 0; round < 4; ++round) {
      for (const std::size_t which : kOrder) {
        const World world = which == 0 ? layer(16, 2, 8, round) : layer(64, 4, 16, round);
        moe_round(layers[which], world, {}, results[which], Experts::kIdentity);
      }
    }
  }));
}

class LayersOfOneCommunication : public EachBackend {};

// Each layer asks for its shape before its round, as a manager does; the window only grows.
TEST_P(LayersOfOneCommunication, GrowToTheLargest) {
  for (const std::size_t first : {0U, 1U}) {
    EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
      const auto shape = [&](std::size_t which, std::int64_t shift) {
        return which == 0 ? layer(16, 2, 8, shift) : layer(64, 4, 16, shift);
      };
      Communication communication = communication_for(group, GetParam(), shape(first, 0).spec);
      DispatchResult result;
      RoundPlan plan;
      plan.runtime_max_tokens = 5;
      std::int64_t bytes = communication.window_bytes();
      for (const std::size_t which : kOrder) {
        const World world = shape((which + first) % 2, static_cast<std::int64_t>(which));
        communication.get<Growth>()->reserve(world.spec.params, 0);
        check(communication.window_bytes() >= bytes, "the window shrank");
        bytes = communication.window_bytes();
        moe_round(communication, world, plan, result, Experts::kIdentity);
      }
      check_eq(communication.params().hidden_size, 64, "hidden_size after the larger layer");
    })) << first;
  }
}

// One communication of (8, 32); its calls alternate between (8, 32), (4, 32) and (8, 16) with all tokens there may be.
TEST_P(LayersOfOneCommunication, SizesOfACallMoveNoControlWord) {
  struct Call {
    int tokens;
    int hidden_size;
  };

  const auto world_of = [](const Call& call, std::int64_t shift) {
    CaseWorld made{.ids = std::vector<IdTable>(3)};
    made.params.hidden_size = call.hidden_size;
    for (IdTable& table : made.ids) {
      for (std::int64_t token = 0; token < call.tokens; ++token)
        table.push_back({(token + shift) % 4});
    }
    return made.make();
  };
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world_of({8, 32}, 0).spec);
    DispatchResult result;
    for (std::int64_t round = 0; round < 20; ++round) {
      for (const Call& call : {Call{8, 32}, Call{4, 32}, Call{8, 16}, Call{8, 32}}) {
        RoundPlan plan;
        plan.runtime_max_tokens = call.tokens;
        moe_round(communication, world_of(call, round), plan, result);
        check_lists_eq(result.counts.tokens_per_source, std::vector<std::int64_t>(3, call.tokens), "tokens");
      }
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, LayersOfDifferentShape, ::testing::ValuesIn(kMovingBackends), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends,
                         LayersOfOneCommunication,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.grows && contract.takes_runtime_max_tokens;
                         })),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
