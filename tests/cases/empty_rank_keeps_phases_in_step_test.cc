// SPDX-License-Identifier: Apache-2.0
// C01, C14: ranks that receive nothing, or send nothing live, must take part in both phases: otherwise they run ahead
// and the loaded rank waits for ever, or a later round eats an earlier one.
#include <chrono>
#include <thread>

#include "cases/case_round.h"
#include "support/casts.h"
#include "support/rng.h"

namespace tokenyard::support {
namespace {

class EmptyRankKeepsStep : public EachBackend {};

// Every token of four ranks goes to rank 0; fifty rounds with random pauses and no barrier (C01).
TEST_P(EmptyRankKeepsStep, AllTokensToOneRank) {
  CaseWorld made{.ids = std::vector<IdTable>(4, repeated(3, {0}))};
  const World world = made.make();
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    Rng rng(static_cast<std::uint64_t>(group.rank()));
    for (int round = 0; round < 50; ++round) {
      std::this_thread::sleep_for(std::chrono::microseconds(rng.below(2'000)));
      moe_round(communication, world, {}, result, Experts::kIdentity);
      if (communication.contract().id_space == IdSpace::kCargo) continue;
      check_eq(result.counts.num_rows, group.rank() == 0 ? 12 : 0, "rows received");
    }
  }));
}

// Only rank 0 has live ids; it gets 2 x and the others exact zeros (C14).
TEST_P(EmptyRankKeepsStep, OnlyRankZeroIsLive) {
  CaseWorld made{.ids = std::vector<IdTable>(4, repeated(16, {-1, -1}))};
  made.params = {.num_experts = 8, .top_k = 2, .hidden_size = 64, .max_tokens_per_rank = 16};
  made.ids[0] = repeated(16, {0, 1});
  World world = made.make();
  Rng rng(14);
  for (RankData& data : world.ranks) {
    for (std::int64_t i = 0; i < 16 * 64; ++i) {
      store(Dtype::kBf16, data.hidden.bytes.data(), i, static_cast<float>(rng.below(2)));
    }
  }
  EXPECT_NO_THROW(play_worlds(GetParam(), std::vector<World>(100, world), {}, Experts::kIdentity));
}

INSTANTIATE_TEST_SUITE_P(Backends, EmptyRankKeepsStep, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
