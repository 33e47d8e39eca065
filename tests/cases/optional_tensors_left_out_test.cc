// SPDX-License-Identifier: Apache-2.0
// C155: tensors that a mode does not need may be left out, and one that it needs is named.
#include "tokenyard/manager.h"

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

constexpr std::chrono::milliseconds kSoon{2'000};

WorldSpec spec_of(bool with_weights) {
  return {.params = {.num_experts = 6, .top_k = 2, .hidden_size = 16, .max_tokens_per_rank = 5, .dtype = Dtype::kF32},
          .num_ranks = 3,
          .with_weights = with_weights,
          .seed = 155};
}

class OptionalTensors : public EachBackend {};

TEST_P(OptionalTensors, WeightsMayBeLeftOut) {
  const World without = make_world(spec_of(false));
  const World with = make_world(spec_of(true));
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), without.spec);
    DispatchResult result;
    for (const World* world : {&without, &with, &without}) {
      dispatch_and_check(communication, *world, {}, result);
      check(result.topk_weights.defined() == world->spec.with_weights, "weights came, or did not, as they were given");
      combine_and_check(communication, *world, {}, result, result.handle);  // without weights back
    }
  }));
}

TEST_P(OptionalTensors, IdsAreNamedWhereTheyAreNeeded) {
  const World world = make_world(spec_of(true));
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    const RankTensors tensors(world, group.rank(), false);
    DispatchInput input = tensors.input();
    input.topk_ids = {};
    DispatchResult result;
    const Stopwatch stopwatch;
    if (communication.contract().topk_ids_required) {
      check_throws(ErrorCode::kInvalidArgument, {"topk_ids is not given"},
                   [&] { (void)communication.dispatch(input, {}, result); });
    } else {
      check_ok(communication.dispatch(input, {}, result), "dispatch without ids");
      check(!result.topk_ids.defined(), "ids that nobody gave");
    }
    input.hidden_states = {};
    check_throws(ErrorCode::kInvalidArgument, {"hidden_states is not given"},
                 [&] { (void)communication.dispatch(input, {}, result); });
    stopwatch.check_below(kSoon, "refused calls");
    play_round(communication, world, {}, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, OptionalTensors, ::testing::ValuesIn(kMovingBackends), backend_name);

// The route of a handle stands in for ids and weights.
TEST(OptionalTensorsOfReplays, NeitherIdsNorWeights) {
  const World world = make_world(spec_of(false));
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication = communication_for(group, "high_throughput", world.spec);
    const RankTensors tensors(world, group.rank(), false);
    DispatchResult first;
    play_round(communication, world, {}, first);
    DispatchResult again;
    check_ok(communication.dispatch(tensors.input(false), {.replay = &first.handle}, again), "replay");
    check_result(communication, world, {}, again, false);
    check(!again.topk_ids.defined() && !again.topk_weights.defined(), "a replay carries rows only");
    combine_and_check(communication, world, {}, again, again.handle);
  }));
}

TEST(OptionalTensorsOfGatherCalls, WhatIsMissingIsNamed) {
  const World world = make_world(spec_of(true));
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    All2AllManager manager = create_all2all_manager(
        "all_gather", {.group = group, .parallel = {.dp = group}, .communication = test_options()});
    std::vector<std::int64_t> sizes;
    for (const RankData& data : world.ranks)
      sizes.push_back(data.num_tokens);
    manager.set_step_num_tokens(sizes);
    const RankTensors tensors(world, group.rank(), false);
    const DispatchInput input = tensors.input();
    GatherCalls& calls = manager.gather_calls();
    GatherResult result;
    const auto refused = [&](const std::string& what, const TensorView& weights, const TensorView& ids) {
      check_throws(ErrorCode::kInvalidArgument, {what + " is not given"},
                   [&] { (void)calls.dispatch(input.hidden_states, weights, ids, {}, result); });
    };
    const Stopwatch stopwatch;
    refused("topk_weights", {}, input.topk_ids);
    refused("topk_ids", input.topk_weights, {});
    check_throws(ErrorCode::kInvalidArgument, {"router_logits is not given"},
                 [&] { (void)calls.dispatch_router_logits(input.hidden_states, {}, {}, result); });
    stopwatch.check_below(kSoon, "refused calls");
    check_ok(calls.dispatch(input.hidden_states, input.topk_weights, input.topk_ids, {}, result), "dispatch");
  }));
}

}  // namespace
}  // namespace tokenyard::support
