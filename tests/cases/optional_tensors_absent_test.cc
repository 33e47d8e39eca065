// SPDX-License-Identifier: Apache-2.0
// C155: tensors that a mode does not need may be left out; a tensor that it does need is asked for by name.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class OptionalTensorsAbsent : public EachBackend {
 protected:
  static WorldSpec spec() {
    WorldSpec spec;
    spec.params = {.num_experts = 8, .top_k = 2, .hidden_size = 24, .max_tokens_per_rank = 6};
    spec.num_ranks = 2;
    spec.num_tokens = {6, 4};
    return spec;
  }
};

// Rounds with and without weights take turns; where the caller applies them, nobody else asks for them.
class WeightsAbsent : public OptionalTensorsAbsent {};

TEST_P(WeightsAbsent, InEveryOtherRound) {
  const World with = make_world(spec());
  WorldSpec spec_without = spec();
  spec_without.with_weights = false;
  const World without = make_world(spec_without);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec());
    DispatchResult result;
    for (int round = 0; round < 6; ++round) {
      play_round(communication, round % 2 == 0 ? without : with, {}, result);
      check_eq(result.topk_weights.defined(), round % 2 == 1, "weights of the result are given");
    }
  }));
}

TEST_P(OptionalTensorsAbsent, IdsWhereTheyRoute) {
  const World world = make_world(spec());
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec());
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    DispatchInput input = tensors.input(false);
    for (int round = 0; round < 2; ++round) {
      if (communication.contract().topk_ids_required) {
        check_throws(ErrorCode::kInvalidArgument, {"topk_ids is not given"},
                     [&] { (void)communication.dispatch(input, {}, result); });
      } else {
        input.topk_weights = {};
        check_ok(communication.dispatch(input, {}, result), "dispatch of rows alone");
        check(!result.topk_ids.defined() && !result.topk_weights.defined(), "ids or weights that nobody gave");
        check_eq(result.hidden_states.num_rows(), 10, "rows");
        combine_and_check(communication, world, {}, result, result.handle);
      }
      play_round(communication, world, {}, result);
    }
  }));
}

TEST_P(OptionalTensorsAbsent, RowsAreAskedFor) {
  const World world = make_world(spec());
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec());
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    DispatchInput input = tensors.input();
    input.hidden_states = {};
    check_throws(ErrorCode::kInvalidArgument, {"hidden_states is not given"},
                 [&] { (void)communication.dispatch(input, {}, result); });
    dispatch_and_check(communication, world, {}, result);
    Tensor output(Dtype::kBf16, {tensors.num_tokens(), 24});
    TensorView view = output.view();
    check_throws(ErrorCode::kInvalidArgument, {"expert_output is not given"},
                 [&] { (void)communication.combine(result.handle, {}, {}, view); });
    dispatch_and_check(communication, world, {}, result);
    TensorView none;
    const std::int64_t rows = num_flat_rows(result.hidden_states);
    const Tensor expert_output(Dtype::kBf16, {rows, 24});
    check_throws(ErrorCode::kInvalidArgument, {"output is not given"}, [&] {
      (void)communication.combine(result.handle, {.expert_output = expert_output.view()}, {}, none);
    });
    play_round(communication, world, {}, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, OptionalTensorsAbsent, ::testing::ValuesIn(kMovingBackends), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends,
                         WeightsAbsent,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.weights_applied_by == WeightRule::kCaller;
                         })),
                         backend_name);

// A replay has its route already: ids are not needed, and are refused when given.
class IdsOfAReplay : public OptionalTensorsAbsent {};

TEST_P(IdsOfAReplay, AreNotNeeded) {
  const World world = make_world(spec());
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec());
    DispatchResult first;
    play_round(communication, world, {}, first);
    const RankTensors tensors(world, group.rank(), false);
    DispatchResult again;
    check_throws(ErrorCode::kInvalidArgument, {"topk_ids"},
                 [&] { (void)communication.dispatch(tensors.input(), {.replay = &first.handle}, again); });
    DispatchInput input = tensors.input(false);
    input.topk_weights = {};
    check_ok(communication.dispatch(input, {.replay = &first.handle}, again), "replay without ids");
    combine_and_check(communication, world, {}, again, again.handle);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         IdsOfAReplay,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.handle_use == HandleUse::kReplay;
                         })),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
