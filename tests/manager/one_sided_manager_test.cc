// SPDX-License-Identifier: Apache-2.0
// Managers that own their communications: one that grows with its layers, and one for each set of sizes.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <optional>
#include <string>

#include "manager/manager_setup.h"
#include "support/errors.h"
#include "support/run_ranks.h"
#include "support/tensor.h"

namespace tokenyard::manager_tests {
namespace {

using manager::State;
using support::check;
using support::check_eq;
using support::check_throws;
using support::run_ranks;

constexpr int kRanks = 8;
constexpr InitializeRequest kSmall{.max_num_tokens = 4, .top_k = 2, .num_experts = 8, .hidden_size = 24};

support::World world_for(const Communication& communication, std::uint64_t seed) {
  return support::make_world({.params = communication.params(), .num_ranks = communication.num_ranks(), .seed = seed});
}

void play(Communication& communication, std::uint64_t seed) {
  DispatchResult result;
  support::play_round(communication, world_for(communication, seed), {.seed = seed}, result);
}

// What three capacities a communication has: tokens, combine row, dispatch bytes.
struct Capacities {
  int tokens = 0;
  int hidden = 0;
  std::int64_t bytes = 0;

  friend bool operator==(const Capacities&, const Capacities&) = default;
};

Capacities capacities_of(const Communication& communication) {
  const MoeParams& params = communication.params();
  const auto& config = std::get<OneSidedConfig>(communication.config());
  return {params.max_tokens_per_rank, params.hidden_size,
          dispatch_bytes_per_token(params) + config.extra_payload_bytes_per_token};
}

TEST(OneSidedManager, HandleIsTheManagerItself) {
  EXPECT_NO_THROW(run_ranks(2, [](const Group& group) {
    All2AllManager manager = create_all2all_manager("FlashInferNVLinkOneSidedManager", options_for(group));
    const All2AllHandle handle = manager.get_handle();
    check(handle == manager.get_handle({.token_hidden_size = 5}), "the handle depends on the request");
    check_throws(ErrorCode::kInvalidState, {"`one_sided` is not initialised", "initialize()"},
                 [&] { (void)handle.get_communication(); });
    manager.initialize(kSmall);
    check(&handle.get_communication() == &manager.get_communication(), "the handle has another communication");
    play(handle.get_communication(), 1);
    check_throws(ErrorCode::kUnsupported, {"`one_sided` has no get_communication(sizes)", "`two_sided` has"},
                 [&] { (void)handle.get_communication({}); });
    check(manager.get<GatherCalls>() == nullptr, "one_sided gathers nothing");
  }));
}

TEST(OneSidedManager, EachCapacityIsItsOwnMaximum) {
  EXPECT_NO_THROW(run_ranks(2, [](const Group& group) {
    All2AllManager manager = create_all2all_manager("one_sided", options_for(group));
    manager.initialize(kSmall);
    const auto capacities = [&] { return capacities_of(manager.get_communication()); };
    check(capacities() == Capacities{4, 24, 48}, "the first request");
    InitializeRequest request = kSmall;
    request.max_num_tokens = 3;
    request.extra_payload_bytes_per_token = 16;  // fewer tokens, more bytes
    manager.initialize(request);
    check(capacities() == Capacities{4, 24, 64}, "more bytes a token");
    request = kSmall;
    request.hidden_size = 40;
    request.dispatch_format = DispatchFormat::kNvfp4;  // 20 + 3 bytes: a wider row of combine, fewer bytes
    manager.initialize(request);
    check(capacities() == Capacities{4, 40, 64}, "a wider row of combine");
    request = kSmall;
    request.max_num_tokens = 9;
    manager.initialize(request);
    check(capacities() == Capacities{9, 40, 64}, "more tokens");
    play(manager.get_communication(), 2);
  }));
}

// Only this rank asks: nobody could answer a collective call.
TEST(OneSidedManager, WhatFitsIsNotCollective) {
  EXPECT_NO_THROW(run_ranks(3, [](const Group& group) {
    All2AllManager manager = create_all2all_manager("one_sided", options_for(group));
    manager.initialize(kSmall);
    const std::int64_t bytes = manager.get_communication().window_bytes();
    if (group.rank() == 1) {
      const support::Stopwatch stopwatch;
      manager.initialize(kSmall);
      InitializeRequest smaller = kSmall;
      smaller.max_num_tokens = 1;
      smaller.hidden_size = 8;
      smaller.extra_payload_bytes_per_token = 32;
      manager.initialize(smaller);
      stopwatch.check_below(std::chrono::milliseconds(2'000), "a request that fits");
    }
    group.barrier();
    check_eq(manager.get_communication().window_bytes(), bytes, "the window");
    play(manager.get_communication(), 3);
  }));
}

TEST(OneSidedManager, GrowthReplacesTheWindowOfEveryRank) {
  const std::int64_t before = memfd_mappings();
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    All2AllManager manager = create_all2all_manager("one_sided", options_for(group));
    manager.initialize(kSmall);
    const All2AllHandle handle = manager.get_handle();
    Communication& communication = handle.get_communication();
    DispatchResult result;
    const support::World world = world_for(communication, 4);
    support::play_round(communication, world, {}, result);  // leaves its used handle in the result
    InitializeRequest larger = kSmall;
    larger.max_num_tokens = 12;
    larger.hidden_size = 64;
    manager.initialize(larger);
    group.barrier();
    check_eq(memfd_mappings(), before + kRanks, "windows after growth");
    support::Tensor rows(Dtype::kBf16, {kRanks, 4, 24});
    support::Tensor output(Dtype::kBf16, {world.rank(group.rank()).num_tokens, 24});
    TensorView view = output.view();
    check_throws(ErrorCode::kReplaced, {"growth replaced the window"}, [&] {
      (void)handle.get_communication().combine(result.handle, {.expert_output = rows.view()}, {}, view);
    });
    play(handle.get_communication(), 5);
    check(manager.destroy().ok(), "destroy");
  }));
  EXPECT_EQ(memfd_mappings(), before);
}

// The window that all had goes on, on every rank.
TEST(OneSidedManager, DifferentRequestsFailEverywhereAndChangeNothing) {
  EXPECT_NO_THROW(run_ranks(kRanks, [](const Group& group) {
    All2AllManager manager = create_all2all_manager("one_sided", options_for(group));
    manager.initialize(kSmall);
    InitializeRequest wanted = kSmall;
    wanted.max_num_tokens = group.rank() == 6 ? 31 : 30;
    check_throws(ErrorCode::kMismatch, {"max_tokens_per_rank", "rank 5: 30", "rank 6: 31"},
                 [&] { manager.initialize(wanted); });
    check(manager.initialized(), "the old window is gone");
    check(capacities_of(manager.get_communication()) == Capacities{4, 24, 48}, "the old capacities");
    play(manager.get_communication(), 6);

    wanted = kSmall;
    wanted.max_num_tokens = 30;
    if (group.rank() == 2) wanted.extra_payload_bytes_per_token = -1;
    const support::Stopwatch stopwatch;
    check_throws(group.rank() == 2 ? ErrorCode::kInvalidArgument : ErrorCode::kPeerFailed,
                 {"extra_payload_bytes_per_token is -1", "must not be negative"}, [&] { manager.initialize(wanted); });
    stopwatch.check_below(std::chrono::milliseconds(5'000), "a request that is wrong on one rank");
    play(manager.get_communication(), 7);
  }));
}

TEST(OneSidedManager, FirstRequestMustMakeSense) {
  EXPECT_NO_THROW(run_ranks(2, [](const Group& group) {
    All2AllManager manager = create_all2all_manager("one_sided", options_for(group));
    InitializeRequest request = kSmall;
    request.extra_payload_bytes_per_token = -3;
    check_throws(ErrorCode::kInvalidArgument, {"extra_payload_bytes_per_token is -3", "must not be negative"},
                 [&] { manager.initialize(request); });
    request = kSmall;
    request.top_k = group.rank() == 0 ? 2 : 3;
    check_throws(ErrorCode::kMismatch, {"MoeParams::top_k", "rank 0: 2", "rank 1: 3"},
                 [&] { manager.initialize(request); });
    check(!manager.initialized(), "half initialised");
    manager.initialize(kSmall);
    play(manager.get_communication(), 8);
  }));
}

TEST(OneSidedManager, GrowthWaitsForNoOpenRound) {
  EXPECT_NO_THROW(run_ranks(2, [](const Group& group) {
    All2AllManager manager = create_all2all_manager("one_sided", options_for(group));
    manager.initialize(kSmall);
    Communication& communication = manager.get_communication();
    const support::World world = world_for(communication, 9);
    DispatchResult result;
    support::dispatch_and_check(communication, world, {}, result);
    InitializeRequest larger = kSmall;
    larger.max_num_tokens = 5;
    check_throws(ErrorCode::kInvalidState, {"a round is open"}, [&] { manager.initialize(larger); });
    support::combine_and_check(communication, world, {}, result, result.handle);
    manager.initialize(larger);
    check_eq(manager.get_communication().params().max_tokens_per_rank, 5, "tokens");
  }));
}

// No new descriptor for anybody while this lives.
class NoDescriptors {
 public:
  NoDescriptors() {
    check(::getrlimit(RLIMIT_NOFILE, &before_) == 0, "getrlimit");
    const rlimit none{.rlim_cur = 0, .rlim_max = before_.rlim_max};
    check(::setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit");
  }

  ~NoDescriptors() { (void)::setrlimit(RLIMIT_NOFILE, &before_); }

  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;
  NoDescriptors(NoDescriptors&&) = delete;
  NoDescriptors& operator=(NoDescriptors&&) = delete;

 private:
  rlimit before_{};
};

// Growth fails after the old window is gone, and nothing of it is left.
TEST(OneSidedManager, GrowthThatFailsLeavesNothing) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << support::kSanitizerNeedsDescriptors;
#endif
  const std::int64_t before = memfd_mappings();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    All2AllManager manager = create_all2all_manager("one_sided", options_for(group));
    manager.initialize(kSmall);
    const All2AllHandle handle = manager.get_handle();
    InitializeRequest larger = kSmall;
    larger.max_num_tokens = 40;
    {
      std::optional<NoDescriptors> none;
      if (group.rank() == 0) none.emplace();
      group.barrier();
      check_throws(ErrorCode::kSystem, {}, [&] { manager.initialize(larger); });
      group.barrier();
    }
    group.barrier();
    check(!manager.initialized(), "half initialised");
    check_throws(ErrorCode::kInvalidState, {"not initialised"}, [&] { (void)handle.get_communication(); });
    check_eq(memfd_mappings(), before, "windows");
    group.barrier();
    manager.initialize(kSmall);
    play(handle.get_communication(), 10);
  }));
}

