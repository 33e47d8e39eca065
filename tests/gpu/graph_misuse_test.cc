// SPDX-License-Identifier: Apache-2.0
// What goes wrong around captures, and what cannot be captured: clear errors, and a communication that goes on.
// Public bug reports of this kind: making a communication inside a capture (C125).
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>

#include "gpu/backend_case.h"
#include "gpu/recorded_round.h"
#include "support/backends.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using support::check;
using support::check_fault;
using support::check_throws;
using support::RoundPlan;
using support::World;

class CapturesOnGpu : public testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam().shape); }

  [[nodiscard]] static const Shape& shape() { return GetParam().shape; }

  [[nodiscard]] static World world(std::uint64_t seed) { return world_up_to(shape(), shape().max_tokens, seed); }

  [[nodiscard]] static RoundPlan plan() { return {.expert_dtype = shape().dtype, .output_dtype = shape().dtype}; }

  [[nodiscard]] static Communication make(const Group& group, const CommunicationOptions& options) {
    return create_communication(group, params_of(shape()), support::config_for(GetParam().backend, world(1).spec),
                                options);
  }

  using Rank = std::function<void(const Group&, Communication&, DeviceRounds&)>;

  static void on_ranks(const Rank& body) {
    run_with_devices(shape(), [&](const Group& group, int device) {
      DeviceRounds rounds({.device = device});
      Communication communication = make(group, cuda_options(device));
      body(group, communication, rounds);
      support::check_ok(communication.destroy(), "destroy");
    });
  }

  // That everything works: a round that runs at once, and one that is captured.
  static void play(const Group& group, Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (std::uint64_t seed = 1; seed <= 3; ++seed)
      play_round(communication, world(seed), rounds.through_device(plan()), result);
    RecordedRound round(rounds, communication, world(1), plan(), shape().max_tokens);
    const Graph graph(rounds.stream(), [&] { round.record(rounds.stream()); });
    group.barrier();
    for (std::uint64_t seed = 4; seed <= 5; ++seed) {
      round.load(world(seed), seed);
      graph.launch(rounds.stream());
      round.check();
    }
  }

  static void begin(cudaStream_t stream) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  }

  // Whatever came of the capture, nothing of it is launched.
  static cudaError_t abandon(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    const cudaError_t outcome = cudaStreamEndCapture(stream, &graph);
    static_cast<void>(cudaGetLastError());
    if (graph != nullptr) check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return outcome;
  }
};

TEST_P(CapturesOnGpu, NothingIsMadeInsideOfOne) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    begin(rounds.stream());
    check_throws(ErrorCode::kInvalidState, {"capture", "outside"},
                 [&] { static_cast<void>(make(group, cuda_options(rounds.device()))); });
    static_cast<void>(abandon(rounds.stream()));
    play(group, communication, rounds);
  });
}

TEST_P(CapturesOnGpu, WhatWaitsForTheDeviceIsRefused) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    RecordedRound round(rounds, communication, world(1), plan(), shape().max_tokens);
    begin(rounds.stream());
    round.record(rounds.stream());
    check_throws(ErrorCode::kInvalidState, {"reset()", "capture"}, [&] { static_cast<void>(communication.reset()); });
    check_throws(ErrorCode::kInvalidState, {"destroy()", "capture"},
                 [&] { static_cast<void>(communication.destroy()); });
    check(abandon(rounds.stream()) == cudaSuccess, "the capture did not outlast what was refused");
    support::check_ok(communication.reset(), "reset after the capture");
    play(group, communication, rounds);
  });
}

// Graphs hold the addresses of the window, and nobody tells when they are gone.
TEST_P(CapturesOnGpu, GrowthEndsWithTheFirst) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    auto* growth = communication.get<Growth>();
    if (growth == nullptr) return;
    MoeParams larger = communication.params();
    larger.max_tokens_per_rank += 5;
    growth->reserve(larger, 0);
    play(group, communication, rounds);
    check_throws(ErrorCode::kInvalidState, {"captured"}, [&] {
      MoeParams wanted = communication.params();
      wanted.max_tokens_per_rank += 3;
      growth->reserve(wanted, 0);
    });
    growth->reserve(larger, 0);  // fits
    play(group, communication, rounds);
  });
}

