// SPDX-License-Identifier: Apache-2.0
// What each manager takes and what it makes of it, and the knobs that come from the environment.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "manager/manager_setup.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::manager_tests {
namespace {

using manager::Asked;
using manager::Scheme;
using manager::Strategy;
using manager::Wanted;
using support::check_throws;

const Strategy& strategy_named(std::string_view backend) {
  return *std::ranges::find(manager::strategies(), backend, &Strategy::backend);
}

bool built(std::string_view backend) {
  return std::ranges::any_of(backends(), [&](const BackendInfo& info) { return info.name == backend; });
}

// As vLLM asks: rank 2 of 4, ten experts, of which ranks 0 and 1 have three.
constexpr HandleRequest kSeedRequest{.max_num_tokens_per_dp_rank = 128,
                                     .token_hidden_size = 2048,
                                     .num_ep_ranks = 4,
                                     .num_global_experts = 10,
                                     .num_local_experts = 2};

Asked asked(const HandleRequest& request) {
  return {.request = request,
          .params = {.top_k = 6, .dtype = Dtype::kF16},
          .config = LowLatencyConfig{},
          .rank = 2,
          .num_ranks = 4};
}

TEST(Strategies, EveryBackendOfTheBuildHasOne) {
  for (const BackendInfo& info : backends())
    EXPECT_NO_THROW((void)manager::strategy_of(info)) << info.name;
  BackendInfo unknown = backends().front();
  unknown.name = "later";
  check_throws(ErrorCode::kUnsupported, {"`later` has no manager", "create_communication"},
               [&] { (void)manager::strategy_of(unknown); });
}

TEST(LowLatencyStrategy, TurnsTheSeedsArgumentsIntoParams) {
  const Wanted wanted = strategy_named("low_latency").wanted(asked(kSeedRequest));
  EXPECT_EQ(wanted.params.max_tokens_per_rank, 128);
  EXPECT_EQ(wanted.params.hidden_size, 2048);
  EXPECT_EQ(wanted.params.num_experts, 10);
  EXPECT_EQ(wanted.params.top_k, 6);
  EXPECT_EQ(wanted.params.dtype, Dtype::kF16);
  EXPECT_TRUE(std::holds_alternative<LowLatencyConfig>(wanted.config));
  HandleRequest other = kSeedRequest;
  other.top_k = 3;
  EXPECT_EQ(strategy_named("low_latency").wanted(asked(other)).params.top_k, 3);
}

TEST(LowLatencyStrategy, ArgumentsMustFitTheGroup) {
  const auto wanted = [](auto&& change) {
    Asked given = asked(kSeedRequest);
    change(given);
    (void)strategy_named("low_latency").wanted(given);
  };
  check_throws(ErrorCode::kInvalidArgument, {"num_ep_ranks is 8", "must be 4"},
               [&] { wanted([](Asked& given) { given.request.num_ep_ranks = 8; }); });
  check_throws(ErrorCode::kInvalidArgument, {"num_local_experts is 3", "must be 2", "num_global_experts = 10"},
               [&] { wanted([](Asked& given) { given.request.num_local_experts = 3; }); });
  check_throws(ErrorCode::kInvalidArgument, {"top_k is not known", "ManagerOptions::params.top_k"},
               [&] { wanted([](Asked& given) { given.params.top_k = 0; }); });
  check_throws(ErrorCode::kInvalidArgument, {"hidden_size is -1"},
               [&] { wanted([](Asked& given) { given.request.token_hidden_size = -1; }); });
}

TEST(Arguments, MissingAndUnknownOnesAreNamed) {
  const Strategy& low_latency = strategy_named("low_latency");
  EXPECT_NO_THROW(manager::check_arguments(low_latency, kSeedRequest));
  for (const manager::Argument& argument : manager::handle_arguments()) {
    HandleRequest request = kSeedRequest;
    (request.*argument.member).reset();
    if (argument.name == "top_k") {
      EXPECT_NO_THROW(manager::check_arguments(low_latency, request));
    } else {
      check_throws(ErrorCode::kInvalidArgument, {"get_handle of `low_latency` needs " + std::string(argument.name)},
                   [&] { manager::check_arguments(low_latency, request); });
    }
    HandleRequest one;
    one.*argument.member = 1;
    check_throws(
        ErrorCode::kInvalidArgument,
        {"get_handle of `high_throughput` takes no " + std::string(argument.name), "high_throughput_buffer_mebibytes"},
        [&] { manager::check_arguments(strategy_named("high_throughput"), one); });
  }
  EXPECT_NO_THROW(manager::check_arguments(strategy_named("high_throughput"), {}));
}

TEST(HandlesThatDoNotExist, SayWhy) {
  const auto get = [](std::string_view name) {
    (void)create_all2all_manager(name, options_for(Group::in_process(1).front())).get_handle();
  };
  check_throws(ErrorCode::kUnsupported,
               {"`passthrough` has no handle", "the MoE backend dispatches and combines tokens itself"},
               [&] { get("passthrough"); });
  check_throws(ErrorCode::kUnsupported, {"`all_gather` has no handle", "get<GatherCalls>()"},
               [&] { get("all_gather"); });
}

TEST(HighThroughputManager, IsMadeFromAByteBudget) {
  ManagerOptions options = options_for(Group::in_process(1).front());
  options.knobs = {.high_throughput_buffer_mebibytes = 2, .high_throughput_intra_host_only = true};
  All2AllManager manager = create_all2all_manager("deepep_high_throughput", options);
  const All2AllHandle handle = manager.get_handle();
  EXPECT_TRUE(handle == manager.get_handle());
  const auto& config = std::get<HighThroughputConfig>(handle.get_communication().config());
  EXPECT_EQ(config.buffer_bytes, 2 << 20);
  EXPECT_TRUE(config.intra_host_only);
  EXPECT_EQ(handle.get_communication().window_bytes(), 2 << 20);
  check_throws(ErrorCode::kInvalidArgument, {"takes no top_k"}, [&] { (void)manager.get_handle({.top_k = 1}); });
}

TEST(HighThroughputManager, KnobsBecomeTheBudget) {
  const auto with = [](const ManagerKnobs& knobs) {
    return std::get<HighThroughputConfig>(
        strategy_named("high_throughput").with_knobs(HighThroughputConfig{.max_num_sms = 7}, knobs));
  };
  const HighThroughputConfig config =
      with({.high_throughput_buffer_mebibytes = 3, .high_throughput_intra_host_only = true});
  EXPECT_EQ(config.buffer_bytes, 3 << 20);
  EXPECT_TRUE(config.intra_host_only);
  EXPECT_EQ(config.max_num_sms, 7);
  EXPECT_EQ(with({}).buffer_bytes, std::int64_t{1} << 30);
  for (const std::int64_t wrong : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 43}) {
    check_throws(ErrorCode::kInvalidArgument, {"high_throughput_buffer_mebibytes is " + std::to_string(wrong)},
                 [&] { (void)with({.high_throughput_buffer_mebibytes = wrong}); });
  }
}

