// SPDX-License-Identifier: Apache-2.0
// Managers on GPUs: the communications that layers share, their growth, and memory of the window for expert output.
#include "tokenyard/manager.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "gpu/device_ranks.h"
#include "gpu/recorded_round.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using support::check;
using support::check_eq;
using support::check_throws;
using support::RoundPlan;

constexpr InitializeRequest kSmall{.max_num_tokens = 12, .top_k = 4, .num_experts = 16, .hidden_size = 64};

// The shape says how many ranks there are and where; requests say the rest.
class ManagerOnGpu : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam()); }

  using Rank = std::function<void(const Group&, All2AllManager&, DeviceRounds&)>;

  static void on_ranks(std::string_view name, const Rank& body) {
    run_with_devices(GetParam(), [&](const Group& group, int device) {
      DeviceRounds rounds({.device = device, .zero_copy = true});
      All2AllManager manager = create_all2all_manager(name, {.group = group, .communication = cuda_options(device)});
      body(group, manager, rounds);
      support::check_ok(manager.destroy(), "destroy");
    });
  }

  static support::World world(const Communication& communication, std::uint64_t seed) {
    return support::make_world(
        {.params = communication.params(), .num_ranks = communication.num_ranks(), .seed = seed});
  }

  static void play(Communication& communication, DeviceRounds& rounds, std::uint64_t seed) {
    DispatchResult result;
    const RoundPlan plan{.seed = seed};
    play_round(communication, world(communication, seed), rounds.through_device(plan), result);
  }
};

TEST_P(ManagerOnGpu, LayersShareOneCommunicationThatGrows) {
  on_ranks("one_sided", [](const Group& group, All2AllManager& manager, DeviceRounds& rounds) {
    manager.initialize(kSmall);
    const All2AllHandle handle = manager.get_handle();
    play(handle.get_communication(), rounds, 1);
    const std::int64_t before = handle.get_communication().window_bytes();
    DispatchResult old;
    support::dispatch_and_check(handle.get_communication(), world(handle.get_communication(), 2),
                                rounds.through_device({}), old);
    InitializeRequest larger = kSmall;
    larger.max_num_tokens = 700;
    larger.hidden_size = 128;
    check_throws(ErrorCode::kInvalidState, {"a round is open"}, [&] { manager.initialize(larger); });
    old.handle = Handle();
    manager.initialize(larger);
    check(handle.get_communication().window_bytes() > before, "the window did not grow");
    for (std::uint64_t seed = 3; seed < 6; ++seed)
      play(handle.get_communication(), rounds, seed);
    InitializeRequest differs = larger;
    differs.max_num_tokens += group.rank() == 0 ? 1 : 2;
    check_throws(ErrorCode::kMismatch, {"max_tokens_per_rank"}, [&] { manager.initialize(differs); });
    manager.initialize(kSmall);  // fits
    play(handle.get_communication(), rounds, 6);
  });
}

TEST_P(ManagerOnGpu, HandlesOfAReplacedWindowSaySo) {
  on_ranks("one_sided", [](const Group& /*group*/, All2AllManager& manager, DeviceRounds& rounds) {
    manager.initialize(kSmall);
    Communication& communication = manager.get_communication();
    DispatchResult old;
    const support::World sent = world(communication, 7);
    support::dispatch_and_check(communication, sent, rounds.through_device({}), old);
    support::combine_and_check(communication, sent, rounds.through_device({}), old, old.handle);
    InitializeRequest larger = kSmall;
    larger.top_k = 5;
    manager.initialize(larger);
    TensorView nowhere;
    check_throws(ErrorCode::kReplaced, {"growth replaced the window"},
                 [&] { static_cast<void>(manager.get_communication().combine(old.handle, {}, {}, nowhere)); });
    play(manager.get_communication(), rounds, 8);
  });
}

TEST_P(ManagerOnGpu, CaptureEndsGrowth) {
  on_ranks("one_sided", [](const Group& group, All2AllManager& manager, DeviceRounds& rounds) {
    manager.initialize(kSmall);
    Communication& communication = manager.get_communication();
    RecordedRound round(rounds, communication, world(communication, 1), {}, kSmall.max_num_tokens);
    {
      const Graph graph(rounds.stream(), [&] { round.record(rounds.stream()); });
      group.barrier();
      InitializeRequest larger = kSmall;
      larger.max_num_tokens += 1;
      check_throws(ErrorCode::kInvalidState, {"captured", "grow"}, [&] { manager.initialize(larger); });
      check(manager.initialized(), "the window is gone");
      round.load(world(communication, 9), 9);
      graph.launch(rounds.stream());
      round.check();
    }
    // All of it goes, and the next one has no graphs.
    support::check_ok(manager.cleanup(), "cleanup");
    InitializeRequest larger = kSmall;
    larger.max_num_tokens += 1;
    manager.initialize(larger);
    larger.max_num_tokens += 1;
    manager.initialize(larger);
    play(manager.get_communication(), rounds, 10);
  });
}

TEST_P(ManagerOnGpu, CleanupGivesTheMemoryBack) {
  on_ranks("one_sided", [](const Group& group, All2AllManager& manager, DeviceRounds& rounds) {
    InitializeRequest large = kSmall;
    large.max_num_tokens = 4096;
    large.hidden_size = 4096;
    const auto free_bytes = [&] {
      rounds.synchronize();
      group.barrier();
      std::size_t free = 0;
      std::size_t total = 0;
      check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
      group.barrier();
      return static_cast<std::int64_t>(free);
    };
    manager.initialize(large);
    support::check_ok(manager.cleanup(), "cleanup");
    const std::int64_t before = free_bytes();
    for (int life = 0; life < 3; ++life) {
      manager.initialize(large);
      check(before - free_bytes() >= manager.get_communication().window_bytes(), "where is the window?");
      support::check_ok(manager.cleanup(), "cleanup");
    }
    check(before - free_bytes() < std::int64_t{32} << 20, "windows stayed behind");
  });
}

TEST_P(ManagerOnGpu, SaysHowManyMultiprocessorsItUses) {
  on_ranks("one_sided", [](const Group& group, All2AllManager& manager, DeviceRounds& rounds) {
    int processors = 0;
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, rounds.device()),
               "cudaDeviceGetAttribute");
    manager.initialize(kSmall);
    const int share = GetParam().spread ? processors : processors / group.num_ranks();
    check_eq(manager.max_sms_used().value_or(-1), share, "max_sms_used");
  });
}

// A device's tensors are no host's, and are refused before anything moves.
TEST_P(ManagerOnGpu, TensorsOfTheHostAreRefused) {
  on_ranks("one_sided", [](const Group& group, All2AllManager& manager, DeviceRounds& rounds) {
    manager.initialize(kSmall);
    Communication& communication = manager.get_communication();
    const support::RankTensors tensors(world(communication, 11), group.rank(), false);
    DispatchResult result;
    DispatchOptions options;
    options.stream.native = rounds.stream();
    check_throws(ErrorCode::kInvalidArgument, {"must be on cuda:"},
                 [&] { static_cast<void>(communication.dispatch(tensors.input(), options, result)); });
    group.barrier();
    play(communication, rounds, 12);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    ManagerOnGpu,
    testing::Values(Shape{.num_ranks = 2}, Shape{.num_ranks = 4}, Shape{.num_ranks = 2, .spread = true}),
    [](const auto& of) { return std::to_string(of.param.num_ranks) + (of.param.spread ? "_spread" : "_shared"); });

}  // namespace
}  // namespace tokenyard::gpu_tests
