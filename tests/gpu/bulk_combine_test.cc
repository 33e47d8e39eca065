// SPDX-License-Identifier: Apache-2.0
// Combine of `one_sided` on GPUs with many tokens for each block, so that rows are pulled in bulk: every kind of rows,
// output and biases, and any number of multiprocessors, against the plain reference.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu/device_ranks.h"

namespace tokenyard::gpu_tests {
namespace {

struct Way {
  int num_sms = 0;
  int num_biases = 0;
  bool zero_copy = false;  // expert output lies where combine reads it
  bool wide = false;       // output in f32
  bool low_precision = false;
  bool halves = false;
};

class BulkCombineOnGpu : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam()); }
};

void play(const Shape& shape, const Way& way, std::uint64_t seed) {
  run_on_devices(shape, OneSidedConfig{.use_low_precision_combine = way.low_precision},
                 {.zero_copy = way.zero_copy, .halves = way.halves, .num_sms = way.num_sms},
                 [&](Communication& communication, DeviceRounds& rounds) {
                   DispatchResult result;
                   for (std::uint64_t round = 0; round < 2; ++round) {
                     const support::World world =
                         support::make_world({.params = params_of(shape),
                                              .num_ranks = shape.num_ranks,
                                              .skew = static_cast<support::Skew>((seed + round) % support::kNumSkews),
                                              .seed = seed * 8 + round});
                     const support::RoundPlan plan{.seed = seed + round,
                                                   .expert_dtype = shape.dtype,
                                                   .output_dtype = way.wide ? Dtype::kF32 : shape.dtype,
                                                   .num_biases = way.num_biases};
                     play_round(communication, world, rounds.through_device(plan), result);
                   }
                 });
}

TEST_P(BulkCombineOnGpu, SumsEqualTheReference) {
  const std::array<Way, 6> ways{{
      {.num_sms = 16, .num_biases = 1, .zero_copy = true},
      {.num_sms = 16, .num_biases = 2},
      {.num_sms = 3, .num_biases = 2, .zero_copy = true, .wide = true},
      {.num_sms = 1, .zero_copy = true, .halves = true},
      {.num_sms = 3, .wide = true, .low_precision = true},
      {.num_sms = 16, .num_biases = 1, .low_precision = true},
  }};
  for (std::size_t i = 0; i < ways.size(); ++i) {
    SCOPED_TRACE("way " + std::to_string(i));
    play(GetParam(), ways.at(i), i + 1);
  }
}

std::string title(const testing::TestParamInfo<Shape>& info) {
  return title_of(info.param);
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const bool spread : {false, true}) {
    for (const int num_ranks : {2, 4, 8})
      all.push_back({.num_ranks = num_ranks, .hidden_size = 512, .max_tokens = 600, .spread = spread});
    // More owners of a token than a warp has stages; and slices that are not of one width.
    all.push_back({.num_ranks = 20, .hidden_size = 272, .top_k = 22, .max_tokens = 520, .spread = spread});
    all.push_back({.hidden_size = 7184, .max_tokens = 520, .spread = spread});
    all.push_back({.hidden_size = 1040, .max_tokens = 600, .dtype = Dtype::kF32, .spread = spread});
    all.push_back({.hidden_size = 2064, .max_tokens = 600, .dtype = Dtype::kF16, .spread = spread});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, BulkCombineOnGpu, testing::ValuesIn(shapes()), title);

}  // namespace
}  // namespace tokenyard::gpu_tests
