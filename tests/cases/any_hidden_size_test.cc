// SPDX-License-Identifier: Apache-2.0
// C35, C40: any hidden size, and no byte beyond a row when it is not a multiple of a vector.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class AnyHiddenSize : public EachBackend {};

TEST_P(AnyHiddenSize, IsExact) {
  for (const int hidden : {1, 8, 100, 128, 130, 576, 1536, 2880, 3072, 3584, 6144}) {
    CaseWorld made{.ids = std::vector<IdTable>(2, IdTable{{0}, {3}})};
    made.params.hidden_size = hidden;
    EXPECT_NO_THROW(play_worlds(GetParam(), std::vector<World>(2, made.make()))) << hidden;
  }
}

// Rows of 4-bit and 8-bit formats whose tails fill no vector; the outputs are guarded tensors (C40).
TEST_P(AnyHiddenSize, QuantisedTails) {
  for (const int hidden : {4, 12, 20, 36}) {
    for (const DispatchFormat format : {DispatchFormat::kFp8Block128, DispatchFormat::kNvfp4, DispatchFormat::kMxfp4}) {
      WorldSpec spec;
      spec.params = {
          .num_experts = 4, .top_k = 2, .hidden_size = hidden, .max_tokens_per_rank = 5, .dispatch_format = format};
      spec.num_ranks = 2;
      EXPECT_NO_THROW(run_ranks(2,
                                [&](const Group& group) {
                                  Communication communication = communication_for(group, GetParam(), spec);
                                  DispatchResult result;
                                  const World world = make_world(spec);
                                  play_round(communication, world, {.caller_tensors = true}, result);
                                  play_round(communication, world, {.strided = true}, result);
                                }))
          << hidden << " " << name(format);
    }
  }
}

// The fp8 wire of combine, with the same tails (C40).
TEST(AnyHiddenSizeOfLowPrecision, TailsAreExact) {
  for (const int hidden : {1, 4, 12, 20, 36}) {
    WorldSpec spec;
    spec.params = {.num_experts = 4, .top_k = 2, .hidden_size = hidden, .max_tokens_per_rank = 5};
    spec.num_ranks = 2;
    EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
      Communication communication =
          create_communication(group, spec.params, OneSidedConfig{.use_low_precision_combine = true}, test_options());
      DispatchResult result;
      play_round(communication, make_world(spec), {.strided = true}, result);
      play_round(communication, make_world(spec), {}, result);
    })) << hidden;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, AnyHiddenSize, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
