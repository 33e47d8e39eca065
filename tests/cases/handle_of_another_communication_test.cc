// SPDX-License-Identifier: Apache-2.0
// C113: a handle is refused by every communication but its own, also when all sizes agree; nothing is written, and the
// handle stays good.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class HandleOfAnotherCommunication : public EachBackend {};

World world_of(int num_experts, int max_tokens) {
  CaseWorld made{.ids = std::vector<IdTable>(2, IdTable{{0}, {3}})};
  made.params.num_experts = num_experts;
  made.params.max_tokens_per_rank = max_tokens;
  return made.make();
}

void refuse(Communication& communication, DispatchResult& foreign, const TensorView& rows) {
  Tensor output(Dtype::kF32, {2, 16});
  output.remember();
  TensorView view = output.view();
  check_throws(ErrorCode::kInvalidArgument, {"another communication"},
               [&] { (void)communication.combine(foreign.handle, {.expert_output = rows}, {}, view); });
  check_throws(ErrorCode::kInvalidArgument, {"another communication"},
               [&] { (void)communication.combine_input(foreign.handle, Dtype::kF32); });
  output.check_unchanged("the output of a refused combine");
  check(foreign.handle.valid(), "a refused handle was used up");
}

// The other communication has the same sizes, another number of tokens, and another number of experts.
TEST_P(HandleOfAnotherCommunication, IsRefusedAndStaysGood) {
  const World mine = world_of(4, 8);
  for (const World& other : {world_of(4, 8), world_of(4, 6), world_of(8, 8)}) {
    EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
      Communication a = communication_for(group, GetParam(), mine.spec);
      Communication b = communication_for(group, GetParam(), other.spec);
      DispatchResult of_a;
      DispatchResult of_b;
      for (int round = 0; round < 3; ++round) {
        dispatch_and_check(a, mine, {}, of_a);
        const Tensor rows = expert_rows(a, mine, {}, of_a);
        refuse(b, of_a, rows.view());
        check_ok(b.poll(), "a refused handle leaves no fault");
        moe_combine(a, mine, {}, of_a);
        moe_round(b, other, {}, of_b);
      }
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, HandleOfAnotherCommunication, ::testing::ValuesIn(kMovingBackends), backend_name);

class ReplayOfAnotherCommunication : public EachBackend {};

TEST_P(ReplayOfAnotherCommunication, IsRefused) {
  const World world = world_of(4, 8);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication a = communication_for(group, GetParam(), world.spec);
    Communication b = communication_for(group, GetParam(), world.spec);
    DispatchResult of_a;
    DispatchResult of_b;
    moe_round(a, world, {}, of_a);
    for (int round = 0; round < 3; ++round) {
      const RankTensors tensors(world, group.rank(), false);
      DispatchInput input = tensors.input(false);
      input.topk_weights = {};
      check_throws(ErrorCode::kInvalidArgument, {"another communication"},
                   [&] { (void)b.dispatch(input, {.replay = &of_a.handle}, of_b); });
      moe_round(b, world, {}, of_b);
      check_ok(a.dispatch(input, {.replay = &of_a.handle}, of_b), "replay where the handle belongs");
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         ReplayOfAnotherCommunication,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.handle_use == HandleUse::kReplay;
                         })),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
