// SPDX-License-Identifier: Apache-2.0
// `all_gather` on GPUs: every round against the plain reference, byte for byte, as the host engine is checked.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/device_ranks.h"

namespace tokenyard::gpu_tests {
namespace {

using support::RoundPlan;
using support::Skew;
using support::World;
using support::WorldSpec;

constexpr AllGatherConfig kConfig{.extra_payload_bytes_per_token = 31};

WorldSpec spec_of(const Shape& shape, std::uint64_t seed) {
  return {.params = params_of(shape),
          .num_ranks = shape.num_ranks,
          .skew = static_cast<Skew>(seed % support::kNumSkews),
          .id_dtype = seed % 2 == 1 ? Dtype::kI64 : Dtype::kI32,
          .extra_row_bytes = {24, 7},
          .router_columns = seed % 3 == 0 ? shape.num_experts : 0,
          .seed = seed};
}

// The reference takes long for many tokens.
int rounds_of(const Shape& shape, int num_rounds) {
  return shape.max_tokens > 500 || shape.kind == support::RankKind::kProcesses ? 3 : num_rounds;
}

class AllGatherOnGpu : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam()); }
};

TEST_P(AllGatherOnGpu, RoundsEqualTheReference) {
  const Shape shape = GetParam();
  run_on_devices(shape, kConfig, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < rounds_of(shape, 12); ++round) {
      const World world = support::make_world(spec_of(shape, static_cast<std::uint64_t>(round) + 11));
      const bool odd = round % 2 == 1;
      const RoundPlan plan{.seed = static_cast<std::uint64_t>(round) + 5,
                           .expert_dtype = round % 4 == 3 ? Dtype::kF32 : shape.dtype,
                           .output_dtype = odd ? Dtype::kF32 : shape.dtype,
                           .strided = round % 3 == 1,
                           .caller_tensors = round % 4 == 2,
                           .tell_num_tokens = round % 3 != 0};
      play_round(communication, world, rounds.through_device(plan), result);
    }
  });
}

TEST_P(AllGatherOnGpu, ExpertOutputMayLieInTheWindow) {
  const Shape shape = GetParam();
  run_on_devices(shape, kConfig, {.zero_copy = true}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < rounds_of(shape, 4); ++round) {
      WorldSpec spec = spec_of(shape, static_cast<std::uint64_t>(round) + 1);
      // The window has room for expert output when all ranks bring as much.
      if (round % 4 != 3) spec.num_tokens.assign(static_cast<std::size_t>(shape.num_ranks), shape.max_tokens - round);
      const World world = support::make_world(spec);
      const RoundPlan plan{.seed = spec.seed,
                           .expert_dtype = shape.dtype,
                           .output_dtype = shape.dtype,
                           .tell_num_tokens = round % 2 == 0};
      play_round(communication, world, rounds.through_device(plan), result);
    }
  });
}

TEST_P(AllGatherOnGpu, AnyNumberOfMultiprocessorsGivesTheSameBytes) {
  const Shape shape = GetParam();
  for (const int num_sms : {1, 3}) {
    run_on_devices(shape, kConfig, {.num_sms = num_sms}, [&](Communication& communication, DeviceRounds& rounds) {
      DispatchResult result;
      for (const bool told : {false, true}) {
        const World world = support::make_world(spec_of(shape, 3));
        const RoundPlan plan{
            .seed = 9, .expert_dtype = shape.dtype, .output_dtype = shape.dtype, .tell_num_tokens = told};
        play_round(communication, world, rounds.through_device(plan), result);
      }
    });
  }
}

TEST_P(AllGatherOnGpu, PhasesMayGoInHalves) {
  const Shape shape = GetParam();
  run_on_devices(shape, kConfig, {.halves = true}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < rounds_of(shape, 4); ++round) {
      const World world = support::make_world(spec_of(shape, static_cast<std::uint64_t>(round) + 21));
      const RoundPlan plan{.seed = 4,
                           .expert_dtype = shape.dtype,
                           .output_dtype = shape.dtype,
                           .caller_tensors = round == 1,
                           .tell_num_tokens = round % 2 == 0};
      play_round(communication, world, rounds.through_device(plan), result);
    }
  });
}

std::string title(const testing::TestParamInfo<Shape>& info) {
  return title_of(info.param);
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const bool spread : {false, true}) {
    for (const int num_ranks : {1, 2, 3, 4, 8})
      all.push_back({.num_ranks = num_ranks, .hidden_size = 128, .spread = spread});
    for (const int hidden_size : {7, 2048, 2880, 7168, 16384})
      all.push_back({.hidden_size = hidden_size, .max_tokens = 20, .spread = spread});
    for (const Dtype dtype : {Dtype::kF16, Dtype::kF32})
      all.push_back({.hidden_size = 520, .dtype = dtype, .spread = spread});
    // Many tokens for the blocks there are, so that rows move in bulk: dense ones, and odd ones beside them.
    all.push_back({.hidden_size = 256, .max_tokens = 1500, .spread = spread});
    all.push_back({.num_ranks = 4, .hidden_size = 1001, .max_tokens = 600, .spread = spread});
    all.push_back({.hidden_size = 8200, .max_tokens = 530, .spread = spread});
    for (const int num_ranks : {2, 4})
      all.push_back(
          {.num_ranks = num_ranks, .hidden_size = 512, .spread = spread, .kind = support::RankKind::kProcesses});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, AllGatherOnGpu, testing::ValuesIn(shapes()), title);

}  // namespace
}  // namespace tokenyard::gpu_tests
