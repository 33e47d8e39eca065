// SPDX-License-Identifier: Apache-2.0
// Combine on GPUs with many tokens for each block, so that rows are staged and pulled in bulk: of every backend that
// does, every kind of rows, output and biases, and any number of multiprocessors, against the plain reference.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <ostream>
#include <string>
#include <variant>
#include <vector>

#include "tokenyard/backends.h"

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

struct Case {
  BackendConfig backend;
  Shape shape;
};

std::string title_of(const Case& of) {
  return std::string(find_backend(of.backend).name) + "_" + gpu_tests::title_of(of.shape);
}

std::ostream& operator<<(std::ostream& out, const Case& of) {
  return out << title_of(of);
}

class BulkCombineOnGpu : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam().shape); }
};

void play(const Case& of, const Way& way, std::uint64_t seed) {
  const Shape& shape = of.shape;
  BackendConfig config = of.backend;
  if (auto* one_sided = std::get_if<OneSidedConfig>(&config)) one_sided->use_low_precision_combine = way.low_precision;
  const bool final_places = std::holds_alternative<HighThroughputConfig>(config);
  run_on_devices(shape, config, {.zero_copy = way.zero_copy, .halves = way.halves, .num_sms = way.num_sms},
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
                                                   .weights_back = final_places && seed % 2 == 0,
                                                   .num_biases = final_places ? way.num_biases : 0};
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
      {.num_sms = 16, .num_biases = 1, .low_precision = true, .halves = true},
  }};
  for (std::size_t i = 0; i < ways.size(); ++i) {
    SCOPED_TRACE("way " + std::to_string(i));
    play(GetParam(), ways.at(i), i + 1);
  }
}

std::string title(const testing::TestParamInfo<Case>& info) {
  return title_of(info.param);
}

std::vector<Shape> shapes(int tokens) {
  std::vector<Shape> all;
  for (const bool spread : {false, true}) {
    for (const int num_ranks : {2, 8})
      all.push_back({.num_ranks = num_ranks, .hidden_size = 512, .max_tokens = tokens, .spread = spread});
    // More owners of a token than a warp has stages; and slices that are not of one width.
    all.push_back({.num_ranks = 20, .hidden_size = 272, .top_k = 22, .max_tokens = tokens, .spread = spread});
    all.push_back({.hidden_size = 7184, .max_tokens = tokens, .spread = spread});
    all.push_back({.hidden_size = 1040, .max_tokens = tokens, .dtype = Dtype::kF32, .spread = spread});
    all.push_back({.hidden_size = 2064, .max_tokens = tokens, .dtype = Dtype::kF16, .spread = spread});
  }
  return all;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::array<BackendConfig, 3> backends{OneSidedConfig{}, HighThroughputConfig{}, AllGatherConfig{}};
  for (const BackendConfig& backend : backends) {
    // Up to 512 tokens are a small round of `one_sided`.
    for (const Shape& shape : shapes(std::holds_alternative<OneSidedConfig>(backend) ? 520 : 150))
      all.push_back({backend, shape});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, BulkCombineOnGpu, testing::ValuesIn(cases()), title);

}  // namespace
}  // namespace tokenyard::gpu_tests
