// SPDX-License-Identifier: Apache-2.0
// How large a byte budget must be, and what else a config with one says at creation.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "conformance/byte_budget.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"
#include "system/host.h"

namespace tokenyard::support {
namespace {

constexpr int kRanks = kCutRanks;

TEST(BudgetSizes, TheSmallestIsNamedAndEnough) {
  constexpr int kMany = 8;
  std::int64_t least = 0;
  try {
    (void)window_bytes({}, HighThroughputConfig{.buffer_bytes = 100}, kMany);
  } catch (const Error& error) {
    check_contains(error.what(), {"100", "8 ranks"});
    least = std::stoll(std::string(error.what()).substr(std::string(error.what()).rfind(' ') + 1));
  }
  ASSERT_GT(least, 64 * kMany);
  EXPECT_EQ(window_bytes({}, HighThroughputConfig{.buffer_bytes = least}, kMany), least);
  EXPECT_NO_THROW(run_ranks(kMany, [&](const Group& group) {
    check_throws(ErrorCode::kInvalidArgument, {std::to_string(least - 1), std::to_string(least)},
                 [&] { (void)budget_made(group, least - 1); });
    check_throws(ErrorCode::kMismatch, {"buffer_bytes", "rank 1: " + std::to_string(least + 1)},
                 [&] { (void)budget_made(group, group.rank() == 1 ? least + 1 : least); });
    Communication communication = budget_made(group, least);
    WorldSpec spec = small_spec(kMany, 14);
    spec.params.hidden_size = spec.params.top_k = 1;
    const World world = make_world(spec);
    DispatchResult result;
    play_round(communication, world, {}, result);
    check_eq(communication.window_bytes(), least, "bytes of the window");
    check(communication.statistics().num_dispatches > 1, "more than one token at once in the smallest budget");
  }));
}

// The error of a call says how many bytes would do: they do, and one byte less does not.
TEST(BudgetSizes, ACallThatDoesNotFitSaysWhatWould) {
  const WorldSpec spec = cut_spec(15);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    const RankTensors tensors(world, group.rank(), false);
    const auto dispatch = [&](std::int64_t bytes) -> std::int64_t {
      Communication communication = budget_made(group, bytes);
      DispatchResult result;
      try {
        check_ok(communication.dispatch(tensors.input(), of_experts(spec), result), "dispatch");
      } catch (const Error& error) {
        check(error.code() == ErrorCode::kCapacity, error.what());
        check_contains(error.what(), {"buffer_bytes is " + std::to_string(bytes)});
        return std::stoll(std::string(error.what()).substr(std::string(error.what()).rfind(' ') + 1));
      }
      return 0;
    };
    const std::int64_t needed = dispatch(9'000);
    check(needed > 9'000, "the budget was not too small");
    check_eq(dispatch(needed - 1), needed, "bytes that the next error names");
    check_eq(dispatch(needed), std::int64_t{0}, "bytes that do");
  }));
}

TEST(BudgetSizes, WhatMakesNoSenseIsRefused) {
  EXPECT_THROW((void)window_bytes({}, HighThroughputConfig{}, 2), Error) << "params may be left out with a budget only";
  check_throws(ErrorCode::kInvalidArgument, {"buffer_bytes is -1"}, [] {
    (void)window_bytes({.num_experts = 8, .top_k = 2, .hidden_size = 24, .max_tokens_per_rank = 6},
                       HighThroughputConfig{.buffer_bytes = -1}, 2);
  });
  EXPECT_NO_THROW(run_ranks(1, [](const Group& group) {
    const HighThroughputConfig config{.buffer_bytes = 1 << 20};
    check_throws(ErrorCode::kInvalidArgument, {"dtype is i32"},
                 [&] { (void)create_communication(group, {.dtype = Dtype::kI32}, config); });
    check_throws(ErrorCode::kInvalidArgument, {"num_experts is -1"},
                 [&] { (void)create_communication(group, {.num_experts = -1}, config); });
    Communication communication = create_communication(group, {.invalid_expert_id = 8}, config);
    WorldSpec spec = small_spec(1);
    const World world = make_world(spec);
    const RankTensors tensors(world, 0, false);
    DispatchResult result;
    check_throws(ErrorCode::kInvalidArgument, {"num_experts is 9", "invalid_expert_id = 8"},
                 [&] { (void)communication.dispatch(tensors.input(), {.num_experts = 9}, result); });
    check_ok(communication.dispatch(tensors.input(), {.num_experts = 8}, result), "dispatch");
  }));
}

// Experts given at creation are those of calls that say none; a window sized by params takes no others.
TEST(BudgetExperts, MayBeGivenAtCreation) {
  const WorldSpec spec = small_spec(kRanks, 16);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication budget =
        create_communication(group, {.num_experts = 8}, HighThroughputConfig{.buffer_bytes = 1 << 16}, test_options());
    check_eq(budget.params().num_experts, 8, "params as given");
    DispatchResult result;
    play_round(budget, world, {}, result);
    Communication sized = communication_for(group, "high_throughput", spec);
    const RankTensors tensors(world, group.rank(), false);
    check_ok(sized.dispatch(tensors.input(), of_experts(spec), result), "the same number of experts");
    result.handle = Handle();
    check_throws(ErrorCode::kInvalidArgument, {"num_experts is 9", "made for 8"},
                 [&] { (void)sized.dispatch(tensors.input(), {.num_experts = 9}, result); });
  }));
}

// A group whose next rank seems to be on another host.
Group with_other_host(const Group& group) {
  const auto all_gather = [group](std::span<const std::byte> bytes) {
    std::vector<Bytes> all = group.all_gather(bytes);
    const std::string host = system::host_identity();
    Bytes& next = all[static_cast<std::size_t>(group.rank() + 1) % all.size()];
    if (next.size() == host.size() && std::memcmp(next.data(), host.data(), host.size()) == 0) next[0] = std::byte{'~'};
    return all;
  };
  return Group::from_callbacks(
      {.rank = group.rank(), .num_ranks = group.num_ranks(), .all_gather = all_gather, .barrier = [group] {
         group.barrier();
       }});
}

TEST(IntraHostOnly, RefusesPeersOnOtherHosts) {
  const WorldSpec spec = small_spec(kRanks, 17);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1} << 16}) {
      const HighThroughputConfig config{.buffer_bytes = bytes, .intra_host_only = true};
      const std::string peer = "rank " + std::to_string((group.rank() + 1) % kRanks);
      check_throws(ErrorCode::kUnsupported, {peer + " is on another host", "intra_host_only"},
                   [&] { (void)create_communication(with_other_host(group), spec.params, config, test_options()); });
      Communication communication = create_communication(group, spec.params, config, test_options());
      DispatchResult result;
      play_round(communication, make_world(spec), {}, result);
    }
  }));
}

}  // namespace
}  // namespace tokenyard::support
