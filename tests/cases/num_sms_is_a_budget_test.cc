// SPDX-License-Identifier: Apache-2.0
// C151: num_sms = 0 leaves the choice to the library; a number of SMs never changes a result, and one that is none is
// an error. Dispatch and combine of a round may be given different ones.
#include <set>

#include "cases/case_round.h"
#include "support/casts.h"

namespace tokenyard::support {
namespace {

World small_world() {
  CaseWorld made{.ids = {{{0, 3}, {1, 1}}, {{2, 0}, {-1, 3}, {3, 2}}}};
  made.params.top_k = 2;
  return made.make();
}

// Ranks that this token's rows come back from.
std::int64_t num_rows_of(const World& world, const Communication& communication, int rank, std::int64_t token) {
  if (communication.contract().id_space == IdSpace::kCargo) return world.spec.num_ranks;
  std::set<int> owners;
  for (int slot = 0; slot < world.spec.params.top_k; ++slot)
    owners.insert(owner_of(world.id(rank, token, slot), world.spec.params, world.spec.num_ranks));
  owners.erase(-1);
  return std::ssize(owners);
}

// Every receiver gives the row back as it came, so a token's sum is x for each rank that it went to.
void round_with(Communication& communication, const World& world, int sms_of_dispatch, int sms_of_combine) {
  const int rank = communication.rank();
  const RankTensors tensors(world, rank, false);
  DispatchResult result;
  check_ok(communication.dispatch(tensors.input(), {.num_sms = sms_of_dispatch}, result), "dispatch");
  check_result(communication, world, {}, result);
  Tensor output(Dtype::kF32, {tensors.num_tokens(), 16});
  TensorView view = output.view();
  check_ok(
      communication.combine(result.handle, {.expert_output = result.hidden_states}, {.num_sms = sms_of_combine}, view),
      "combine");
  for (std::int64_t token = 0; token < tensors.num_tokens(); ++token) {
    for (std::int64_t column = 0; column < 16; ++column) {
      const float value = load(Dtype::kF32, output.row(token), column);
      const auto rows = static_cast<float>(num_rows_of(world, communication, rank, token));
      check_eq(value, rows * case_value(rank, token, column), "token " + std::to_string(token));
    }
  }
}

class NumSms : public EachBackend {};

TEST_P(NumSms, ChangesNoResult) {
  const World world = small_world();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    const std::vector<int> numbers{0, 1, 2, 7, 1'000'000};
    for (const int in_dispatch : numbers) {
      for (const int in_combine : numbers)
        round_with(communication, world, in_dispatch, in_combine);
    }
  }));
}

TEST_P(NumSms, NegativeOnesAreRefusedAtOnce) {
  const World world = small_world();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    const RankTensors tensors(world, group.rank(), false);
    DispatchResult result;
    const Stopwatch stopwatch;
    check_throws(ErrorCode::kInvalidArgument, {"num_sms is -1"},
                 [&] { (void)communication.dispatch(tensors.input(), {.num_sms = -1}, result); });
    check_ok(communication.dispatch(tensors.input(), {}, result), "dispatch");
    Tensor output(Dtype::kF32, {tensors.num_tokens(), 16});
    TensorView view = output.view();
    check_throws(ErrorCode::kInvalidArgument, {"num_sms is -1"}, [&] {
      (void)communication.combine(result.handle, {.expert_output = result.hidden_states}, {.num_sms = -1}, view);
    });
    stopwatch.check_below(std::chrono::milliseconds(2'000), "two refused calls");
    round_with(communication, world, 0, 0);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, NumSms, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