TEST_P(CapturesOnGpu, RoundsThatNobodyLaunchesLeaveNothing) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    RecordedRound round(rounds, communication, world(1), plan(), shape().max_tokens);
    begin(rounds.stream());
    round.record(rounds.stream());
    check(abandon(rounds.stream()) == cudaSuccess, "a whole round");
    begin(rounds.stream());
    round.record_dispatch(rounds.stream());
    round.result().handle = Handle();  // inside of the capture
    check(abandon(rounds.stream()) == cudaSuccess, "a dispatch alone");
    begin(rounds.stream());
    round.record_dispatch(rounds.stream());
    check(abandon(rounds.stream()) == cudaSuccess, "a dispatch alone");
    round.result().handle = Handle();  // after it
    play(group, communication, rounds);
  });
}

// What breaks a capture, here that the stream is waited for, is the caller's affair: calls then fail, and handles end.
TEST_P(CapturesOnGpu, OneThatFailedIsNoFault) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    RecordedRound round(rounds, communication, world(1), plan(), shape().max_tokens);
    begin(rounds.stream());
    round.record_dispatch(rounds.stream());
    check(cudaStreamSynchronize(rounds.stream()) != cudaSuccess, "a capture was waited for");
    static_cast<void>(cudaGetLastError());
    check_throws(ErrorCode::kInvalidState, {"capture"}, [&] { round.record_combine(rounds.stream()); });
    round.result().handle = Handle();
    check(abandon(rounds.stream()) != cudaSuccess, "the capture went on");
    support::check_ok(communication.poll(), "poll");
    play(group, communication, rounds);
  });
}

// Nobody waits for what only was recorded, so nobody is told.
TEST_P(CapturesOnGpu, MisuseIsThrownAndNothingElse) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    RecordedRound round(rounds, communication, world(1), plan(), shape().max_tokens);
    const Graph graph(rounds.stream(), [&] {
      DispatchResult result;
      DispatchOptions options;
      options.stream.native = rounds.stream();
      if (group.rank() == 1) {
        check_throws(ErrorCode::kInvalidArgument, {"hidden_states"},
                     [&] { static_cast<void>(communication.dispatch({}, options, result)); });
      }
      round.record_dispatch(rounds.stream());
      if (group.rank() == 0) {
        TensorView nowhere;
        CombineOptions combine;
        combine.stream.native = rounds.stream();
        check_throws(ErrorCode::kInvalidArgument, {},
                     [&] { static_cast<void>(communication.combine(round.result().handle, {}, combine, nowhere)); });
      }
      round.record_combine(rounds.stream());
    });
    group.barrier();
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      round.load(world(seed), seed);
      graph.launch(rounds.stream());
      round.check();
    }
    play(group, communication, rounds);
  });
}

// A rank that does not replay is named, and graphs outlast the reset.
TEST_P(CapturesOnGpu, ReplayWithoutAPeerTimesOut) {
  run_with_devices(shape(), [](const Group& group, int device) {
    DeviceRounds rounds({.device = device});
    CommunicationOptions options = cuda_options(device);
    options.deadline = patient(std::chrono::milliseconds(300));
    Communication communication = make(group, options);
    RecordedRound round(rounds, communication, world(1), plan(), shape().max_tokens);
    const Graph graph(rounds.stream(), [&] { round.record(rounds.stream()); });
    group.barrier();
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      round.load(world(seed), seed);
      graph.launch(rounds.stream());
      round.check();
    }
    group.barrier();
    if (group.rank() != 1) {
      graph.launch(rounds.stream());
      graph.launch(rounds.stream());
      rounds.synchronize();
      check_fault(communication.poll(), StatusCode::kTimeout, 1, Phase::kDispatch);
    }
    group.barrier();
    support::check_ok(communication.reset(), "reset");
    support::check_ok(communication.poll(), "poll after reset");
    for (std::uint64_t seed = 4; seed <= 6; ++seed) {
      round.load(world(seed), seed);
      graph.launch(rounds.stream());
      round.check();
    }
    support::check_ok(communication.destroy(), "destroy");
  });
}

std::vector<Shape> shapes() {
  return {{.num_ranks = 2, .hidden_size = 128, .max_tokens = 40},
          {.num_ranks = 2, .hidden_size = 128, .max_tokens = 600}};
}

INSTANTIATE_TEST_SUITE_P(Shapes, CapturesOnGpu, testing::ValuesIn(cases_of(shapes())), [](const auto& of) {
  return title_of_case(of.param);
});

}  // namespace
}  // namespace tokenyard::gpu_tests
