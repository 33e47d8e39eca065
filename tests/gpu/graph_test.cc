// SPDX-License-Identifier: Apache-2.0
// Rounds captured in CUDA graphs and replayed with other rows, ids and numbers of tokens: each replay against the plain
// reference, as rounds that run at once are. All ranks capture at the same time.
// Public bug reports of this kind: stale words taken for new ones (C121), a handle that ends after the capture (C122),
// unused rows and counts that stay on the device (C124).
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "gpu/backend_case.h"
#include "gpu/recorded_round.h"
#include "support/backends.h"
#include "support/check.h"

namespace tokenyard::gpu_tests {
namespace {

using support::RoundPlan;
using support::World;

class GraphsOnGpu : public testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam().shape); }

  [[nodiscard]] static const Shape& shape() { return GetParam().shape; }

  [[nodiscard]] static World world(std::int64_t most, std::uint64_t seed) { return world_up_to(shape(), most, seed); }

  [[nodiscard]] static RoundPlan plan() { return {.expert_dtype = shape().dtype, .output_dtype = shape().dtype}; }

  using Rank = std::function<void(const Group&, Communication&, DeviceRounds&)>;

  static void on_ranks(const Rank& body) {
    run_with_devices(shape(), [&](const Group& group, int device) {
      DeviceRounds rounds({.device = device});
      Communication communication = create_communication(
          group, params_of(shape()), support::config_for(GetParam().backend, world(1, 1).spec), cuda_options(device));
      body(group, communication, rounds);
      support::check_ok(communication.destroy(), "destroy");
    });
  }

  // A round without a graph, on the same stream.
  static void play_at_once(Communication& communication, DeviceRounds& rounds, std::uint64_t seed) {
    DispatchResult result;
    RoundPlan at_once = plan();
    at_once.seed = seed;
    play_round(communication, world(shape().max_tokens, seed), rounds.through_device(at_once), result);
  }
};

TEST_P(GraphsOnGpu, ReplaysHaveNewRowsIdsAndNumbersOfTokens) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    RecordedRound round(rounds, communication, world(shape().max_tokens, 1), plan(), shape().max_tokens);
    const Graph graph(rounds.stream(), [&] { round.record(rounds.stream()); });
    group.barrier();
    for (std::uint64_t seed = 1; seed <= 12; ++seed) {
      round.load(world(shape().max_tokens, seed), seed);
      graph.launch(rounds.stream());
      round.check();
      if (seed % 4 == 0) play_at_once(communication, rounds, seed);
    }
  });
}

// Without a look in between: a rank may run ahead of the others as far as the protocol lets it.
TEST_P(GraphsOnGpu, ReplaysFollowEachOtherWithoutWaiting) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    RecordedRound round(rounds, communication, world(shape().max_tokens, 1), plan(), shape().max_tokens);
    const Graph graph(rounds.stream(), [&] { round.record(rounds.stream()); });
    group.barrier();
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      round.load(world(shape().max_tokens, seed), seed);
      for (int replay = 0; replay < 100; ++replay)
        graph.launch(rounds.stream());
      round.check();
    }
  });
}

TEST_P(GraphsOnGpu, GraphsOfSeveralSizesTakeTurns) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    std::vector<std::int64_t> sizes{1, 8, shape().max_tokens};
    if (shape().max_tokens > 512) sizes.push_back(512);
    std::vector<std::unique_ptr<RecordedRound>> recorded;
    std::vector<std::unique_ptr<Graph>> graphs;
    for (const std::int64_t size : sizes) {
      recorded.push_back(std::make_unique<RecordedRound>(rounds, communication, world(size, 2), plan(), size));
      graphs.push_back(std::make_unique<Graph>(rounds.stream(), [&] { recorded.back()->record(rounds.stream()); }));
    }
    group.barrier();
    for (std::uint64_t seed = 1; seed <= 4 * sizes.size(); ++seed) {
      const std::size_t at = (seed * seed + seed / 3) % sizes.size();
      recorded[at]->load(world(sizes[at], seed), seed);
      graphs[at]->launch(rounds.stream());
      recorded[at]->check();
    }
  });
}

TEST_P(GraphsOnGpu, LayersShareOneGraph) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    const std::int64_t most = shape().max_tokens;
    RecordedRound first(rounds, communication, world(most, 1), plan(), most);
    RecordedRound second(rounds, communication, world(most, 1), plan(), most);
    const Graph graph(rounds.stream(), [&] {
      first.record(rounds.stream());
      second.record(rounds.stream());
    });
    group.barrier();
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      first.load(world(most, seed), seed);
      second.load(world(most, seed + 20), seed + 20);
      graph.launch(rounds.stream());
      first.check();
      second.check();
    }
  });
}

