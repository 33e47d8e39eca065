// SPDX-License-Identifier: Apache-2.0
// `two_sided` on GPUs: every round against the plain reference, byte for byte, as the host engine is checked; through
// queues of the default size, and through such that hold two rows and wrap in every round.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "gpu/two_sided_rounds.h"
#include "support/check.h"

namespace tokenyard::gpu_tests {
namespace {

using support::RoundPlan;
using support::World;
using support::WorldSpec;

void play(const Shape& shape, const TwoSidedConfig& config, const DeviceRounds::Options& options, int num_rounds) {
  run_on_devices(shape, config, options, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < num_rounds; ++round)
      play_round(communication, world_of(shape, round), rounds.through_device(plan_of(shape, round)), result);
  });
}

// The reference takes long for many tokens.
int num_rounds_of(const Shape& shape) {
  return shape.max_tokens > 500 ? 3 : 2 * support::kNumSkews;
}

class TwoSidedOnGpu : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam()); }
};

TEST_P(TwoSidedOnGpu, RoundsEqualTheReference) {
  play(GetParam(), {}, {}, num_rounds_of(GetParam()));
}

TEST_P(TwoSidedOnGpu, QueuesOfTwoRowsAreEnough) {
  play(GetParam(), {.queue_bytes_per_peer = least_queue_bytes(GetParam())}, {}, num_rounds_of(GetParam()));
}

TEST_P(TwoSidedOnGpu, AnyNumberOfMultiprocessorsGivesTheSameBytes) {
  for (const int num_sms : {1, 3})
    play(GetParam(), {}, {.num_sms = num_sms}, 2);
  play(GetParam(), {.queue_bytes_per_peer = least_queue_bytes(GetParam())}, {.num_sms = 1}, 2);
}

// With what was sent overwritten between the halves.
TEST_P(TwoSidedOnGpu, HalvesGiveTheSameBytes) {
  play(GetParam(), {}, {.halves = true}, 4);
  play(GetParam(), {.queue_bytes_per_peer = least_queue_bytes(GetParam())}, {.halves = true, .num_sms = 2}, 4);
}

std::string title(const testing::TestParamInfo<Shape>& info) {
  return title_of(info.param);
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const bool spread : {false, true}) {
    for (const int num_ranks : {1, 2, 3, 4, 8})
      all.push_back({.num_ranks = num_ranks, .hidden_size = 128, .spread = spread});
    for (const int hidden_size : {7, 2048, 2880, 7168})
      all.push_back({.hidden_size = hidden_size, .max_tokens = 20, .spread = spread});
    for (const int top_k : {1, 2, 9})
      all.push_back({.num_ranks = 3, .hidden_size = 64, .top_k = top_k, .num_experts = 28, .spread = spread});
    for (const Dtype dtype : {Dtype::kF16, Dtype::kF32})
      all.push_back({.hidden_size = 520, .dtype = dtype, .spread = spread});
    all.push_back({.num_ranks = 4, .hidden_size = 256, .max_tokens = 1100, .spread = spread});
    for (const int num_ranks : {2, 4})
      all.push_back(
          {.num_ranks = num_ranks, .hidden_size = 512, .spread = spread, .kind = support::RankKind::kProcesses});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, TwoSidedOnGpu, testing::ValuesIn(shapes()), title);

class TwoSidedRoundsOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    TOKENYARD_NEEDS_DEVICES_OF(shape_);
    // As many queues as CUDA takes: streams of several ranks that share one wait for each other. Read when CUDA starts.
    ASSERT_EQ(::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0), 0);
  }

  const Shape shape_ = kQueuedShape;
};

