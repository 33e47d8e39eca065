// SPDX-License-Identifier: Apache-2.0
// `high_throughput` on GPUs: every round against the plain reference, byte for byte, as the host engine is checked.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/device_ranks.h"

namespace tokenyard::gpu_tests {
namespace {

using support::RoundPlan;
using support::Skew;
using support::World;

class HighThroughputOnGpu : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam()); }

  // The reference takes long for many tokens.
  static int num_rounds() { return GetParam().max_tokens > 500 ? 3 : 2 * support::kNumSkews; }

  static World world_of(int round) {
    const Shape& shape = GetParam();
    return support::make_world({.params = params_of(shape),
                                .num_ranks = shape.num_ranks,
                                .skew = static_cast<Skew>(round % support::kNumSkews),
                                .id_dtype = round % 2 == 1 ? Dtype::kI64 : Dtype::kI32,
                                .weight_dtype = round % 3 == 2 ? Dtype::kBf16 : Dtype::kF32,
                                .seed = static_cast<std::uint64_t>(round) + 11});
  }

  static RoundPlan plan_of(int round) {
    const Shape& shape = GetParam();
    return {.seed = static_cast<std::uint64_t>(round) + 5,
            .expert_dtype = round % 4 == 3 ? Dtype::kF32 : shape.dtype,
            .output_dtype = round % 2 == 1 ? Dtype::kF32 : shape.dtype,
            .strided = round % 3 == 1,
            .caller_tensors = round % 4 == 2,
            .weights_back = round % 2 == 0,
            .num_biases = round % 3,
            .expert_alignment = round % 5 == 1 ? 16 : 1};
  }
};

TEST_P(HighThroughputOnGpu, RoundsEqualTheReference) {
  run_on_devices(GetParam(), HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < num_rounds(); ++round)
      play_round(communication, world_of(round), rounds.through_device(plan_of(round)), result);
  });
}

// More rows than come, and far fewer.
TEST_P(HighThroughputOnGpu, RowsMayBeFixed) {
  const Shape shape = GetParam();
  run_on_devices(shape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < num_rounds(); ++round) {
      RoundPlan plan = plan_of(round);
      plan.num_worst_tokens = round % 2 == 0 ? std::int64_t{shape.num_ranks} * shape.max_tokens : shape.max_tokens / 3;
      play_round(communication, world_of(round), rounds.through_device(plan), result);
    }
  });
}

TEST_P(HighThroughputOnGpu, ExpertOutputMayLieInTheWindow) {
  run_on_devices(GetParam(), HighThroughputConfig{}, {.zero_copy = true},
                 [&](Communication& communication, DeviceRounds& rounds) {
                   DispatchResult result;
                   for (int round = 0; round < 4; ++round) {
                     RoundPlan plan = plan_of(round);
                     plan.expert_dtype = GetParam().dtype;
                     play_round(communication, world_of(round), rounds.through_device(plan), result);
                   }
                 });
}

TEST_P(HighThroughputOnGpu, HalvesGiveWhatWholeCallsGive) {
  run_on_devices(GetParam(), HighThroughputConfig{}, {.halves = true},
                 [&](Communication& communication, DeviceRounds& rounds) {
                   DispatchResult result;
                   for (int round = 0; round < 3; ++round) {
                     RoundPlan plan = plan_of(round);
                     if (round == 1) plan.num_worst_tokens = std::int64_t{GetParam().num_ranks} * GetParam().max_tokens;
                     play_round(communication, world_of(round), rounds.through_device(plan), result);
                   }
                 });
}

TEST_P(HighThroughputOnGpu, AnyNumberOfMultiprocessorsGivesTheSameBytes) {
  for (const int num_sms : {1, 3}) {
    run_on_devices(GetParam(), HighThroughputConfig{}, {.num_sms = num_sms},
                   [&](Communication& communication, DeviceRounds& rounds) {
                     DispatchResult result;
                     for (int round = 0; round < 2; ++round)
                       play_round(communication, world_of(2 * round), rounds.through_device(plan_of(2 * round)),
                                  result);
                   });
  }
}

std::string title(const testing::TestParamInfo<Shape>& info) {
  return title_of(info.param);
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const bool spread : {false, true}) {
    for (const int num_ranks : {1, 2, 3, 4, 8})
      all.push_back({.num_ranks = num_ranks, .hidden_size = 128, .spread = spread});
    for (const int hidden_size : {7, 2048, 2880, 7168, 8200})
      all.push_back({.hidden_size = hidden_size, .max_tokens = 20, .spread = spread});
    for (const int top_k : {1, 2, 9, 16, 22})
      all.push_back({.num_ranks = 3, .hidden_size = 64, .top_k = top_k, .num_experts = 29, .spread = spread});
    for (const Dtype dtype : {Dtype::kF16, Dtype::kF32})
      all.push_back({.hidden_size = 520, .dtype = dtype, .spread = spread});
    all.push_back({.hidden_size = 2048, .format = DispatchFormat::kFp8Block128, .spread = spread});
    // Many tokens for the blocks there are, so that rows move in bulk: rows of 512 bytes and of 2000.
    all.push_back({.hidden_size = 256, .max_tokens = 1500, .spread = spread});
    all.push_back({.num_ranks = 4, .hidden_size = 1000, .max_tokens = 600, .spread = spread});
    all.push_back({.num_ranks = 2, .hidden_size = 512, .spread = spread, .kind = support::RankKind::kProcesses});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, HighThroughputOnGpu, testing::ValuesIn(shapes()), title);

}  // namespace
}  // namespace tokenyard::gpu_tests
