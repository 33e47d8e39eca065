// SPDX-License-Identifier: Apache-2.0
// C104: four threads as two groups of two, cut either way and in any order: each group works for itself, and equal
// inputs give equal bits.
#include <array>
#include <chrono>
#include <thread>

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class SeveralGroupsOfOneProcess : public EachBackend {};

// The threads of both groups, in rank order.
using Cut = std::array<std::array<int, 2>, 2>;

struct Seat {
  std::size_t group = 0;
  std::size_t rank = 0;
};

Seat seat_of(const Cut& cut, int thread) {
  for (std::size_t group = 0; group < 2; ++group) {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      if (cut[group][rank] == thread) return {.group = group, .rank = rank};
    }
  }
  throw CheckFailure("a thread without a group");
}

World world_of_round(std::int64_t round) {
  CaseWorld made;
  made.params = {.num_experts = 8, .top_k = 2, .hidden_size = 24, .max_tokens_per_rank = 8, .dtype = Dtype::kF32};
  made.ids.resize(2);
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    for (std::int64_t token = 0; token < 5 + 2 * rank; ++token)
      made.ids[static_cast<std::size_t>(rank)].push_back({(token + round) % 8, (5 * token + 3 * rank + 1) % 8});
  }
  return made.make();
}

TEST_P(SeveralGroupsOfOneProcess, EqualInputsGiveEqualBits) {
  for (const Cut& cut : {Cut{{{0, 1}, {2, 3}}}, Cut{{{0, 2}, {1, 3}}}, Cut{{{3, 1}, {2, 0}}}}) {
    const std::array<std::vector<Group>, 2> groups{Group::in_process(2), Group::in_process(2)};
    std::array<std::array<std::vector<std::byte>, 2>, 2> y;
    EXPECT_NO_THROW(run_ranks(4, [&](const Group& threads) {
      const Seat seat = seat_of(cut, threads.rank());
      Communication communication =
          communication_for(groups[seat.group][seat.rank], GetParam(), world_of_round(0).spec);
      DispatchResult result;
      for (std::int64_t round = 0; round < 6; ++round) {
        dispatch_and_check(communication, world_of_round(round), {}, result);
        const std::vector<std::byte> now =
            moe_combine(communication, world_of_round(round), {}, result, Experts::kIdentity);
        std::vector<std::byte>& all = y[seat.group][seat.rank];
        all.insert(all.end(), now.begin(), now.end());
      }
      check_ok(communication.destroy(), "destroy");
    }));
    EXPECT_FALSE(y[0][0].empty());
    EXPECT_EQ(y[0], y[1]);
  }
}

// Different inputs in the two groups, which must not meet; the second is made while the first is in the middle of its
// rounds.
TEST_P(SeveralGroupsOfOneProcess, GroupsKeepTheirRowsApart) {
  const std::array<std::vector<Group>, 2> groups{Group::in_process(2), Group::in_process(2)};
  EXPECT_NO_THROW(run_ranks(4, [&](const Group& threads) {
    const Seat seat = seat_of(Cut{{{0, 2}, {3, 1}}}, threads.rank());
    if (seat.group == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    Communication communication = communication_for(groups[seat.group][seat.rank], GetParam(), world_of_round(0).spec);
    DispatchResult result;
    for (std::int64_t round = 0; round < 40; ++round) {
      const auto shift = static_cast<std::int64_t>(3 * seat.group);
      moe_round(communication, world_of_round(round + shift), {}, result, Experts::kIdentity);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, SeveralGroupsOfOneProcess, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