// As engines do that run the experts outside of graphs.
TEST_P(GraphsOnGpu, PhasesMayHaveGraphsOfTheirOwn) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    RecordedRound round(rounds, communication, world(shape().max_tokens, 1), plan(), shape().max_tokens);
    const Graph dispatch(rounds.stream(), [&] { round.record_dispatch(rounds.stream()); });
    const Graph combine(rounds.stream(), [&] { round.record_combine(rounds.stream()); });
    group.barrier();
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      round.load(world(shape().max_tokens, seed), seed);
      dispatch.launch(rounds.stream());
      combine.launch(rounds.stream());
      round.check();
    }
  });
}

// Branches of one capture are one sequence of this communication, as streams without a capture are.
TEST_P(GraphsOnGpu, PhasesMayBeOnBranchesOfACapture) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    cudaStream_t branch = nullptr;
    cudaEvent_t fork = nullptr;
    cudaEvent_t join = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&branch, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    check_cuda(cudaEventCreateWithFlags(&join, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    RecordedRound round(rounds, communication, world(shape().max_tokens, 1), plan(), shape().max_tokens);
    {
      const Graph graph(rounds.stream(), [&] {
        check_cuda(cudaEventRecord(fork, rounds.stream()), "cudaEventRecord");
        check_cuda(cudaStreamWaitEvent(branch, fork, 0), "cudaStreamWaitEvent");
        round.record_dispatch(rounds.stream());
        round.record_combine(branch);
        check_cuda(cudaEventRecord(join, branch), "cudaEventRecord");
        check_cuda(cudaStreamWaitEvent(rounds.stream(), join, 0), "cudaStreamWaitEvent");
      });
      group.barrier();
      for (std::uint64_t seed = 1; seed <= 3; ++seed) {
        round.load(world(shape().max_tokens, seed), seed);
        graph.launch(rounds.stream());
        round.check();
      }
    }
    play_at_once(communication, rounds, 9);
    check_cuda(cudaEventDestroy(join), "cudaEventDestroy");
    check_cuda(cudaEventDestroy(fork), "cudaEventDestroy");
    check_cuda(cudaStreamDestroy(branch), "cudaStreamDestroy");
  });
}

TEST_P(GraphsOnGpu, HandlesMayEndBeforeTheReplays) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    std::optional<RecordedRound> round;
    round.emplace(rounds, communication, world(shape().max_tokens, 1), plan(), shape().max_tokens);
    const Graph graph(rounds.stream(), [&] { round->record(rounds.stream()); });
    round->result() = {};
    // Its route is used again by others.
    for (std::uint64_t seed = 1; seed <= 3; ++seed)
      play_at_once(communication, rounds, seed);
    group.barrier();
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      round->load(world(shape().max_tokens, seed), seed);
      graph.launch(rounds.stream());
      round->check();
      play_at_once(communication, rounds, seed + 30);
    }
  });
}

// A round whose handle ends without a combine is whole too: replays do not add up, and leave nothing behind.
TEST_P(GraphsOnGpu, DispatchAloneCanBeReplayed) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    RecordedRound alone(rounds, communication, world(shape().max_tokens, 1), plan(), shape().max_tokens);
    RecordedRound round(rounds, communication, world(shape().max_tokens, 1), plan(), shape().max_tokens);
    const Graph graph(rounds.stream(), [&] {
      alone.record_dispatch(rounds.stream());
      alone.result().handle = Handle();
      round.record(rounds.stream());
    });
    group.barrier();
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      alone.load(world(shape().max_tokens, seed + 40), seed);
      round.load(world(shape().max_tokens, seed), seed);
      for (int replay = 0; replay < 3; ++replay)
        graph.launch(rounds.stream());
      round.check();
      alone.check_dispatch();
      play_at_once(communication, rounds, seed);
    }
  });
}

std::vector<Shape> shapes() {
  return {{.num_ranks = 2, .hidden_size = 128, .max_tokens = 40},
          {.num_ranks = 3, .hidden_size = 520, .top_k = 5, .num_experts = 29, .max_tokens = 17, .dtype = Dtype::kF16},
          {.num_ranks = 2, .hidden_size = 256, .max_tokens = 600},
          {.num_ranks = 2, .hidden_size = 128, .max_tokens = 40, .spread = true}};
}

INSTANTIATE_TEST_SUITE_P(Shapes, GraphsOnGpu, testing::ValuesIn(cases_of(shapes())), [](const auto& of) {
  return title_of_case(of.param);
});

}  // namespace
}  // namespace tokenyard::gpu_tests