TEST_F(TwoSidedRoundsOnGpu, QuantisedRowsTravelWithTheirScales) {
  for (const DispatchFormat format :
       {DispatchFormat::kFp8PerTensor, DispatchFormat::kFp8Block128, DispatchFormat::kMxfp8, DispatchFormat::kNvfp4}) {
    support::run_ranks(shape_.num_ranks, [&](const Group& group) {
      DeviceRounds rounds({});
      WorldSpec spec = world_of(shape_, 1).spec;
      spec.params.dispatch_format = format;
      Communication communication = create_communication(group, spec.params, TwoSidedConfig{}, cuda_options(0));
      DispatchResult result;
      for (const bool caller : {false, true}) {
        play_round(communication, support::make_world(spec),
                   rounds.through_device({.seed = 3, .caller_tensors = caller}), result);
      }
      support::check_ok(communication.destroy(), "destroy");
    });
  }
}

// Expert output of another dtype is rounded once to that of the params, this rank's own too.
TEST_F(TwoSidedRoundsOnGpu, ExpertOutputIsCastToTheParamsDtype) {
  for (const bool halves : {false, true}) {
    run_on_devices(shape_, TwoSidedConfig{}, {.halves = halves},
                   [&](Communication& communication, DeviceRounds& rounds) {
                     DispatchResult result;
                     for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
                       play_round(communication, world_of(shape_, 0),
                                  rounds.through_device({.seed = 8, .expert_dtype = dtype}), result);
                     }
                   });
  }
}

TEST_F(TwoSidedRoundsOnGpu, RuntimeMaxTokensSetTheRowsOfABlock) {
  run_on_devices(shape_, TwoSidedConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (const std::int64_t tokens : {70, 33, 0, 1, 65, 8}) {
      WorldSpec spec = world_of(shape_, 0).spec;
      spec.num_tokens = {tokens, tokens / 2, 0};
      RoundPlan plan{.seed = 4, .caller_tensors = tokens == 33};
      plan.runtime_max_tokens = tokens;
      play_round(communication, support::make_world(spec), rounds.through_device(plan), result);
    }
  });
}

// Here each communication has queues of its own, so nobody takes turns.
TEST_F(TwoSidedRoundsOnGpu, CommunicationsOfOneGroupAreIndependent) {
  support::run_ranks(shape_.num_ranks, [&](const Group& group) {
    DeviceRounds rounds({});
    const auto make = [&] { return create_communication(group, params_of(shape_), TwoSidedConfig{}, cuda_options(0)); };
    Communication first = make();
    Communication second = make();
    support::check(!first.contract().takes_turns, "takes_turns");
    const World world = world_of(shape_, 0);
    const support::RankTensors tensors(world, group.rank(), false);
    DispatchOptions options;
    options.stream.native = rounds.stream();
    DispatchInput input;
    input.hidden_states = rounds.to_device(tensors.input().hidden_states);
    input.topk_ids = rounds.to_device(tensors.input().topk_ids);
    DispatchResult open;
    support::check(first.get<SplitPhases>()->dispatch_send(input, options, open).ok(), "dispatch_send");
    DispatchResult result;
    play_round(second, world, rounds.through_device(plan_of(shape_, 3)), result);
    support::check(first.get<SplitPhases>()->dispatch_receive(options, open).ok(), "dispatch_receive");
    rounds.synchronize();
    open.handle = Handle();
    play_round(first, world, rounds.through_device(plan_of(shape_, 4)), result);
    support::check_ok(second.destroy(), "destroy");
    support::check_ok(first.destroy(), "destroy");
  });
}

