// SPDX-License-Identifier: Apache-2.0
// Ten thousand rounds that follow each other with little waiting: sizes from no token to more than small rounds take,
// handles that end without a combine, blocks as each rank likes, graphs in between. Every output is compared on the
// device, and now and then a whole round with the reference.
// Public bug reports of this kind: one row in a few percent of runs is corrupted (C106), rows that come later than the
// word that tells of them (C107).
#include <gtest/gtest.h>

#include <chrono>
#include <optional>

#include "gpu/backend_case.h"
#include "gpu/device_world.h"
#include "gpu/recorded_round.h"
#include "support/backends.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/rng.h"

namespace tokenyard::gpu_tests {
namespace {

using support::Rng;

// More launches than this ahead of a rank of the same process could block this one's thread inside the driver, with
// what the other needs to launch.
constexpr int kRoundsBetweenWaits = 60;

class SoakOnGpu : public testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam().shape); }

  [[nodiscard]] static const Shape& shape() { return GetParam().shape; }

  [[nodiscard]] static Communication make(const Group& group, const CommunicationOptions& options) {
    return create_communication(group, params_of(shape()),
                                support::config_for(GetParam().backend, world_up_to(shape(), 1, 1).spec), options);
  }
};

TEST_P(SoakOnGpu, TenThousandRounds) {
  run_with_devices(shape(), [](const Group& group, int device) {
    DeviceRounds rounds({.device = device});
    Communication communication = make(group, cuda_options(device));
    cudaStream_t stream = rounds.stream();
    std::vector<std::unique_ptr<DeviceWorld>> worlds;
    const std::int64_t most = shape().max_tokens;
    const std::int64_t sizes[] = {1, 2, 8, 9, 33, 64, 65, 128, 511, 512, 513, most};
    std::uint64_t seed = 1;
    for (const std::int64_t size : sizes) {
      if (size > most) continue;
      for (int i = 0; i < 2; ++i, ++seed)
        worlds.push_back(std::make_unique<DeviceWorld>(rounds, world_up_to(shape(), size, seed), group.rank(), size));
    }
    const support::RoundPlan plan;
    RecordedRound recorded(rounds, communication, world_up_to(shape(), 32, 3), plan, 32);
    const Graph graph(stream, [&] { recorded.record(stream); });
    recorded.load(world_up_to(shape(), 32, 8), 8);
    group.barrier();
    Rng together(11);                                           // the same on all ranks
    Rng alone(static_cast<std::uint64_t>(group.rank()) + 100);  // each rank's own
    const int processors[] = {0, 1, 3, 16, 40};
    for (int round = 1; round <= 10'000; ++round) {
      DeviceWorld& world = *worlds[static_cast<std::size_t>(together.below(std::ssize(worlds)))];
      world.dispatch(communication, stream, processors[alone.below(5)]);
      if (together.below(12) == 0) {
        world.drop();
      } else {
        world.combine(communication, stream, processors[alone.below(5)]);
      }
      if (together.below(20) == 0) graph.launch(stream);
      if (round % kRoundsBetweenWaits == 0) rounds.synchronize();
      if (round % 1'000 != 0) continue;
      for (const auto& each : worlds)
        each->check_outputs(stream);
      graph.launch(stream);
      recorded.check();
      DispatchResult result;
      play_round(communication, world_up_to(shape(), most, static_cast<std::uint64_t>(round)),
                 rounds.through_device(plan), result);
    }
    support::check_ok(communication.destroy(), "destroy");
  });
}

std::vector<Shape> shapes() {
  return {{.num_ranks = 2, .hidden_size = 256, .max_tokens = 700},
          {.num_ranks = 4, .hidden_size = 128, .top_k = 4, .max_tokens = 130},
          {.num_ranks = 2, .hidden_size = 256, .max_tokens = 700, .spread = true}};
}

INSTANTIATE_TEST_SUITE_P(Shapes, SoakOnGpu, testing::ValuesIn(cases_of(shapes())), [](const auto& of) {
  return title_of_case(of.param);
});

// One shape again and again, as a layer has it.
class RepeatsOnGpu : public SoakOnGpu {};

TEST_P(RepeatsOnGpu, FiveHundredOfOneShapeAreExact) {
  run_with_devices(shape(), [](const Group& group, int device) {
    DeviceRounds rounds({.device = device});
    Communication communication = make(group, cuda_options(device));
    DeviceWorld world(rounds, world_up_to(shape(), shape().max_tokens, 5), group.rank(), shape().max_tokens);
    group.barrier();
    for (int round = 1; round <= 500; ++round) {
      world.round(communication, rounds.stream());
      if (round % kRoundsBetweenWaits == 0) rounds.synchronize();
    }
    world.check_outputs(rounds.stream());
    support::check_ok(communication.poll(), "poll");
    support::check_ok(communication.destroy(), "destroy");
  });
}

std::vector<Shape> repeated_shapes() {
  return {{.num_ranks = 2, .hidden_size = 7168, .num_experts = 256, .max_tokens = 256},
          {.num_ranks = 2, .hidden_size = 7168, .num_experts = 256, .max_tokens = 1024},
          {.num_ranks = 2, .hidden_size = 7168, .num_experts = 256, .max_tokens = 256, .spread = true}};
}

INSTANTIATE_TEST_SUITE_P(Shapes, RepeatsOnGpu, testing::ValuesIn(cases_of(repeated_shapes())), [](const auto& of) {
  return title_of_case(of.param);
});

}  // namespace
}  // namespace tokenyard::gpu_tests
