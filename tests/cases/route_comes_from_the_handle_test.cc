// SPDX-License-Identifier: Apache-2.0
// C101: combine takes its route from the handle. There is no place to give it ids, received ones least of all; weights
// to bring back must have a row for each received row.
#include <algorithm>

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class RouteComesFromTheHandle : public EachBackend {};

// The sender's ids, and the received ones where they are the caller's to write, are gone before combine. Two tokens on
// each of two ranks and two rows on each: sizes alone would not tell a mix-up.
TEST_P(RouteComesFromTheHandle, AlsoWhenSizesAgreeByChance) {
  CaseWorld made;
  made.ids = {IdTable{{3}, {0}}, IdTable{{2}, {1}}};
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    for (int round = 0; round < 10; ++round) {
      const RankTensors tensors(world, group.rank(), false);
      const DispatchInput input = tensors.input();
      check_ok(communication.dispatch(input, {}, result), "dispatch");
      const Tensor rows = expert_rows(communication, world, {}, result);
      for (std::int64_t token = 0; token < 2; ++token)
        std::fill_n(row_of(input.topk_ids, token), 8, std::byte{static_cast<unsigned char>(token)});
      for (std::int64_t row = 0; result.topk_ids.defined() && row < num_flat_rows(result.topk_ids); ++row)
        std::fill_n(row_of(result.topk_ids, row), 8, std::byte{0});
      Tensor output(Dtype::kF32, {2, 16});
      TensorView view = output.view();
      check_ok(communication.combine(result.handle, {.expert_output = rows.view()}, {}, view), "combine");
      check_y(view, world, group.rank());
    }
  }));
}

// Four ranks with different numbers of tokens and rows.
TEST_P(RouteComesFromTheHandle, OnFourRanks) {
  CaseWorld made;
  made.params = {.num_experts = 8, .top_k = 2, .hidden_size = 16, .max_tokens_per_rank = 8, .dtype = Dtype::kF32};
  made.ids = {repeated(8, {7, 0}), repeated(1, {7, 6}), repeated(3, {1, 7}), {}};
  EXPECT_NO_THROW(play_worlds(GetParam(), std::vector<World>(5, made.make())));
}

INSTANTIATE_TEST_SUITE_P(Backends, RouteComesFromTheHandle, ::testing::ValuesIn(kMovingBackends), backend_name);

class WeightsOfReceivedRows : public EachBackend {};

// Weights with the sender's rows instead of the received ones, and of another width.
TEST_P(WeightsOfReceivedRows, HaveARowForEach) {
  CaseWorld made;
  made.params.top_k = 2;
  made.ids = {repeated(4, {2, 3}), repeated(2, {3, 2})};  // six rows on rank 1, none on rank 0
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    const std::int64_t num_rows = group.rank() == 0 ? 0 : 6;
    const std::int64_t num_tokens = group.rank() == 0 ? 4 : 2;
    for (const std::vector<std::int64_t>& shape :
         {std::vector<std::int64_t>{num_tokens, 2}, {num_rows, 1}, {num_rows + 1, 2}}) {
      dispatch_and_check(communication, world, {}, result);
      const Tensor rows = expert_rows(communication, world, {}, result);
      const Tensor weights(Dtype::kF32, shape);
      Tensor output(Dtype::kF32, {num_tokens, 16});
      output.remember();
      TensorView view = output.view();
      const CombineInput input{.expert_output = rows.view(), .topk_weights = weights.view()};
      check_throws(ErrorCode::kInvalidArgument, {"topk_weights"},
                   [&] { (void)communication.combine(result.handle, input, {}, view); });
      output.check_unchanged("the output of a refused combine");
      moe_round(communication, world, {}, result);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         WeightsOfReceivedRows,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.returns_weights;
                         })),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
