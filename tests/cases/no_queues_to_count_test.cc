// SPDX-License-Identifier: Apache-2.0
// C152: ranks of one host have no network queues; nothing divides by their number, for any number of ranks.
// A manager has no queue count to be given. What the seeds derive it from, the switch that keeps ranks on one host,
// changes no result.
#include "tokenyard/manager.h"

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

World world_of(int num_ranks) {
  CaseWorld made;
  made.params.num_experts = 2 * num_ranks;
  made.params.top_k = 2;
  for (int rank = 0; rank < num_ranks; ++rank) {
    IdTable table;
    for (int token = 0; token < 5; ++token)
      table.push_back({(rank + token) % made.params.num_experts, (rank + 3 * token + 1) % made.params.num_experts});
    made.ids.push_back(table);
  }
  return made.make();
}

class NoQueues : public ::testing::TestWithParam<int> {};

TEST_P(NoQueues, ManagersAreExactWhateverTheSwitchSays) {
  const World world = world_of(GetParam());
  EXPECT_NO_THROW(run_ranks(GetParam(), [&](const Group& group) {
    DispatchResult result;
    for (const bool intra_host_only : {false, true}) {
      ManagerOptions options{.group = group,
                             .communication = test_options(),
                             .knobs = {.high_throughput_intra_host_only = intra_host_only}};
      options.params.dtype = Dtype::kF32;
      All2AllManager manager = create_all2all_manager("one_sided", options);
      check(!manager.spans_hosts(), "threads of one process span hosts");
      const MoeParams& params = world.spec.params;
      manager.initialize({.max_num_tokens = params.max_tokens_per_rank,
                          .top_k = params.top_k,
                          .num_experts = params.num_experts,
                          .hidden_size = params.hidden_size});
      moe_round(manager.get_communication(), world, {}, result);
      check_ok(manager.destroy(), "destroy");
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, NoQueues, ::testing::Range(2, 9));

}  // namespace
}  // namespace tokenyard::support
