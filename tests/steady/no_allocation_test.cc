// SPDX-License-Identifier: Apache-2.0
// A steady-state round allocates nothing: no thread of any rank touches the heap after the rounds that warm it up.
#include <gtest/gtest.h>

#include <barrier>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "steady/allocation_counter.h"
#include "steady/steady_rank.h"
#include "support/backends.h"
#include "support/check.h"
#include "support/run_ranks.h"

namespace tokenyard::steady_tests {

namespace {

constexpr int kWarmUpRounds = 3;
constexpr int kCountedRounds = 4;

// The counter itself can count.
TEST(AllocationCounterTest, SeesEveryWayToTheHeap) {
  void* volatile kept = nullptr;  // or the compiler takes the pairs away
  const auto count = [&](const auto& allocate, const auto& release) {
    start_counting_allocations();
    kept = allocate();
    release(kept);
    return stop_counting_allocations();
  };
  const auto release = [](void* memory) { std::free(memory); };
  EXPECT_EQ(count([] { return std::malloc(10); }, release), 2);
  EXPECT_EQ(first_counted_bytes(), 10U);
  EXPECT_EQ(count([] { return std::calloc(3, 10); }, release), 2);
  EXPECT_EQ(count([] { return std::realloc(nullptr, 10); }, release), 2);
  EXPECT_EQ(count([] { return std::aligned_alloc(64, 64); }, release), 2);
  EXPECT_EQ(count([] { return ::operator new(10); }, [](void* memory) { ::operator delete(memory); }), 2);
  EXPECT_EQ(count([] { return ::operator new (64, std::align_val_t{64}); },
                  [](void* memory) { ::operator delete (memory, std::align_val_t{64}); }),
            2);
  EXPECT_EQ(count([]() -> void* { return nullptr; }, [](void*) {}), 0);
}

std::vector<SteadyCase> cases() {
  std::vector<SteadyCase> all;
  for (const std::string_view backend : support::kMovingBackends) {
    for (const Variant variant :
         {Variant::kViews, Variant::kZeroCopy, Variant::kSplit, Variant::kReplay, Variant::kInto, Variant::kTurns}) {
      for (const int num_threads : {1, 2}) {
        SteadyCase value{.backend = backend, .variant = variant, .num_threads = num_threads};
        if (possible(value)) all.push_back(value);
        for (const std::int64_t bytes : {kWholeBudget, kCutBudget}) {
          value.budget_bytes = bytes;
          if (backend == "high_throughput" && possible(value)) all.push_back(value);
        }
      }
    }
  }
  return all;
}

class NoAllocation : public testing::TestWithParam<SteadyCase> {};

TEST_P(NoAllocation, InSteadyRounds) {
  std::barrier together(GetParam().num_ranks);
  std::int64_t allocations = -1;
  support::run_ranks(GetParam().num_ranks, [&](const Group& group) {
    SteadyRank rank(group, GetParam());
    bool ok = true;
    for (int round = 0; round < kWarmUpRounds; ++round)
      ok = rank.play() && ok;
    together.arrive_and_wait();
    if (group.rank() == 0) start_counting_allocations();
    together.arrive_and_wait();
    for (int round = 0; round < kCountedRounds; ++round)
      ok = rank.play() && ok;
    together.arrive_and_wait();
    if (group.rank() == 0) allocations = stop_counting_allocations();
    together.arrive_and_wait();
    support::check(ok, "a round failed");
    rank.destroy();
  });
  EXPECT_EQ(allocations, 0) << "the first one had " << first_counted_bytes() << " bytes";
}

INSTANTIATE_TEST_SUITE_P(Backends, NoAllocation, testing::ValuesIn(cases()), [](const auto& tested) {
  return name(tested.param);
});

}  // namespace
}  // namespace tokenyard::steady_tests
