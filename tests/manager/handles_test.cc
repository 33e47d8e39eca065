// SPDX-License-Identifier: Apache-2.0
// Handles that layers share: which requests are equal, who keeps a communication alive, and how all end.
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <vector>

#include "manager/manager_setup.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::manager_tests {
namespace {

using manager::State;
using support::check;
using support::check_eq;
using support::check_throws;
using support::run_ranks;

constexpr int kRanks = 8;
constexpr std::string_view kName = "deepep_high_throughput";

// A round whose data the reference knows, on whatever communication a handle has. One made from a byte budget takes any
// shapes.
void play(Communication& communication, std::uint64_t seed) {
  MoeParams params = communication.params();
  if (params.num_experts == 0) {
    const int odd = static_cast<int>(seed % 5);
    params = {.num_experts = 8 + odd, .top_k = 1 + odd, .hidden_size = 24 + 300 * odd, .max_tokens_per_rank = 40};
  }
  support::WorldSpec spec{.params = params, .num_ranks = communication.num_ranks(), .seed = seed};
  DispatchResult result;
  support::play_round(communication, support::make_world(spec), {.seed = seed}, result);
}

TEST(SharedHandles, EqualRequestsOfThreadsAndLayersGetOne) {
  EXPECT_NO_THROW(run_ranks(kRanks, [](const Group& group) {
    All2AllManager manager = create_all2all_manager(kName, budget_options(group));
    constexpr int kThreads = 4;
    std::vector<All2AllHandle> handles(kThreads);
    std::vector<std::thread> threads;
    for (All2AllHandle& handle : handles)
      threads.emplace_back([&] { handle = manager.get_handle(); });
    for (std::thread& thread : threads)
      thread.join();
    for (const All2AllHandle& handle : handles) {
      check(handle.valid() && handle == handles[0], "equal requests gave different handles");
      check(&handle.get_communication() == &handles[0].get_communication(), "two communications for one request");
    }
    play(handles[0].get_communication(), 1);
    check(manager.destroy().ok(), "destroy");
  }));
}

TEST(SharedHandles, WhatSizesAWindowTellsRequestsApart) {
  EXPECT_NO_THROW(run_ranks(2, [](const Group& group) {
    All2AllManager manager = State::create(&kShared, shared_options(group));
    const All2AllHandle first = manager.get_handle(sized(6, 24));
    const All2AllHandle more_tokens = manager.get_handle(sized(7, 24));
    const All2AllHandle wider = manager.get_handle(sized(6, 25));
    check(!(first == more_tokens) && !(first == wider) && !(more_tokens == wider), "different sizes, one handle");
    manager.set_num_sms(3);  // may change from call to call
    check(first == manager.get_handle(sized(6, 24)), "the number of SMs is part of the key");
    check_eq(wider.get_communication().params().hidden_size, 25, "hidden_size");
    play(first.get_communication(), 1);
    play(wider.get_communication(), 2);
  }));
}

// Two managers have two groups, or at least two lives.
TEST(SharedHandles, GroupsAndManagersDoNotShare) {
  std::vector<Group> other = Group::in_process(2);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    All2AllManager one = create_all2all_manager(kName, budget_options(group));
    All2AllManager two = create_all2all_manager(kName, budget_options(other[static_cast<std::size_t>(group.rank())]));
    const All2AllHandle of_one = one.get_handle();
    const All2AllHandle of_two = two.get_handle();
    check(!(of_one == of_two), "two groups share a communication");
    check(one.destroy().ok(), "destroy");
    play(of_two.get_communication(), 3);
  }));
}

