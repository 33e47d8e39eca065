// SPDX-License-Identifier: Apache-2.0
// A rank whose process is killed in the middle of a round: the others name it within the deadline, their device works
// on, and what is collective ends with an answer.
// Public bug report of this kind: a rank is killed in dispatch or combine, and survivors crash (C128).
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>

#include "gpu/backend_case.h"
#include "support/backends.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/tensor.h"

namespace tokenyard::gpu_tests {
namespace {

using std::chrono::milliseconds;
using support::check;
using support::RankTensors;
using support::World;

constexpr int kVictim = 1;
// Ranks that are processes share the device by turns.
constexpr milliseconds kDeadline{3'000};
constexpr milliseconds kLimit = 2 * kDeadline + milliseconds(2'000);

enum class Killed { kBeforeDispatch, kInDispatch, kBeforeCombine };

class KilledRankOnGpu : public testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam().shape); }

  [[nodiscard]] static const Shape& shape() { return GetParam().shape; }

  static void die() {
    static_cast<void>(::kill(::getpid(), SIGKILL));
    for (;;)
      ::pause();
  }

  [[nodiscard]] static DispatchInput on_device(DeviceRounds& rounds, const DispatchInput& host) {
    DispatchInput input;
    input.hidden_states = rounds.to_device(host.hidden_states);
    input.topk_ids = rounds.to_device(host.topk_ids);
    input.topk_weights = rounds.to_device(host.topk_weights);
    rounds.synchronize();
    return input;
  }

  // Up to where the rank is killed, which then does not return.
  static void play_the_victim(Communication& communication, DeviceRounds& rounds, const World& world, Killed when) {
    if (when == Killed::kBeforeDispatch) die();
    const RankTensors tensors(world, kVictim, false);
    const DispatchInput input = on_device(rounds, tensors.input());
    DispatchOptions options;
    options.stream.native = rounds.stream();
    DispatchResult result;
    const Status status = communication.dispatch(input, options, result);
    check(status.code == StatusCode::kEnqueued, "the victim's dispatch");
    if (when == Killed::kInDispatch) die();  // its kernel waits for the others
    rounds.synchronize();
    die();
  }

  static Status play_on(Communication& communication, DeviceRounds& rounds, const World& world) {
    const int rank = communication.rank();
    const RankTensors tensors(world, rank, false);
    DispatchResult result;
    if (const Status status = rounds.dispatch(communication, tensors.input(), {}, result); !status.ok()) return status;
    const support::Tensor rows = expert_output_for(shape(), result);
    support::Tensor output(shape().dtype, {tensors.num_tokens(), shape().hidden_size});
    TensorView view = output.view();
    return rounds.combine(communication, result.handle, {.expert_output = rows.view()}, {}, view);
  }

  static void check_survivor(Communication& communication, DeviceRounds& rounds, const Status& status, Killed when) {
    check(status.code == StatusCode::kTimeout || status.code == StatusCode::kPeerLost,
          "a killed rank: " + status.message());
    support::check_eq(status.fault.peer, kVictim, "the rank at fault");
    support::check_eq(status.fault.rank, communication.rank(), "the rank that reports");
    if (when == Killed::kBeforeDispatch) check(status.fault.phase == Phase::kDispatch, "the phase of the fault");
    if (when == Killed::kBeforeCombine) check(status.fault.phase == Phase::kCombine, "the phase of the fault");
    check(status.fault.waited >= kDeadline, "waited says less than the deadline");
    std::byte* memory = rounds.keep(64);
    std::byte seen{};
    check_cuda(cudaMemsetAsync(memory, 0x5A, 64, rounds.stream()), "cudaMemsetAsync after a rank died");
    check_cuda(cudaMemcpyAsync(&seen, memory, 1, cudaMemcpyDeviceToHost, rounds.stream()), "cudaMemcpyAsync");
    rounds.synchronize();
    check(seen == std::byte{0x5A}, "what was copied after a rank died");
    check_cuda(cudaGetLastError(), "what CUDA remembers");
  }

  static void kill_one(Killed when) {
    std::string failure;
    try {
      run_with_devices(shape(), [&](const Group& group, int device) {
        DeviceRounds rounds({.device = device, .arena_bytes = std::int64_t{16} << 20});
        CommunicationOptions options = cuda_options(device);
        options.deadline = kDeadline;
        support::WorldSpec spec{.params = params_of(shape()), .num_ranks = shape().num_ranks, .seed = 3};
        spec.num_tokens.assign(static_cast<std::size_t>(shape().num_ranks), shape().max_tokens);
        const World world = support::make_world(spec);
        Communication communication =
            create_communication(group, params_of(shape()), support::config_for(GetParam().backend, spec), options);
        DispatchResult result;
        play_round(communication, world,
                   rounds.through_device({.expert_dtype = shape().dtype, .output_dtype = shape().dtype}), result);
        group.barrier();
        if (group.rank() == kVictim) play_the_victim(communication, rounds, world, when);
        const support::Stopwatch stopwatch;
        const Status status = play_on(communication, rounds, world);
        stopwatch.check_below(kLimit, "a round whose rank 1 was killed");
        check_survivor(communication, rounds, status, when);
        const support::Stopwatch resetting;
        const Status reset = communication.reset();
        check(!reset.ok(), "reset without a rank that is gone");
        check(!communication.destroy().ok(), "destroy without a rank that is gone");
        resetting.check_below(milliseconds(30'000), "reset and destroy");
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      });
    } catch (const support::CheckFailure& error) {
      failure = error.what();
    }
    EXPECT_EQ(failure, "rank 1: ended with wait status " + std::to_string(SIGKILL));
  }
};

TEST_P(KilledRankOnGpu, BeforeItsDispatch) {
  kill_one(Killed::kBeforeDispatch);
}

TEST_P(KilledRankOnGpu, WhileItsDispatchWaits) {
  kill_one(Killed::kInDispatch);
}

TEST_P(KilledRankOnGpu, BeforeItsCombine) {
  kill_one(Killed::kBeforeCombine);
}

std::vector<Shape> shapes() {
  return {
      {.num_ranks = 2, .hidden_size = 128, .max_tokens = 20, .kind = support::RankKind::kProcesses},
      {.num_ranks = 2, .hidden_size = 128, .max_tokens = 20, .spread = true, .kind = support::RankKind::kProcesses}};
}

INSTANTIATE_TEST_SUITE_P(Shapes, KilledRankOnGpu, testing::ValuesIn(cases_of(shapes())), [](const auto& of) {
  return title_of_case(of.param);
});

}  // namespace
}  // namespace tokenyard::gpu_tests