TEST(OneSidedManager, CleanupCanBeUndone) {
  const std::int64_t before = memfd_mappings();
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    All2AllManager manager = create_all2all_manager("one_sided", options_for(group));
    check(manager.cleanup().ok(), "cleanup of nothing");
    const All2AllHandle handle = manager.get_handle();
    for (int life = 0; life < 3; ++life) {
      InitializeRequest request = kSmall;
      request.top_k = 2 + life;  // another life may have other routing
      manager.initialize(request);
      Communication& communication = handle.get_communication();
      play(communication, 11);
      check(manager.cleanup().ok(), "cleanup");
      check(!manager.initialized(), "initialised after cleanup");
      DispatchResult result;
      check_throws(ErrorCode::kDestroyed, {}, [&] { (void)communication.dispatch({}, {}, result); });
      group.barrier();
      check_eq(memfd_mappings(), before, "windows after cleanup");
      group.barrier();
    }
    manager.initialize(kSmall);
    check(manager.destroy().ok(), "destroy");
    check_throws(ErrorCode::kDestroyed, {"this manager was destroyed"}, [&] { (void)handle.get_communication(); });
    check_throws(ErrorCode::kDestroyed, {"this manager was destroyed"}, [&] { (void)manager.cleanup(); });
    check_throws(ErrorCode::kDestroyed, {"this manager was destroyed"}, [&] { manager.initialize(kSmall); });
  }));
}

