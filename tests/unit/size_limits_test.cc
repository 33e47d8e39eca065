// SPDX-License-Identifier: Apache-2.0
// Params and configs whose sizes no memory can have: their products are refused with the values, and never wrap.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>

#include "tokenyard/communication.h"

#include "protocol/owner.h"
#include "support/backends.h"
#include "support/round.h"
#include "support/world.h"
#include "unit/refusals.h"

namespace tokenyard {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
constexpr int kLargestInt = std::numeric_limits<int>::max();

constexpr MoeParams kLayer{.num_experts = 8, .top_k = 2, .hidden_size = 64, .max_tokens_per_rank = 128};

void expect_no_size(const MoeParams& params, const BackendConfig& config, int num_ranks, const std::string& part) {
  expect_refused([&] { (void)window_bytes(params, config, num_ranks); }, part);
  expect_refused([&] { (void)output_bytes(params, config, num_ranks); }, part);
}

TEST(SizeLimits, ExtrasThatNoWindowCanHold) {
  for (const std::int64_t extra : {kLargest, kLargest / 64, kMaxTensorBytes, kMaxTensorBytes / 512}) {
    const std::array<BackendConfig, 2> configs{
        AllGatherConfig{.extra_payload_bytes_per_token = extra},
        OneSidedConfig{
            .extra_payload_bytes_per_token = extra, .eplb_stats_num_experts = 0, .use_low_precision_combine = false}};
    for (const BackendConfig& config : configs) {
      expect_no_size(kLayer, config, 4, std::to_string(extra));
    }
  }
  expect_refused(
      [] {
        (void)create_communication(Group::in_process(1).front(), kLayer,
                                   AllGatherConfig{.extra_payload_bytes_per_token = kLargest});
      },
      std::to_string(kLargest));
}

// 512 rows, so 2^47 bytes each; a row itself takes far less than 2^20.
TEST(SizeLimits, TheLargestWindowThereIs) {
  const AllGatherConfig most{.extra_payload_bytes_per_token = kMaxTensorBytes / 512 - (1 << 20)};
  EXPECT_GT(window_bytes(kLayer, most, 4), kMaxTensorBytes - (std::int64_t{1} << 30));
  EXPECT_LE(window_bytes(kLayer, most, 4), kMaxTensorBytes);
}

TEST(SizeLimits, RowsThatNoWindowCanHold) {
  MoeParams params = kLayer;
  params.hidden_size = kLargestInt;
  params.max_tokens_per_rank = 2'000'000;
  params.dtype = Dtype::kF32;
  for (const BackendConfig& config :
       {BackendConfig(HighThroughputConfig{}), BackendConfig(LowLatencyConfig{}), BackendConfig(OneSidedConfig{}),
        BackendConfig(AllGatherConfig{}), BackendConfig(TwoSidedConfig{})}) {
    expect_no_size(params, config, 1024, "hidden_size 2147483647");
  }
}

TEST(SizeLimits, QueuesThatNoWindowCanHold) {
  for (const std::int64_t bytes : {kLargest, kLargest / 64, kMaxTensorBytes / 2}) {
    expect_no_size(kLayer, TwoSidedConfig{.queue_bytes_per_peer = bytes}, 1, std::to_string(bytes));
  }
  EXPECT_LE(window_bytes(kLayer, TwoSidedConfig{.queue_bytes_per_peer = kMaxTensorBytes / 4}, 1), kMaxTensorBytes);
}

// Rows of combine are larger than 2^56 bytes together, but they cross in queues.
TEST(SizeLimits, QueuesCarryMoreThanAWindowCanHold) {
  const MoeParams params{.num_experts = 128,
                         .top_k = 4,
                         .hidden_size = 50'000'000,
                         .max_tokens_per_rank = kLargestInt,
                         .dispatch_format = DispatchFormat::kNvfp4};
  EXPECT_LT(window_bytes(params, TwoSidedConfig{}, 1), std::int64_t{1} << 30);
  expect_no_size(params, OneSidedConfig{}, 1, "hidden_size 50000000");
}

// The window does not grow with the experts, but the results of low_latency do.
TEST(SizeLimits, ResultsThatNoMemoryCanHold) {
  MoeParams params{.num_experts = 1 << 25, .top_k = 2, .hidden_size = 1024, .max_tokens_per_rank = 1 << 20};
  expect_no_size(params, LowLatencyConfig{}, 1, "num_experts 33554432");
  expect_refused([&] { (void)create_communication(Group::in_process(1).front(), params, "low_latency"); },
                 "num_experts 33554432");
  params.num_experts = kLargestInt;
  expect_no_size(params, LowLatencyConfig{}, 1, "num_experts 2147483647");
  params.num_experts = 1 << 23;
  EXPECT_GT(output_bytes(params, LowLatencyConfig{}, 1), std::int64_t{1} << 54);
  EXPECT_LE(output_bytes(params, LowLatencyConfig{}, 1), kMaxTensorBytes);
}

TEST(SizeLimits, GrowthBeyondEverything) {
  Communication communication = create_communication(Group::in_process(1).front(), kLayer, "one_sided");
  expect_refused([&] { communication.get<Growth>()->reserve(kLayer, kLargest); }, std::to_string(kLargest));
}

// 2^16 rows, or rows of 2^45 bytes, but not both. The old window stays.
TEST(SizeLimits, GrowthToMoreThanWhatWasAskedFor) {
  support::WorldSpec spec{.params = {.num_experts = 8, .top_k = 2, .hidden_size = 1, .max_tokens_per_rank = 1 << 16},
                          .num_tokens = {9}};
  const support::World world = support::make_world(spec);
  Communication communication = support::communication_for(Group::in_process(1).front(), "one_sided", spec);
  const std::int64_t before = communication.window_bytes();
  MoeParams one_token = spec.params;
  one_token.max_tokens_per_rank = 1;
  expect_refused([&] { communication.get<Growth>()->reserve(one_token, std::int64_t{1} << 45); },
                 "max_tokens_per_rank 65536");
  EXPECT_EQ(communication.window_bytes(), before);
  DispatchResult result;
  EXPECT_NO_THROW((void)support::play_round(communication, world, {}, result));
}

TEST(SizeLimits, FormatsAndDtypesThatDoNotExist) {
  MoeParams params = kLayer;
  params.dispatch_format = static_cast<DispatchFormat>(6);
  expect_refused([&] { validate(params); }, "dispatch_format is 6");
  params.dispatch_format = DispatchFormat::kNone;
  for (const int dtype : {9, 255}) {
    params.dtype = static_cast<Dtype>(dtype);
    expect_refused([&] { validate(params); }, "must be bf16, f16 or f32");
  }
}

TEST(SizeLimits, OwnersOfAsManyExpertsAsAnIntCounts) {
  EXPECT_EQ(protocol::owner_of(kLargestInt, 1, kLargestInt - 1), 0);
  EXPECT_EQ(protocol::owner_of(kLargestInt, 2, kLargestInt / 2), 0);
  EXPECT_EQ(protocol::owner_of(kLargestInt, 2, kLargestInt / 2 + 1), 1);
  EXPECT_EQ(protocol::owner_of(kLargestInt, 1024, kLargestInt - 1), 1023);
}

TEST(SizeLimits, ExpertsOfRanksThatThereAreNot) {
  for (const int num_ranks : {0, -1, std::numeric_limits<int>::min()}) {
    expect_refused([&] { (void)num_local_experts(kLayer, 0, num_ranks); }, "num_ranks is " + std::to_string(num_ranks));
    expect_refused([&] { (void)first_local_expert(kLayer, 0, num_ranks); },
                   "num_ranks is " + std::to_string(num_ranks));
  }
  for (const int rank : {-1, 3, kLargestInt}) {
    expect_refused([&] { (void)num_local_experts(kLayer, rank, 3); }, "rank is " + std::to_string(rank));
    expect_refused([&] { (void)first_local_expert(kLayer, rank, 3); }, "rank is " + std::to_string(rank));
  }
  EXPECT_EQ(num_local_experts(kLayer, 2, 3), 2);
  EXPECT_EQ(first_local_expert(kLayer, 2, 3), 6);
}

TEST(SizeLimits, TensorsLargerThanAnyMemory) {
  expect_refused(
      [] {
        (void)TensorView(nullptr, Dtype::kF32, {std::int64_t{1} << 40, std::int64_t{1} << 40});
      },
      "larger than any memory");
  EXPECT_EQ(TensorView(nullptr, Dtype::kU8, {0, kMaxTensorBytes}).row_bytes(), kMaxTensorBytes);
  std::array<std::byte, 4> memory{};
  const TensorView view(memory.data(), Dtype::kU8, {4, 1});
  expect_refused([&] { (void)view.rows(1, kLargest); }, "not inside");
}

}  // namespace
}  // namespace tokenyard
