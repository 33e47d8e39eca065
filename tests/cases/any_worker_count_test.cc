// SPDX-License-Identifier: Apache-2.0
// C41: rows and sums do not depend on the number of workers or SMs, which need not divide anything.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class AnyWorkerCount : public EachBackend {};

WorldSpec worker_spec() {
  WorldSpec spec;
  spec.params = {.num_experts = 8, .top_k = 2, .hidden_size = 80, .max_tokens_per_rank = 33};
  spec.num_ranks = 4;
  spec.num_tokens = {33, 33, 33, 33};
  return spec;
}

TEST_P(AnyWorkerCount, ThreadsGiveTheSameRows) {
  const WorldSpec spec = worker_spec();
  const World world = make_world(spec);
  for (const int threads : {1, 2, 3, 5, 7, 8}) {
    EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
      CommunicationOptions options = test_options();
      options.num_threads = threads;
      Communication communication = communication_for(group, GetParam(), spec, options);
      DispatchResult result;
      for (int round = 0; round < 3; ++round)
        play_round(communication, world, {}, result);
    })) << threads;
  }
}

TEST_P(AnyWorkerCount, SmsGiveTheSameRows) {
  const WorldSpec spec = worker_spec();
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    for (const int sms : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 21, 33}) {
      check_ok(communication.dispatch(tensors.input(), {.num_sms = sms}, result), "dispatch");
      check_result(communication, world, {}, result);
      combine_and_check(communication, world, {}, result, result.handle);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, AnyWorkerCount, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