TEST(SharedHandles, LastUserFreesLocallyAndTheNextRequestMakesAnew) {
  const std::int64_t before = memfd_mappings();
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    All2AllManager manager = create_all2all_manager(kName, budget_options(group));
    std::optional<All2AllHandle> first(manager.get_handle());
    std::optional<All2AllHandle> second(*first);
    group.barrier();
    check_eq(memfd_mappings(), before + kRanks, "windows while there are users");
    group.barrier();
    second.reset();
    check(manager.initialized(), "one user is left");
    group.barrier();
    check_eq(memfd_mappings(), before + kRanks, "windows with one user left");
    group.barrier();
    if (group.rank() == 0) first.reset();  // waits for nobody: the others come here later
    group.barrier();
    first.reset();
    check(!manager.initialized(), "no user is left");
    group.barrier();
    check_eq(memfd_mappings(), before, "windows after the last user");
    group.barrier();
    const All2AllHandle again = manager.get_handle();
    play(again.get_communication(), 4);
    group.barrier();
    check_eq(memfd_mappings(), before + kRanks, "windows of the new communication");
    group.barrier();
  }));
  EXPECT_EQ(memfd_mappings(), before);
}

TEST(SharedHandles, DestroyEndsWhatHandlesHold) {
  const std::int64_t before = memfd_mappings();
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    All2AllManager manager = create_all2all_manager(kName, budget_options(group));
    const All2AllHandle held = manager.get_handle();
    Communication& communication = held.get_communication();
    play(communication, 5);
    check(manager.destroy().ok(), "destroy");
    check(manager.destroy().ok(), "second destroy");
    check(!manager.initialized(), "initialised after destroy");
    DispatchResult result;
    check_throws(ErrorCode::kDestroyed, {"destroyed"}, [&] { (void)communication.dispatch({}, {}, result); });
    check_throws(ErrorCode::kDestroyed, {"this manager was destroyed"}, [&] { (void)manager.get_handle(); });
    check_throws(ErrorCode::kDestroyed, {"this manager was destroyed"}, [&] { manager.set_num_sms(1); });
    check_eq(manager.rank(), group.rank(), "rank, which anyone may still ask");
    group.barrier();
    check_eq(memfd_mappings(), before, "windows after destroy, with the handle still held");
    group.barrier();
  }));
}