TEST(OneSidedManager, HandleOfAGoneManagerSaysSo) {
  const std::int64_t before = memfd_mappings();
  std::optional<All2AllManager> manager(create_all2all_manager("one_sided", options_for(Group::in_process(1).front())));
  manager->initialize(kSmall);
  const All2AllHandle handle = manager->get_handle();
  EXPECT_EQ(memfd_mappings(), before + 1);
  manager.reset();
  EXPECT_EQ(memfd_mappings(), before);
  check_throws(ErrorCode::kDestroyed, {"this manager was destroyed"}, [&] { (void)handle.get_communication(); });
}

// The scheme of two_sided, on rows that every build can move.
TEST(ManagerBySizes, MakesOneForEachSet) {
  constexpr CommunicationSizes kOne{.max_num_tokens = 4, .top_k = 2, .num_experts = 8, .hidden_size = 24};
  constexpr CommunicationSizes kOther{.max_num_tokens = 4, .top_k = 3, .num_experts = 12, .hidden_size = 24};
  const std::int64_t before = memfd_mappings();
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    All2AllManager manager = State::create(&kBySizes, options_for(group));
    const All2AllHandle handle = manager.get_handle();
    Communication& one = handle.get_communication(kOne);
    Communication& other = manager.get_communication(kOther);
    check(&one != &other && &one == &manager.get_communication(kOne), "sizes and communications do not agree");
    check_eq(one.params().invalid_expert_id, 8, "the id of unused rows");
    check_eq(other.params().invalid_expert_id, 12, "the id of unused rows");
    play(one, 12);
    play(other, 13);
    play(handle.get_communication(kOne), 14);
    CommunicationSizes differs = kOne;
    differs.hidden_size = group.rank() == 1 ? 32 : 40;
    check_throws(ErrorCode::kMismatch, {"hidden_size", "rank 0: 40", "rank 1: 32"},
                 [&] { (void)manager.get_communication(differs); });
    check_throws(ErrorCode::kUnsupported, {"get_communication()"}, [&] { (void)handle.get_communication(); });
    check(manager.cleanup().ok(), "cleanup");
    check(!manager.initialized(), "initialised after cleanup");
    group.barrier();
    check_eq(memfd_mappings(), before, "windows after cleanup");
    group.barrier();
    play(handle.get_communication(kOther), 15);
    check(manager.destroy().ok(), "destroy");
    check_throws(ErrorCode::kDestroyed, {}, [&] { (void)handle.get_communication(kOne); });
  }));
}

TEST(ManagerBySizes, OptionsMayNameTheInvalidId) {
  ManagerOptions options = options_for(Group::in_process(1).front());
  options.params.invalid_expert_id = -7;
  All2AllManager manager = State::create(&kBySizes, options);
  EXPECT_EQ(manager.get_communication({4, 2, 8, 24}).params().invalid_expert_id, -7);
}

}  // namespace
}  // namespace tokenyard::manager_tests
