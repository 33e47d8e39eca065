// SPDX-License-Identifier: Apache-2.0
// Results depend on the inputs alone: not on threads, SMs, the run or the address of the expert output.
#include <gtest/gtest.h>

#include <mutex>

#include "conformance/small_spec.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

using Outcome = std::vector<std::vector<std::byte>>;  // of each rank

struct Variant {
  int num_threads = 1;
  RoundPlan plan{};
};

// Dispatched and combined bytes of two rounds, rank by rank.
Outcome play(std::string_view backend, const WorldSpec& spec, const Variant& variant) {
  Outcome outcome(static_cast<std::size_t>(spec.num_ranks));
  const World worlds[] = {make_world(spec), make_world(with_seed(spec, spec.seed + 1))};
  run_ranks(spec.num_ranks, [&](const Group& group) {
    CommunicationOptions options = test_options();
    options.num_threads = variant.num_threads;
    Communication communication = communication_for(group, backend, spec, options);
    DispatchResult result;
    std::vector<std::byte>& all = outcome[static_cast<std::size_t>(group.rank())];
    for (const World& world : worlds) {
      dispatch_and_check(communication, world, variant.plan, result);
      const std::vector<std::byte> received = used_bytes(communication, world, variant.plan, result);
      all.insert(all.end(), received.begin(), received.end());
      const std::vector<std::byte> sums = combine_and_check(communication, world, variant.plan, result, result.handle);
      all.insert(all.end(), sums.begin(), sums.end());
    }
  });
  return outcome;
}

class Determinism : public ::testing::TestWithParam<std::string_view> {
 protected:
  static WorldSpec spec() {
    WorldSpec spec = small_spec(4, 5);
    spec.params.max_tokens_per_rank = 40;
    spec.params.hidden_size = 333;
    spec.params.top_k = 5;
    return spec;
  }
};

TEST_P(Determinism, TwoRunsAreEqual) {
  EXPECT_EQ(play(GetParam(), spec(), {}), play(GetParam(), spec(), {}));
}

TEST_P(Determinism, ThreadsDoNotShow) {
  const Outcome one = play(GetParam(), spec(), {.num_threads = 1});
  EXPECT_EQ(one, play(GetParam(), spec(), {.num_threads = 3}));
  EXPECT_EQ(one, play(GetParam(), spec(), {.num_threads = 2}));
}

TEST_P(Determinism, ZeroCopyEqualsOwnTensor) {
  EXPECT_EQ(play(GetParam(), spec(), {}), play(GetParam(), spec(), {.plan = {.zero_copy = true}}));
}

TEST_P(Determinism, StridedEqualsContiguous) {
  EXPECT_EQ(play(GetParam(), spec(), {}), play(GetParam(), spec(), {.plan = {.strided = true}}));
}

class CombineInputOf : public ::testing::TestWithParam<std::string_view> {};

// combine_input is given where the contract promises it: otherwise the zero-copy tests would test nothing.
TEST_P(CombineInputOf, IsThere) {
  WorldSpec spec = small_spec(3);
  spec.num_tokens = {4, 4, 4};
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    const RoundPlan plan{.zero_copy = true};
    dispatch_and_check(communication, world, plan, result);
    check(communication.combine_input(result.handle, Dtype::kBf16).defined(), "no combine_input for equal sizes");
    check(!communication.combine_input(result.handle, Dtype::kF32).defined(), "combine_input of another width");
    combine_and_check(communication, world, plan, result, result.handle);
  }));
}

// The window's width decides, not the dtype: f16 fits where bf16 does.
TEST_P(CombineInputOf, TakesDtypesOfItsWidth) {
  WorldSpec spec = small_spec(3);
  spec.num_tokens = {4, 4, 4};
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    const RoundPlan plan{.expert_dtype = Dtype::kF16, .zero_copy = true};
    dispatch_and_check(communication, world, plan, result);
    check(communication.combine_input(result.handle, Dtype::kF16).defined(), "no combine_input of the same width");
    combine_and_check(communication, world, plan, result, result.handle);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, Determinism, ::testing::ValuesIn(kMovingBackends), [](const auto& backend) {
  return std::string(backend.param);
});

