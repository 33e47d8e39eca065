// SPDX-License-Identifier: Apache-2.0
// `one_sided` on GPUs: every round against the plain reference, byte for byte, as the host engine is checked.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/device_ranks.h"

namespace tokenyard::gpu_tests {
namespace {

using support::RoundPlan;
using support::Skew;
using support::World;

class OneSidedOnGpu : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam()); }
};

TEST_P(OneSidedOnGpu, RoundsEqualTheReference) {
  const Shape shape = GetParam();
  run_on_devices(shape,
                 OneSidedConfig{.extra_payload_bytes_per_token = 40, .eplb_stats_num_experts = shape.num_experts}, {},
                 [&](Communication& communication, DeviceRounds& rounds) {
                   DispatchResult result;
                   // The reference takes long for many tokens.
                   const int num_rounds = shape.max_tokens > 500 ? 3 : 2 * support::kNumSkews;
                   for (int round = 0; round < num_rounds; ++round) {
                     const bool odd = round % 2 == 1;
                     const World world = support::make_world({.params = params_of(shape),
                                                              .num_ranks = shape.num_ranks,
                                                              .skew = static_cast<Skew>(round % support::kNumSkews),
                                                              .id_dtype = odd ? Dtype::kI64 : Dtype::kI32,
                                                              .extra_row_bytes = {24, 7},
                                                              .eplb_entries = shape.num_experts,
                                                              .seed = static_cast<std::uint64_t>(round) + 11});
                     RoundPlan plan{.seed = static_cast<std::uint64_t>(round) + 5,
                                    .expert_dtype = shape.dtype,
                                    .output_dtype = odd ? Dtype::kF32 : shape.dtype,
                                    .strided = round % 3 == 1,
                                    .caller_tensors = round % 4 == 2,
                                    .flat_expert_output = round % 5 == 3};
                     play_round(communication, world, rounds.through_device(plan), result);
                   }
                 });
}

TEST_P(OneSidedOnGpu, ExpertOutputMayLieInTheWindow) {
  const Shape shape = GetParam();
  run_on_devices(shape, OneSidedConfig{}, {.zero_copy = true}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (std::uint64_t seed = 1; seed <= (shape.max_tokens > 500 ? 2 : 4); ++seed) {
      const World world = support::make_world({.params = params_of(shape), .num_ranks = shape.num_ranks, .seed = seed});
      const RoundPlan plan{.seed = seed, .expert_dtype = shape.dtype, .output_dtype = shape.dtype};
      play_round(communication, world, rounds.through_device(plan), result);
    }
  });
}

TEST_P(OneSidedOnGpu, AnyNumberOfMultiprocessorsGivesTheSameBytes) {
  const Shape shape = GetParam();
  for (const int num_sms : {1, 3}) {
    run_on_devices(shape, OneSidedConfig{}, {.num_sms = num_sms},
                   [&](Communication& communication, DeviceRounds& rounds) {
                     DispatchResult result;
                     const World world =
                         support::make_world({.params = params_of(shape), .num_ranks = shape.num_ranks, .seed = 3});
                     const RoundPlan plan{.seed = 9, .expert_dtype = shape.dtype, .output_dtype = shape.dtype};
                     play_round(communication, world, rounds.through_device(plan), result);
                   });
  }
}

std::string title(const testing::TestParamInfo<Shape>& info) {
  return title_of(info.param);
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const bool spread : {false, true}) {
    for (const int num_ranks : {1, 2, 3, 4, 8, 16})
      all.push_back({.num_ranks = num_ranks, .hidden_size = 128, .spread = spread});
    for (const int hidden_size : {7, 2048, 2880, 7168, 8192, 16384})
      all.push_back({.hidden_size = hidden_size, .max_tokens = 20, .spread = spread});
    for (const int top_k : {1, 2, 9, 16, 22})
      all.push_back({.num_ranks = 3, .hidden_size = 64, .top_k = top_k, .num_experts = 29, .spread = spread});
    for (const Dtype dtype : {Dtype::kF16, Dtype::kF32})
      all.push_back({.hidden_size = 520, .dtype = dtype, .spread = spread});
    // Many tokens for the blocks there are, so that rows move in bulk: rows of 2000 bytes, and of one stage and 16
    // bytes.
    all.push_back({.hidden_size = 256, .max_tokens = 1500, .spread = spread});
    all.push_back({.num_ranks = 4, .hidden_size = 1000, .max_tokens = 600, .spread = spread});
    all.push_back({.hidden_size = 8200, .max_tokens = 530, .spread = spread});
    for (const int num_ranks : {2, 4})
      all.push_back(
          {.num_ranks = num_ranks, .hidden_size = 512, .spread = spread, .kind = support::RankKind::kProcesses});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, OneSidedOnGpu, testing::ValuesIn(shapes()), title);

}  // namespace
}  // namespace tokenyard::gpu_tests
