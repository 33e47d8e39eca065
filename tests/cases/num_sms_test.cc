// SPDX-License-Identifier: Apache-2.0
// C151: 0 SMs means that the library chooses; a negative number is refused; dispatch, combine and layers may differ.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class NumSms : public EachBackend {};

World round_of(std::int64_t layer) {
  CaseWorld made;
  made.ids = {IdTable{{0}, {3}, {layer % 4}}, IdTable{{1}, {(layer + 2) % 4}}};
  return made.make();
}

TEST_P(NumSms, AnyCountWorksAndMayChange) {
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), round_of(0).spec);
    DispatchResult result;
    std::int64_t layer = 0;
    for (const int of_dispatch : {0, 1, 2, 7, 1'000'000}) {
      for (const int of_combine : {0, 1, 2, 7, 1'000'000}) {
        const World world = round_of(++layer);
        const RankTensors tensors(world, group.rank(), false);
        check_ok(communication.dispatch(tensors.input(), {.num_sms = of_dispatch}, result), "dispatch");
        check_result(communication, world, {}, result);
        const Tensor rows = expert_rows(communication, world, {}, result);
        Tensor output(Dtype::kF32, {tensors.num_tokens(), 16});
        TensorView view = output.view();
        const CombineInput input{.expert_output = rows.view()};
        check_ok(communication.combine(result.handle, input, {.num_sms = of_combine}, view), "combine");
        check_y(view, world, group.rank());
      }
    }
  }));
}

TEST_P(NumSms, NegativeCountsAreRefused) {
  const World world = round_of(0);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    check_throws(ErrorCode::kInvalidArgument, {"num_sms", "-1"},
                 [&] { (void)communication.dispatch(tensors.input(), {.num_sms = -1}, result); });
    dispatch_and_check(communication, world, {}, result);
    const Tensor rows = expert_rows(communication, world, {}, result);
    Tensor output(Dtype::kF32, {tensors.num_tokens(), 16});
    output.remember();
    TensorView view = output.view();
    check_throws(ErrorCode::kInvalidArgument, {"num_sms", "-1"}, [&] {
      (void)communication.combine(result.handle, {.expert_output = rows.view()}, {.num_sms = -1}, view);
    });
    output.check_unchanged("the output of a refused combine");
    moe_round(communication, world, {}, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, NumSms, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