// A config of the caller's own is taken as it is: here one sized by params.
TEST(HighThroughputManager, MayBeSizedByParams) {
  EXPECT_NO_THROW(support::run_ranks(3, [](const Group& group) {
    ManagerOptions options = options_for(group);
    options.params = {.num_experts = 6, .top_k = 2, .hidden_size = 24, .max_tokens_per_rank = 5};
    options.config = HighThroughputConfig{};
    All2AllManager manager = create_all2all_manager("high_throughput", options);
    const All2AllHandle handle = manager.get_handle();
    support::check_eq(handle.get_communication().params().hidden_size, 24, "hidden_size");
  }));
}

// Managers with arguments of their own, as far as this build has their backends.
class SeedManagers : public ::testing::TestWithParam<std::string_view> {};

TEST_P(SeedManagers, WorkOnEveryRank) {
  const std::string_view name = GetParam();
  EXPECT_NO_THROW(support::run_ranks(4, [&](const Group& group) {
    ManagerOptions options = options_for(group);
    options.params.top_k = 2;
    All2AllManager manager = create_all2all_manager(name, options);
    const bool by_sizes = strategy_named(name).scheme == Scheme::kBySizes;
    const HandleRequest request{.max_num_tokens_per_dp_rank = 5,
                                .token_hidden_size = 128,
                                .num_ep_ranks = 4,
                                .num_global_experts = 8,
                                .num_local_experts = 2};
    const All2AllHandle handle = manager.get_handle(by_sizes ? HandleRequest{} : request);
    support::check(handle == manager.get_handle(by_sizes ? HandleRequest{} : request), "equal requests, two handles");
    Communication& communication = by_sizes ? handle.get_communication({5, 2, 8, 128}) : handle.get_communication();
    support::check_eq(communication.backend().name, name, "the backend");
    support::check_eq(communication.params().hidden_size, 128, "hidden_size");
    support::check_eq(communication.params().num_experts, 8, "num_experts");
    const support::World world = support::make_world({.params = communication.params(), .num_ranks = 4, .seed = 21});
    DispatchResult result;
    support::play_round(communication, world, {}, result);
    support::check(manager.destroy().ok(), "destroy");
  }));
}