// Ranks need not have dropped the same handles when the manager ends.
TEST(SharedHandles, DestroyWaitsForNoDroppedHandle) {
  EXPECT_NO_THROW(run_ranks(3, [](const Group& group) {
    All2AllManager manager = State::create(&kShared, shared_options(group));
    std::vector<std::optional<All2AllHandle>> handles;
    for (const int hidden : {16, 24, 32})
      handles.emplace_back(manager.get_handle(sized(6, hidden)));
    handles[static_cast<std::size_t>(group.rank())].reset();  // each rank another one
    if (group.rank() == 2) handles[0].reset();
    const support::Stopwatch stopwatch;
    check(manager.destroy().ok(), "destroy");
    stopwatch.check_below(std::chrono::milliseconds(5'000), "destroy");
    group.barrier();  // nothing is left over in the group
    const All2AllManager next = State::create(&kShared, shared_options(group));
    check_eq(next.num_ranks(), 3, "num_ranks");
  }));
}

TEST(SharedHandles, OutliveTheirManager) {
  EXPECT_NO_THROW(run_ranks(2, [](const Group& group) {
    All2AllHandle handle;
    {
      All2AllManager manager = create_all2all_manager(kName, budget_options(group));
      handle = manager.get_handle();
    }
    play(handle.get_communication(), 6);
  }));
}

TEST(SharedHandles, DifferentRequestsFailEverywhere) {
  EXPECT_NO_THROW(run_ranks(kRanks, [](const Group& group) {
    All2AllManager manager = State::create(&kShared, shared_options(group));
    check_throws(ErrorCode::kMismatch, {"max_tokens_per_rank", "rank 3: 9", "rank 4: 6"},
                 [&] { (void)manager.get_handle(sized(group.rank() == 3 ? 9 : 6, 24)); });
    const support::Stopwatch stopwatch;
    const HandleRequest request = group.rank() == 5 ? HandleRequest{.token_hidden_size = 24} : sized(6, 24);
    check_throws(group.rank() == 5 ? ErrorCode::kInvalidArgument : ErrorCode::kPeerFailed,
                 {"needs max_num_tokens_per_dp_rank"}, [&] { (void)manager.get_handle(request); });
    stopwatch.check_below(std::chrono::milliseconds(5'000), "a request that is wrong on one rank");
    const All2AllHandle handle = manager.get_handle(sized(6, 24));
    play(handle.get_communication(), 7);
  }));
}

TEST(SharedHandles, AreSharedByProcessesToo) {
  EXPECT_NO_THROW(support::run_processes(kRanks, [](const Group& group) {
    All2AllManager manager = create_all2all_manager(kName, budget_options(group));
    check(!manager.spans_hosts(), "processes of one host span hosts");
    std::optional<All2AllHandle> handle(manager.get_handle());
    check(*handle == manager.get_handle(), "equal requests, different handles");
    play(handle->get_communication(), 8);
    group.barrier();
    check_eq(memfd_mappings(), std::int64_t{kRanks}, "windows that this process maps");
    group.barrier();
    handle.reset();
    check_eq(memfd_mappings(), std::int64_t{0}, "windows after the last user");
    group.barrier();
    const All2AllHandle again = manager.get_handle();
    play(again.get_communication(), 9);
    check(manager.destroy().ok(), "destroy");
  }));
}

TEST(SharedHandles, EmptyAndWrongUse) {
  check_throws(ErrorCode::kInvalidState, {"empty"}, [] { (void)All2AllHandle().get_communication(); });
  check_throws(ErrorCode::kInvalidState, {"empty"}, [] { (void)All2AllHandle().get_communication({}); });
  EXPECT_FALSE(All2AllHandle().valid());
  const Group alone = Group::in_process(1).front();
  All2AllManager manager = State::create(&kShared, shared_options(alone));
  const All2AllHandle handle = manager.get_handle(sized(6, 24));
  check_throws(ErrorCode::kUnsupported, {"one communication", "without sizes"},
               [&] { (void)handle.get_communication({}); });
  check_throws(ErrorCode::kUnsupported, {"`high_throughput` has no initialize()", "`one_sided` has"},
               [&] { manager.initialize({}); });
  check_throws(ErrorCode::kUnsupported, {"`high_throughput` has nothing to clean up", "destroy()"},
               [&] { (void)manager.cleanup(); });
  check_throws(ErrorCode::kUnsupported, {"`high_throughput`", "use get_handle()"},
               [&] { (void)manager.gather_calls(); });
  EXPECT_EQ(manager.get<GatherCalls>(), nullptr);
}

// The cap is the config's, 20 by default; it may rise again up to the cap, for communications of now and later.
TEST(SmBudgets, AreClampedAndReachEveryCommunication) {
  const Group alone = Group::in_process(1).front();
  All2AllManager manager = State::create(&kShared, shared_options(alone));
  const All2AllHandle early = manager.get_handle(sized(6, 24));
  const auto sms_of = [](const All2AllHandle& handle) { return handle.get_communication().get<SmBudget>()->num_sms(); };
  EXPECT_EQ(sms_of(early), 20);
  for (const auto& [asked, expected] : std::vector<std::pair<int, int>>{{7, 7}, {1, 1}, {1'000'000, 20}, {12, 12}}) {
    manager.set_num_sms(asked);
    EXPECT_EQ(sms_of(early), expected) << asked;
  }
  const All2AllHandle late = manager.get_handle(sized(6, 32));
  EXPECT_EQ(sms_of(late), 12);
  for (const int wrong : {0, -1}) {
    check_throws(ErrorCode::kInvalidArgument, {"num_sms is " + std::to_string(wrong), "at least 1"},
                 [&] { manager.set_num_sms(wrong); });
  }
  EXPECT_EQ(sms_of(early), 12);
  EXPECT_EQ(manager.max_sms_used().value_or(-1), 0);
}

}  // namespace
}  // namespace tokenyard::manager_tests
