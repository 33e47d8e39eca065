// SPDX-License-Identifier: Apache-2.0
// C121, C125 without a GPU: a replay of a static-shape plan allocates nothing, also with ids and counts that no earlier
// round had. A program of its own, because its allocation functions stand in front of the C library's.
#include <barrier>

#include "cases/static_shape_rank.h"
#include "steady/allocation_counter.h"

namespace tokenyard::support {
namespace {

class StaticShapesAllocateNothing : public EachBackend {};

constexpr std::int64_t kWarmUp = 3;
constexpr std::int64_t kReplays = 15;

TEST_P(StaticShapesAllocateNothing, WithNewIdsAndCounts) {
  std::barrier together(kStaticRanks);
  std::int64_t allocations = -1;
  EXPECT_NO_THROW(run_ranks(kStaticRanks, [&](const Group& group) {
    StaticShapeRank rank(group, GetParam(), kReplays);
    DispatchResult result;
    bool ok = true;
    for (std::int64_t replay = 0; replay < kWarmUp; ++replay)
      ok = rank.replay(replay, result) && rank.output_is_right(replay) && ok;
    together.arrive_and_wait();
    if (group.rank() == 0) steady_tests::start_counting_allocations();
    together.arrive_and_wait();
    for (std::int64_t replay = kWarmUp; replay < kReplays; ++replay)
      ok = rank.replay(replay, result) && rank.output_is_right(replay) && ok;
    together.arrive_and_wait();
    if (group.rank() == 0) allocations = steady_tests::stop_counting_allocations();
    together.arrive_and_wait();
    check(ok, "a replay failed or gave a wrong y");
  }));
  EXPECT_EQ(allocations, 0) << "the first one had " << steady_tests::first_counted_bytes() << " bytes";
}

bool capturable(const Contract& contract) {
  return contract.capturable && contract.output_layout == OutputLayout::kRankMajor;
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         StaticShapesAllocateNothing,
                         ::testing::ValuesIn(moving_backends_that(capturable)),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