std::vector<std::string_view> seed_managers_of_this_build() {
  std::vector<std::string_view> names;
  for (const std::string_view name : {"low_latency", "two_sided"}) {
    if (built(name)) names.push_back(name);
  }
  return names;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SeedManagers);
INSTANTIATE_TEST_SUITE_P(Backends, SeedManagers, ::testing::ValuesIn(seed_managers_of_this_build()), [](const auto& p) {
  return std::string(p.param);
});

// One variable for the life of a test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }

  ~Variable() { ::unsetenv(name_); }

  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  Variable(Variable&&) = delete;
  Variable& operator=(Variable&&) = delete;

 private:
  const char* name_;
};

TEST(Knobs, DefaultsAreTheSeeds) {
  const ManagerKnobs knobs = knobs_from_environment();
  EXPECT_EQ(knobs.high_throughput_buffer_mebibytes, 1024);
  EXPECT_FALSE(knobs.high_throughput_intra_host_only);
  EXPECT_FALSE(knobs.one_sided_low_precision_combine);
}

TEST(Knobs, AreRead) {
  const Variable megabytes("VLLM_DEEPEP_BUFFER_SIZE_MB", "256");
  const Variable intra("VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE", "1");
  const Variable precision("VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "1");
  const ManagerKnobs knobs = knobs_from_environment();
  EXPECT_EQ(knobs.high_throughput_buffer_mebibytes, 256);
  EXPECT_TRUE(knobs.high_throughput_intra_host_only);
  EXPECT_TRUE(knobs.one_sided_low_precision_combine);
  EXPECT_EQ(ManagerOptions{.group = Group::in_process(1).front()}.knobs.high_throughput_buffer_mebibytes, 1024)
      << "only knobs_from_environment reads the environment";
}

TEST(Knobs, ValuesThatAreNoneAreNamed) {
  for (const char* wrong : {"", "many", "12x", "0", "-5", "9000000000000"}) {
    const Variable megabytes("VLLM_DEEPEP_BUFFER_SIZE_MB", wrong);
    check_throws(ErrorCode::kInvalidArgument, {"VLLM_DEEPEP_BUFFER_SIZE_MB is `" + std::string(wrong) + "`"},
                 [] { (void)knobs_from_environment(); });
  }
  for (const char* wrong : {"", "yes", "2", "-1"}) {
    const Variable intra("VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE", wrong);
    check_throws(ErrorCode::kInvalidArgument,
                 {"VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE is `" + std::string(wrong) + "`", "[0, 1]"},
                 [] { (void)knobs_from_environment(); });
  }
}

}  // namespace
}  // namespace tokenyard::manager_tests
