// SPDX-License-Identifier: Apache-2.0
// Windows in host memory that all devices map, for devices without peer access: the same rounds, by every backend.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <tuple>

#include "gpu/device_ranks.h"
#include "support/backends.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using support::check;

support::World world_of(const Shape& shape, std::uint64_t seed) {
  return support::make_world({.params = params_of(shape),
                              .num_ranks = shape.num_ranks,
                              .skew = static_cast<support::Skew>(seed % support::kNumSkews),
                              .seed = seed});
}

// Few tokens, and more than bulk copies begin with.
class MappedHostOnGpu : public testing::TestWithParam<std::tuple<std::string_view, int, bool>> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(shape()); }

  [[nodiscard]] static Shape shape() {
    return {.num_ranks = 2,
            .hidden_size = 256,
            .max_tokens = std::get<int>(GetParam()),
            .spread = std::get<bool>(GetParam())};
  }
};

TEST_P(MappedHostOnGpu, RoundsEqualTheReference) {
  run_with_devices(shape(), [](const Group& group, int device) {
    DeviceRounds rounds({.device = device});
    CommunicationOptions options = cuda_options(device);
    options.allow_mapped_host = true;
    std::string said;
    options.log = [&said](LogLevel level, std::string_view line) {
      if (level == LogLevel::kInfo) said += line;
    };
    const support::World first = world_of(shape(), 1);
    Communication communication = create_communication(
        group, params_of(shape()), support::config_for(std::get<std::string_view>(GetParam()), first.spec), options);
    check(said.find("in mapped host memory") != std::string::npos, "the log says only: " + said);
    DispatchResult result;
    for (std::uint64_t seed = 1; seed <= 6; ++seed) {
      const support::RoundPlan plan{.seed = seed, .expert_dtype = shape().dtype, .output_dtype = shape().dtype};
      play_round(communication, world_of(shape(), seed), rounds.through_device(plan), result);
    }
    support::check_ok(communication.destroy(), "destroy");
  });
}

TEST_P(MappedHostOnGpu, AllRanksAskForThemOrNone) {
  run_with_devices(shape(), [](const Group& group, int device) {
    CommunicationOptions options = cuda_options(device);
    options.allow_mapped_host = group.rank() == 0;
    const support::World first = world_of(shape(), 1);
    support::check_throws(ErrorCode::kMismatch, {"allow_mapped_host"}, [&] {
      static_cast<void>(create_communication(
          group, params_of(shape()), support::config_for(std::get<std::string_view>(GetParam()), first.spec), options));
    });
  });
}

std::string title(const testing::TestParamInfo<MappedHostOnGpu::ParamType>& of) {
  const auto& [backend, tokens, spread] = of.param;
  return std::string(backend) + "_" + std::to_string(tokens) + "_tokens" + (spread ? "_spread" : "_shared");
}

INSTANTIATE_TEST_SUITE_P(
    Backends,
    MappedHostOnGpu,
    testing::Combine(testing::Values("all_gather", "high_throughput", "low_latency", "one_sided", "two_sided"),
                     testing::Values(40, 600),
                     testing::Bool()),
    title);

}  // namespace
}  // namespace tokenyard::gpu_tests
