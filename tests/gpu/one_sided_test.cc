// SPDX-License-Identifier: Apache-2.0
// `one_sided` on GPUs: every round against the plain reference, byte for byte, as the host engine is checked.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/device_round.h"
#include "support/check.h"
#include "support/run_ranks.h"

namespace tokenyard::gpu_tests {
namespace {

using support::RoundPlan;
using support::Skew;
using support::World;
using support::WorldSpec;

struct Shape {
  int num_ranks = 2;
  int hidden_size = 7168;
  int top_k = 8;
  int num_experts = 64;
  int max_tokens = 40;
  Dtype dtype = Dtype::kBf16;
  bool spread = false;  // over all devices; else all ranks share device 0
  support::RankKind kind = support::RankKind::kThreads;
};

MoeParams params_of(const Shape& shape) {
  MoeParams params;
  params.hidden_size = shape.hidden_size;
  params.num_experts = shape.num_experts;
  params.top_k = shape.top_k;
  params.max_tokens_per_rank = shape.max_tokens;
  params.dtype = shape.dtype;
  return params;
}

CommunicationOptions cuda_options(int device) {
  CommunicationOptions options = support::test_options();
  options.engine = EngineKind::kCuda;
  options.device = device;
  options.initial_epoch = 0xFFFFFFFDU;  // the epochs of a few rounds wrap
  return options;
}

using Body = std::function<void(Communication&, DeviceRounds&)>;

// Runs `body` on every rank with a communication of its own. The parent touches no device: ranks may be forked.
void run_on_devices(const Shape& shape,
                    const OneSidedConfig& config,
                    const DeviceRounds::Options& wanted,
                    const Body& body) {
  support::run(shape.kind, shape.num_ranks,
               [&](const Group& group) {
                 std::string reason;
                 const int devices = num_devices(reason);
                 support::check(devices > 0, reason);
                 DeviceRounds::Options options = wanted;
                 options.device = shape.spread ? group.rank() % devices : 0;
                 DeviceRounds rounds(options);
                 Communication communication =
                     create_communication(group, params_of(shape), config, cuda_options(options.device));
                 body(communication, rounds);
                 support::check_ok(communication.destroy(), "destroy");
               },
               {.limit = std::chrono::seconds(120)});
}

// Asked in a process of its own, so that this one may fork.
int devices_there() {
  static const int count = [] {
    int seen = 0;
    try {
      support::run_processes(1, [](const Group&) {
        std::string reason;
        support::check(num_devices(reason) > 0, reason);
      });
      seen = 1;
    } catch (const std::exception&) {
      return 0;
    }
    try {
      support::run_processes(1, [](const Group&) {
        std::string reason;
        support::check(num_devices(reason) > 1, "one device");
      });
      seen = 2;
    } catch (const std::exception&) {
      return seen;
    }
    return seen;
  }();
  return count;
}

class OneSidedOnGpu : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    if (devices_there() == 0) GTEST_SKIP() << "no CUDA device";
    if (GetParam().spread && devices_there() < 2) GTEST_SKIP() << "one CUDA device only";
  }
};

TEST_P(OneSidedOnGpu, RoundsEqualTheReference) {
  const Shape shape = GetParam();
  run_on_devices(shape, {.extra_payload_bytes_per_token = 40, .eplb_stats_num_experts = shape.num_experts}, {},
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
  run_on_devices(shape, {}, {.zero_copy = true}, [&](Communication& communication, DeviceRounds& rounds) {
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
    run_on_devices(shape, {}, {.num_sms = num_sms}, [&](Communication& communication, DeviceRounds& rounds) {
      DispatchResult result;
      const World world = support::make_world({.params = params_of(shape), .num_ranks = shape.num_ranks, .seed = 3});
      const RoundPlan plan{.seed = 9, .expert_dtype = shape.dtype, .output_dtype = shape.dtype};
      play_round(communication, world, rounds.through_device(plan), result);
    });
  }
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  return out << shape.num_ranks << " ranks";
}

std::string title(const testing::TestParamInfo<Shape>& info) {
  const Shape& shape = info.param;
  std::string text = std::to_string(shape.num_ranks) + "_ranks_hidden_" + std::to_string(shape.hidden_size) + "_top_" +
                     std::to_string(shape.top_k) + "_of_" + std::to_string(shape.num_experts) + "_";
  text.append(name(shape.dtype)).append(shape.spread ? "_spread" : "_shared").append("_").append(name(shape.kind));
  return text;
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const bool spread : {false, true}) {
    for (const int num_ranks : {1, 2, 3, 4, 8})
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
