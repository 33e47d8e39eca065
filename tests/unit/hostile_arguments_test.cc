// SPDX-License-Identifier: Apache-2.0
// Numbers that fuzzing found: each was multiplied, or used as an index, before it was refused.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tokenyard/communication.h"

#include "protocol/owner.h"
#include "support/backends.h"
#include "support/round.h"
#include "support/world.h"

namespace tokenyard {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

constexpr MoeParams kLayer{.num_experts = 8, .top_k = 2, .hidden_size = 64, .max_tokens_per_rank = 128};

void expect_refused(const std::function<void()>& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "accepted, expected: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(HostileArguments, ExtrasThatNoWindowCanHold) {
  for (const std::int64_t extra : {kLargest, kLargest / 64, kMaxTensorBytes}) {
    const std::array<BackendConfig, 2> configs{
        AllGatherConfig{.extra_payload_bytes_per_token = extra},
        OneSidedConfig{
            .extra_payload_bytes_per_token = extra, .eplb_stats_num_experts = 0, .use_low_precision_combine = false}};
    for (const BackendConfig& config : configs) {
      expect_refused([&] { (void)window_bytes(kLayer, config, 4); }, std::to_string(extra));
      expect_refused([&] { (void)output_bytes(kLayer, config, 4); }, std::to_string(extra));
      expect_refused([&] { (void)create_communication(Group::in_process(1).front(), kLayer, config); },
                     std::to_string(extra));
    }
  }
}

TEST(HostileArguments, RowsThatNoWindowCanHold) {
  MoeParams params = kLayer;
  params.hidden_size = std::numeric_limits<int>::max();
  params.max_tokens_per_rank = 2'000'000;
  params.dtype = Dtype::kF32;
  expect_refused([&] { (void)window_bytes(params, HighThroughputConfig{}, 1024); }, "larger than any memory");
}

TEST(HostileArguments, GrowthBeyondEverything) {
  Communication communication = create_communication(Group::in_process(1).front(), kLayer, "one_sided");
  expect_refused([&] { communication.get<Growth>()->reserve(kLayer, kLargest); }, std::to_string(kLargest));
}

TEST(HostileArguments, FormatsThatDoNotExist) {
  MoeParams params = kLayer;
  params.dispatch_format = static_cast<DispatchFormat>(6);
  expect_refused([&] { validate(params); }, "dispatch_format is 6");
}

TEST(HostileArguments, OwnersOfAsManyExpertsAsAnIntCounts) {
  constexpr int kMost = std::numeric_limits<int>::max();
  EXPECT_EQ(protocol::owner_of(kMost, 1, kMost - 1), 0);
  EXPECT_EQ(protocol::owner_of(kMost, 2, kMost / 2), 0);
  EXPECT_EQ(protocol::owner_of(kMost, 2, kMost / 2 + 1), 1);
  EXPECT_EQ(protocol::owner_of(kMost, 1024, kMost - 1), 1023);
}

TEST(HostileArguments, TensorsLargerThanAnyMemory) {
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

// One dimension more is a dimension for the source rank, which only rank-major results have.
TEST(HostileArguments, OutputsWithADimensionForRanksThatTheResultHasNot) {
  for (const std::string_view backend : {"all_gather", "high_throughput"}) {
    support::WorldSpec spec{.params = {.num_experts = 5, .top_k = 3, .hidden_size = 20, .max_tokens_per_rank = 6},
                            .num_tokens = {4}};
    const support::World world = support::make_world(spec);
    Communication communication = support::communication_for(Group::in_process(1).front(), backend, spec);
    const support::RankTensors tensors(world, 0, false);
    std::array<std::uint16_t, 120> memory{};
    DispatchResult into;
    into.hidden_states = TensorView(memory.data(), Dtype::kBf16, {6, 20, 1});
    DispatchResult result;
    expect_refused([&] { (void)communication.dispatch(tensors.input(), {.into = &into}, result); }, "2 dimensions");
    into.hidden_states = TensorView(memory.data(), Dtype::kBf16, {6, 20});
    ASSERT_TRUE(communication.dispatch(tensors.input(), {.into = &into}, result).ok());
    EXPECT_EQ(result.hidden_states.shape[0], 4);
    EXPECT_EQ(result.hidden_states.shape[1], 20);
  }
}

struct HostileView {
  std::string name;
  std::function<void(TensorView&)> spoil;
  std::string message;
};

const std::vector<HostileView>& hostile_views() {
  static const std::vector<HostileView> kViews{
      {"negative rows", [](TensorView& view) { view.shape[0] = -1; }, "must not be negative"},
      {"negative columns", [](TensorView& view) { view.shape[1] = -20; }, "must not be negative"},
      {"too many dimensions", [](TensorView& view) { view.num_dims = kMaxDims + 1; }, "5 dimensions"},
      {"minus one dimension", [](TensorView& view) { view.num_dims = -1; }, "-1 dimensions"},
      {"columns that wrap", [](TensorView& view) { view.shape[1] = std::int64_t{1} << 62; }, "any memory"},
      {"a stride that wraps", [](TensorView& view) { view.strides[0] = kLargest; }, "any memory"},
  };
  return kViews;
}

// Each member in turn, on each backend; a good round works afterwards.
TEST(HostileArguments, ViewsThatNoTensorHas) {
  for (const std::string_view backend : support::kMovingBackends) {
    support::WorldSpec spec{.params = {.num_experts = 5, .top_k = 3, .hidden_size = 20, .max_tokens_per_rank = 6},
                            .num_tokens = {4}};
    const support::World world = support::make_world(spec);
    Communication communication = support::communication_for(Group::in_process(1).front(), backend, spec);
    const support::RankTensors tensors(world, 0, false);
    for (TensorView DispatchInput::*member :
         {&DispatchInput::hidden_states, &DispatchInput::topk_ids, &DispatchInput::topk_weights}) {
      for (const HostileView& hostile : hostile_views()) {
        SCOPED_TRACE(std::string(backend) + ": " + hostile.name);
        DispatchInput input = tensors.input();
        hostile.spoil(input.*member);
        DispatchResult result;
        expect_refused([&] { (void)communication.dispatch(input, {}, result); }, hostile.message);
        EXPECT_NO_THROW((void)support::play_round(communication, world, {}, result));
      }
    }
  }
}

TEST(HostileArguments, StatisticsOutOfReach) {
  support::WorldSpec spec{.params = {.num_experts = 5, .top_k = 3, .hidden_size = 20, .max_tokens_per_rank = 6},
                          .eplb_entries = 5,
                          .num_tokens = {4}};
  const support::World world = support::make_world(spec);
  Communication communication = support::communication_for(Group::in_process(1).front(), "one_sided", spec);
  const support::RankTensors tensors(world, 0, false);
  DispatchInput input = tensors.input();
  DispatchResult result;
  input.eplb_local_stats.device.kind = DeviceKind::kCuda;
  expect_refused([&] { (void)communication.dispatch(input, {}, result); }, "host memory");
  input = tensors.input();
  input.eplb_local_stats.shape[0] = -5;
  expect_refused([&] { (void)communication.dispatch(input, {}, result); }, "must not be negative");
  input = tensors.input();
  input.eplb_local_stats.data = input.eplb_local_stats.as<std::byte>() + 1;
  input.eplb_local_stats.shape[0] = 4;
  expect_refused([&] { (void)communication.dispatch(input, {}, result); }, "multiple");
  EXPECT_NO_THROW((void)support::play_round(communication, world, {}, result));
}

}  // namespace
}  // namespace tokenyard
