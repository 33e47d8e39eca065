// SPDX-License-Identifier: Apache-2.0
// C91: the alignment of counts follows the argument whatever the rows are; true counts come with it.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class AlignmentOfEveryDtype : public EachBackend {};

struct RowKind {
  Dtype dtype = Dtype::kBf16;
  DispatchFormat format = DispatchFormat::kNone;
};

TEST_P(AlignmentOfEveryDtype, FollowsTheArgument) {
  for (const RowKind& kind :
       {RowKind{Dtype::kBf16}, RowKind{Dtype::kF16}, RowKind{Dtype::kF32},
        RowKind{.format = DispatchFormat::kFp8Block128}, RowKind{.format = DispatchFormat::kFp8PerTensor},
        RowKind{.format = DispatchFormat::kMxfp8}, RowKind{.format = DispatchFormat::kNvfp4}}) {
    WorldSpec spec;
    spec.params = {.num_experts = 2,
                   .top_k = 1,
                   .hidden_size = 128,
                   .max_tokens_per_rank = 133,
                   .dtype = kind.dtype,
                   .dispatch_format = kind.format};
    spec.num_tokens = {133};
    World world = make_world(spec);
    for (std::size_t token = 0; token < 133; ++token)
      world.rank(0).ids[token] = token % 50 == 7 ? 0 : 1;
    EXPECT_NO_THROW(run_ranks(
        1,
        [&](const Group& group) {
          Communication communication = communication_for(group, GetParam(), spec);
          DispatchResult result;
          RoundPlan plan{.expert_dtype = kind.dtype, .expert_alignment = 128};
          play_round(communication, world, plan, result);
          check_lists_eq(result.counts.rows_per_expert, std::vector<std::int64_t>{3, 130}, "true counts");
          check_lists_eq(result.counts.aligned_rows_per_expert, std::vector<std::int64_t>{128, 256}, "aligned counts");
          plan.expert_alignment = 1;
          play_round(communication, world, plan, result);
          check_lists_eq(result.counts.aligned_rows_per_expert, std::vector<std::int64_t>{3, 130}, "alignment 1");
        }))
        << name(kind.dtype) << " " << name(kind.format);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         AlignmentOfEveryDtype,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.takes_expert_alignment;
                         })),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
