// SPDX-License-Identifier: Apache-2.0
// C37, C38: payload rows of any number of bytes, side by side in one call, from any address; results start aligned.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class AnyPayloadWidth : public EachBackend {};

class AnyExtraPayloadWidth : public EachBackend {};

TEST_P(AnyExtraPayloadWidth, RowsOfOneToTwentyBytes) {
  WorldSpec spec;
  spec.params = {.num_experts = 4, .top_k = 1, .hidden_size = 8, .max_tokens_per_rank = 3};
  spec.num_ranks = 2;
  spec.num_tokens = {3, 3};
  spec.weight_dtype = Dtype::kBf16;
  spec.extra_row_bytes = {1, 2, 4, 6, 8, 12, 16, 20};
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    for (std::uint64_t round = 0; round < 4; ++round) {
      WorldSpec now = spec;
      now.seed = round;
      play_round(communication, make_world(now), {.seed = round, .strided = round % 2 == 1}, result);
    }
  }));
}

// Odd numbers of odd rows put the next payload off 16 bytes unless each starts aligned (C38).
TEST_P(AnyExtraPayloadWidth, ResultsStartAligned) {
  for (const int num_ranks : {2, 3}) {
    for (const int max_tokens : {3, 5}) {
      WorldSpec spec;
      spec.params = {.num_experts = 4, .top_k = 1, .hidden_size = 7, .max_tokens_per_rank = max_tokens};
      spec.num_ranks = num_ranks;
      spec.extra_row_bytes = {3, 16, 4, 4};
      EXPECT_NO_THROW(run_ranks(
          num_ranks,
          [&](const Group& group) {
            Communication communication = communication_for(group, GetParam(), spec);
            DispatchResult result;
            const World world = make_world(spec);
            dispatch_and_check(communication, world, {}, result);
            std::vector<TensorView> views = result.extra_payloads;
            for (const TensorView& view : {result.hidden_states, result.topk_ids, result.topk_weights}) {
              views.push_back(view);
            }
            for (const TensorView& view : views) {
              check_eq(reinterpret_cast<std::uintptr_t>(view.data) % 16, 0U, "address of a payload modulo 16");
            }
            combine_and_check(communication, world, {}, result, result.handle);
          }))
          << num_ranks << " " << max_tokens;
    }
  }
}

// Inputs that start one element after an aligned address (C38).
TEST_P(AnyPayloadWidth, MisalignedInputs) {
  CaseWorld made{.ids = std::vector<IdTable>(2, repeated(3, {2}))};
  made.params.dtype = Dtype::kBf16;
  made.params.hidden_size = 9;
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    DispatchInput input = tensors.input();
    const RankData& data = world.rank(group.rank());
    Tensor hidden(Dtype::kBf16, {3, 9}, {.offset_bytes = 2});
    hidden.fill(data.hidden.bytes);
    Tensor ids(Dtype::kI64, {3, 1}, {.offset_bytes = 8});
    ids.fill(id_bytes(data.ids, Dtype::kI64));
    Tensor weights(Dtype::kF32, {3, 1}, {.offset_bytes = 4});
    weights.fill(data.weights.bytes);
    input.hidden_states = hidden.view();
    input.topk_ids = ids.view();
    input.topk_weights = weights.view();
    check_ok(communication.dispatch(input, {}, result), "dispatch");
    check_result(communication, world, {}, result);
    combine_and_check(communication, world, {}, result, result.handle);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, AnyPayloadWidth, ::testing::ValuesIn(kMovingBackends), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends,
                         AnyExtraPayloadWidth,
                         ::testing::ValuesIn(moving_backends_that(takes_extras)),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
