// SPDX-License-Identifier: Apache-2.0
// high_throughput made from a byte budget: whatever the budget, the result is that of one round in a window sized by
// params, bit for bit.
#include "conformance/byte_budget.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <mutex>

#include "conformance/scenarios.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::support {
namespace {

// Dispatched and combined bytes of one round, both checked against the plain reference.
std::vector<std::byte> play(Communication& communication, const World& world, const RoundPlan& plan) {
  DispatchResult result;
  dispatch_and_check(communication, world, plan, result);
  std::vector<std::byte> all;
  if (!plan.caller_tensors) all = used_bytes(communication, world, plan, result);  // those are gone by now
  const std::vector<std::byte> sums = combine_and_check(communication, world, plan, result, result.handle);
  all.insert(all.end(), sums.begin(), sums.end());
  return all;
}

// How many sub-rounds a scenario is cut into, about.
enum class Cut : std::uint8_t { kNone, kTwo, kMany };

struct CutScenario {
  Scenario scenario;
  Cut cut = Cut::kNone;

  [[nodiscard]] std::string name() const {
    constexpr std::array kNames{"whole_", "two_", "many_"};
    return kNames[static_cast<std::size_t>(cut)] + scenario.name();
  }
};

std::ostream& operator<<(std::ostream& out, const CutScenario& scenario) {
  return out << scenario.name();
}

std::vector<CutScenario> cut_scenarios() {
  std::vector<CutScenario> all;
  for (Scenario scenario : sample_scenarios(2)) {
    if (scenario.backend != "high_throughput") continue;
    if (scenario.spec.seed % 5 == 0) scenario.spec.params.hidden_size = 2048;
    for (const Cut cut : {Cut::kNone, Cut::kTwo, Cut::kMany})
      all.push_back({scenario, cut});
  }
  return all;
}

class ByteBudget : public ::testing::TestWithParam<CutScenario> {};

TEST_P(ByteBudget, GivesWhatOneRoundGives) {
  const Scenario& scenario = GetParam().scenario;
  const Cut cut = GetParam().cut;
  const WorldSpec& spec = scenario.spec;
  const std::int64_t tokens = spec.params.max_tokens_per_rank;
  const std::int64_t per_part = cut == Cut::kNone ? tokens : cut == Cut::kTwo ? (tokens + 1) / 2 : 1;
  const World worlds[] = {make_world(spec), make_world(with_seed(spec, spec.seed + 1000))};
  EXPECT_NO_THROW(run(scenario.rank_kind, spec.num_ranks, [&](const Group& group) {
    CommunicationOptions options = test_options();
    options.initial_epoch = scenario.initial_epoch;
    options.num_threads = scenario.num_threads;
    Communication whole = communication_for(group, "high_throughput", spec, options);
    const std::int64_t bytes = budget_for(spec, per_part);
    Communication budget = budget_made(group, bytes, spec.params.dtype, options);
    check_eq(budget.window_bytes(), bytes, "bytes of the window");
    for (const World& world : worlds) {
      const std::vector<std::byte> expected = play(whole, world, scenario.plan);
      check(play(budget, world, scenario.plan) == expected, "a byte budget gave other bytes");
    }
    if (cut == Cut::kNone) check_eq(budget.statistics().num_dispatches, std::int64_t{2}, "one round a call");
    if (cut == Cut::kMany && tokens > 6 && spec.params.hidden_size > 100)
      check(budget.statistics().num_dispatches > 2, "no call was cut");
  }));
}

INSTANTIATE_TEST_SUITE_P(Scenarios, ByteBudget, ::testing::ValuesIn(cut_scenarios()), [](const auto& scenario) {
  return scenario.param.name();
});

// What one communication is asked to move, call after call.
WorldSpec draw_spec(int num_ranks, Rng& rng) {
  constexpr std::array kHidden{1, 7, 24, 128, 300, 2048, 2880};
  constexpr std::array kDtypes{Dtype::kBf16, Dtype::kF16, Dtype::kF32};
  constexpr std::array kFormats{DispatchFormat::kNone,  DispatchFormat::kNone,  DispatchFormat::kFp8Block128,
                                DispatchFormat::kMxfp4, DispatchFormat::kNvfp4, DispatchFormat::kFp8PerTensor};
  const auto pick = [&rng](const auto& list) { return list[static_cast<std::size_t>(rng.below(std::ssize(list)))]; };
  WorldSpec spec;
  spec.num_ranks = num_ranks;
  spec.params.num_experts = static_cast<int>(1 + rng.below(3 * num_ranks + 3));
  spec.params.top_k = static_cast<int>(1 + rng.below(9));
  spec.params.hidden_size = pick(kHidden);
  spec.params.max_tokens_per_rank = static_cast<int>(1 + rng.below(spec.params.hidden_size > 1000 ? 9 : 70));
  spec.params.dispatch_format = pick(kFormats);
  // Of quantised rows, combine's dtype is what the communication was made with.
  if (spec.params.dispatch_format == DispatchFormat::kNone) spec.params.dtype = pick(kDtypes);
  spec.skew = static_cast<Skew>(rng.below(kNumSkews));
  spec.id_dtype = rng.below(2) == 0 ? Dtype::kI32 : Dtype::kI64;
  spec.weight_dtype = pick(kDtypes);
  spec.with_weights = rng.below(4) != 0;
  spec.seed = rng.next();
  return spec;
}

RoundPlan draw_plan(const WorldSpec& spec, Rng& rng) {
  RoundPlan plan{.seed = rng.next(), .expert_dtype = spec.params.dtype};
  plan.strided = rng.below(2) == 0;
  plan.caller_tensors = rng.below(3) == 0;
  plan.zero_copy = rng.below(2) == 0;
  plan.weights_back = rng.below(2) == 0;
  plan.num_biases = static_cast<int>(rng.below(3));
  plan.expert_alignment = static_cast<int>(1 + rng.below(8));
  if (!plan.zero_copy && rng.below(3) == 0) {
    plan.num_worst_tokens = rng.below(1 + 2 * std::int64_t{spec.num_ranks} * spec.params.max_tokens_per_rank);
  }
  return plan;
}

class ChangingShapes : public ::testing::TestWithParam<std::tuple<int, RankKind>> {};

TEST_P(ChangingShapes, EachCallHasItsOwn) {
  const auto [num_ranks, kind] = GetParam();
  EXPECT_NO_THROW(run(kind, num_ranks, [&, ranks = num_ranks](const Group& group) {
    Rng rng(77);
    Communication communication = budget_made(group, 60'000 * ranks);
    for (int call = 0; call < 25; ++call) {
      const WorldSpec spec = draw_spec(ranks, rng);
      play(communication, make_world(spec), draw_plan(spec, rng));
    }
    check(communication.statistics().num_dispatches > 25, "no call was cut");
    check(communication.destroy().ok(), "destroy");
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks,
                         ChangingShapes,
                         ::testing::Combine(::testing::Values(1, 2, 3, 5, 8),
                                            ::testing::Values(RankKind::kThreads, RankKind::kProcesses)),
                         [](const auto& ranks) {
                           return std::string(name(std::get<1>(ranks.param))) +
                                  std::to_string(std::get<0>(ranks.param));
                         });

// Any shapes in any budget in which one token of each rank fits.
TEST(ByteBudgetProperties, AnyCallInAnyBudget) {
  EXPECT_TRUE(rc::check("a call through a byte budget", [] {
    const int num_ranks = *rc::gen::inRange(1, 6);
    Rng rng(*rc::gen::arbitrary<std::uint64_t>());
    const WorldSpec spec = draw_spec(num_ranks, rng);
    const RoundPlan plan = draw_plan(spec, rng);
    const std::int64_t bytes = budget_for(spec, 1 + rng.below(spec.params.max_tokens_per_rank));
    const World world = make_world(spec);
    run_ranks(num_ranks, [&](const Group& group) {
      Communication communication = budget_made(group, bytes);
      play(communication, world, plan);
      play(communication, world, plan);
    });
  }));
}

}  // namespace
}  // namespace tokenyard::support
