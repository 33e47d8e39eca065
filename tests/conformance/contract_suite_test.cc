// SPDX-License-Identifier: Apache-2.0
// The contract of every backend, byte for byte against the plain reference, over the sampled space.
#include <gtest/gtest.h>

#include "conformance/scenarios.h"
#include "support/check.h"

namespace tokenyard::support {
namespace {

class ContractSuite : public ::testing::TestWithParam<Scenario> {};

// Token counts of the rounds: drawn, then 0 everywhere, full, then drawn again.
std::vector<World> worlds_of(const Scenario& scenario) {
  std::vector<World> worlds;
  WorldSpec spec = scenario.spec;
  const auto num_ranks = static_cast<std::size_t>(spec.num_ranks);
  for (int round = 0; round < 4; ++round) {
    spec.seed = scenario.spec.seed * 8 + static_cast<std::uint64_t>(round);
    spec.num_tokens.clear();
    if (round == 1) spec.num_tokens.assign(num_ranks, 0);
    if (round == 2) spec.num_tokens.assign(num_ranks, spec.params.max_tokens_per_rank);
    worlds.push_back(make_world(spec));
  }
  return worlds;
}

// Four rounds that reuse one result object.
TEST_P(ContractSuite, RoundsEqualTheReference) {
  const Scenario& scenario = GetParam();
  const std::vector<World> worlds = worlds_of(scenario);
  const auto rank_main = [&](const Group& group) {
    CommunicationOptions options = test_options();
    options.initial_epoch = scenario.initial_epoch;
    options.num_threads = scenario.num_threads;
    Communication communication = communication_for(group, scenario.backend, scenario.spec, options);
    DispatchResult result;
    RoundPlan plan = scenario.plan;
    for (std::size_t round = 0; round < worlds.size(); ++round) {
      plan.seed = scenario.plan.seed + round;
      try {
        play_round(communication, worlds[round], plan, result);
      } catch (const CheckFailure& failure) {
        throw CheckFailure("round " + std::to_string(round) + ": " + failure.what());
      }
    }
    check_ok(communication.poll(), "poll");
    check_ok(communication.destroy(), "destroy");
  };
  EXPECT_NO_THROW(run(scenario.rank_kind, scenario.spec.num_ranks, rank_main));
}

INSTANTIATE_TEST_SUITE_P(Sample, ContractSuite, ::testing::ValuesIn(sample_scenarios(4)), [](const auto& scenario) {
  return scenario.param.name();
});

}  // namespace
}  // namespace tokenyard::support