INSTANTIATE_TEST_SUITE_P(Backends,
                         CombineInputOf,
                         ::testing::ValuesIn(moving_backends_that(gives_combine_input)),
                         [](const auto& backend) { return std::string(backend.param); });

TEST(TwoSidedCombineInput, IsNotThere) {
  const WorldSpec spec = small_spec(2);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, "two_sided", spec);
    DispatchResult result;
    dispatch_and_check(communication, make_world(spec), {}, result);
    check(!communication.combine_input(result.handle, Dtype::kBf16).defined(), "combine_input of queues");
  }));
}

// Rows in rank order need no dispatch to have a place: it is the one that the handle gives.
TEST(AllGatherCombineInput, IsThereBeforeTheDispatch) {
  WorldSpec spec = small_spec(3);
  spec.num_tokens = {4, 4, 4};
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication = communication_for(group, "all_gather", spec);
    DispatchResult result;
    for (int round = 0; round < 3; ++round) {
      const TensorView early = communication.combine_input(12, Dtype::kBf16);
      check(early.defined(), "no memory before the dispatch");
      dispatch_and_check(communication, world, {}, result);
      const TensorView late = communication.combine_input(result.handle, Dtype::kBf16);
      check(late.data == early.data && late.shape == early.shape && late.strides == early.strides,
            "the handle gives " + late.describe() + " elsewhere than " + early.describe());
      combine_and_check(communication, world, {.zero_copy = true}, result, result.handle);
    }
    check(communication.combine_input(18, Dtype::kBf16).defined(), "no memory for as many rows as there can be");
    check(!communication.combine_input(19, Dtype::kBf16).defined(), "memory for more rows than there can be");
    check(!communication.combine_input(-1, Dtype::kBf16).defined(), "memory for fewer rows than none");
    check(!communication.combine_input(12, Dtype::kF32).defined(), "memory of another width");
  }));
}

// The section still holds rows that this rank itself has to read: waiting for them would never end.
TEST(WindowCombineInput, IsNotThereBetweenTheHalvesOfACombine) {
  WorldSpec spec = small_spec(2);
  spec.num_tokens = {4, 4};
  const World world = make_world(spec);
  for (const std::string_view backend : {"all_gather", "high_throughput", "one_sided"}) {
    EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
      Communication communication = communication_for(group, backend, spec);
      DispatchResult result;
      DispatchResult next;
      dispatch_and_check(communication, world, {}, result);
      RoundPlan plan;
      plan.between_halves = [&] {
        dispatch_and_check(communication, world, {}, next);
        const Stopwatch stopwatch;
        check(!communication.combine_input(next.handle, Dtype::kBf16).defined(), "memory that is still to be read");
        check(!communication.combine_input(8, Dtype::kBf16).defined(), "the same without a handle");
        stopwatch.check_below(std::chrono::milliseconds(1'000), "to say that there is none");
      };
      combine_and_check(communication, world, plan, result, result.handle);
      check(communication.combine_input(next.handle, Dtype::kBf16).defined(), "no memory after the combine");
      combine_and_check(communication, world, {}, next, next.handle);
    })) << backend;
  }
}

TEST(RoutedCombineInput, NeedsAHandle) {
  const WorldSpec spec = small_spec(2);
  for (const std::string_view backend : moving_backends_that(routes)) {
    EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
      Communication communication = communication_for(group, backend, spec);
      check(!communication.combine_input(4, Dtype::kBf16).defined(), "memory for rows whose places are not known");
    })) << backend;
  }
}

// all_gather's window memory exists only when sizes are equal; otherwise the caller brings a tensor.
TEST(AllGatherCombineInput, NothingForUnequalSizes) {
  WorldSpec spec = small_spec(2);
  spec.num_tokens = {4, 3};
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, "all_gather", spec);
    DispatchResult result;
    dispatch_and_check(communication, world, {}, result);
    check(!communication.combine_input(result.handle, Dtype::kBf16).defined(), "combine_input for unequal sizes");
    combine_and_check(communication, world, {}, result, result.handle);
  }));
}

}  // namespace
}  // namespace tokenyard::support