// Grids are free per rank and call: channels follow from the params alone.
TEST_F(TwoSidedRoundsOnGpu, RanksMayUseDifferentNumbersOfMultiprocessors) {
  support::run_ranks(shape_.num_ranks, [&](const Group& group) {
    DeviceRounds rounds({});
    DeviceRounds few({.num_sms = 1 + group.rank()});
    Communication communication =
        create_communication(group, params_of(shape_), TwoSidedConfig{.queue_bytes_per_peer = 20'000}, cuda_options(0));
    DispatchResult result;
    for (int round = 0; round < 12; ++round) {
      DeviceRounds& now = (round + group.rank()) % 2 == 0 ? few : rounds;
      play_round(communication, world_of(shape_, round), now.through_device(plan_of(shape_, round)), result);
    }
    support::check_ok(communication.destroy(), "destroy");
  });
}

// A captured round: what crosses is what lies in the input when the graph runs.
class CapturedRound {
 public:
  CapturedRound(Communication& communication, const DispatchInput& input, TensorView output, cudaStream_t stream)
      : stream_(stream) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    run(communication, input, output, stream);
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&runnable_, graph, 0), "cudaGraphInstantiate");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    check_cuda(cudaGraphUpload(runnable_, stream), "cudaGraphUpload");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  ~CapturedRound() { static_cast<void>(cudaGraphExecDestroy(runnable_)); }

  CapturedRound(const CapturedRound&) = delete;
  CapturedRound& operator=(const CapturedRound&) = delete;
  CapturedRound(CapturedRound&&) = delete;
  CapturedRound& operator=(CapturedRound&&) = delete;

  void launch() const { check_cuda(cudaGraphLaunch(runnable_, stream_), "cudaGraphLaunch"); }

  // The received rows are what the experts give.
  static void run(Communication& communication, const DispatchInput& input, TensorView output, cudaStream_t stream) {
    DispatchOptions dispatch;
    dispatch.stream.native = stream;
    CombineOptions combine;
    combine.stream.native = stream;
    DispatchResult result;
    support::check(communication.dispatch(input, dispatch, result).ok(), "dispatch");
    CombineInput rows;
    rows.expert_output = result.hidden_states;
    support::check(communication.combine(result.handle, rows, combine, output).ok(), "combine");
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t runnable_ = nullptr;
};

// Of tensors without gaps.
void overwrite(const TensorView& device, const TensorView& host, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(device.data, host.data, static_cast<std::size_t>(host.num_rows() * host.row_bytes()),
                             cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
}

TEST_F(TwoSidedRoundsOnGpu, GraphsReplayRounds) {
  support::run_ranks(shape_.num_ranks, [&](const Group& group) {
    DeviceRounds rounds({});
    Communication communication = create_communication(
        group, params_of(shape_), TwoSidedConfig{.queue_bytes_per_peer = least_queue_bytes(shape_)}, cuda_options(0));
    WorldSpec spec = world_of(shape_, 0).spec;
    spec.num_tokens = {70, 41, 9};
    const support::RankTensors first(support::make_world(spec), group.rank(), false);
    DispatchInput input;
    input.hidden_states = rounds.to_device(first.input().hidden_states);
    input.topk_ids = rounds.to_device(first.input().topk_ids);
    support::Tensor host(Dtype::kBf16, {first.num_tokens(), shape_.hidden_size});
    const TensorView replayed = rounds.to_device(host.view());
    const TensorView eager = rounds.to_device(host.view());
    const CapturedRound graph(communication, input, replayed, rounds.stream());
    group.barrier();
    const auto bytes_of = [&](const TensorView& output) {
      rounds.to_host(host.view(), output);
      rounds.synchronize();
      const auto* data = host.view().as<std::byte>();
      return std::vector<std::byte>(data, data + host.view().num_rows() * host.view().row_bytes());
    };
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      spec.seed = seed;
      const support::RankTensors now(support::make_world(spec), group.rank(), false);
      overwrite(input.hidden_states, now.input().hidden_states, rounds.stream());
      overwrite(input.topk_ids, now.input().topk_ids, rounds.stream());
      graph.launch();
      if (seed % 2 == 0) graph.launch();
      const std::vector<std::byte> by_graph = bytes_of(replayed);
      support::check_ok(communication.poll(), "poll");
      CapturedRound::run(communication, input, eager, rounds.stream());
      support::check(by_graph == bytes_of(eager), "a replayed round gives other bytes");
      support::check_ok(communication.poll(), "poll");
    }
    support::check_ok(communication.destroy(), "destroy");
  });
}

}  // namespace
}  // namespace tokenyard::gpu_tests
