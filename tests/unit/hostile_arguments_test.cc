// SPDX-License-Identifier: Apache-2.0
// What a caller can put into a call's tensors and options by hand: each is refused before it is used, and a good round
// works afterwards. Fuzzing found most of them.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tokenyard/communication.h"

#include "support/backends.h"
#include "support/round.h"
#include "support/world.h"
#include "unit/refusals.h"

namespace tokenyard {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

support::WorldSpec small_world() {
  return {.params = {.num_experts = 8, .top_k = 3, .hidden_size = 20, .max_tokens_per_rank = 6}, .num_tokens = {4}};
}

// A rank that is alone, and a good round of it.
struct Alone {
  Alone(std::string_view backend, const support::WorldSpec& spec)
      : world(support::make_world(spec)),
        communication(support::communication_for(Group::in_process(1).front(), backend, spec)),
        tensors(world, 0, false) {}

  void expect_dispatch_refused(const DispatchInput& input, const DispatchOptions& options, const std::string& part) {
    expect_refused([&] { (void)communication.dispatch(input, options, result); }, part);
    expect_good_round();
  }

  void expect_good_round() { EXPECT_NO_THROW((void)support::play_round(communication, world, {}, result)); }

  support::World world;
  Communication communication;
  support::RankTensors tensors;
  DispatchResult result;
};

struct HostileView {
  std::string name;
  std::function<void(TensorView&)> spoil;
  std::string message;
};

void move_by_a_byte(TensorView& view) {
  view.data = view.as<std::byte>() + 1;
  --view.shape[0];  // inside the memory still
}

const std::vector<HostileView>& hostile_views() {
  static const std::vector<HostileView> kViews{
      {"negative rows", [](TensorView& view) { view.shape[0] = -1; }, "must not be negative"},
      {"negative columns", [](TensorView& view) { view.shape[1] = -20; }, "must not be negative"},
      {"too many dimensions", [](TensorView& view) { view.num_dims = kMaxDims + 1; }, "5 dimensions"},
      {"minus one dimension", [](TensorView& view) { view.num_dims = -1; }, "-1 dimensions"},
      {"columns that wrap", [](TensorView& view) { view.shape[1] = std::int64_t{1} << 62; }, "any memory"},
      {"a stride that wraps", [](TensorView& view) { view.strides[0] = kLargest; }, "any memory"},
      {"a dtype that there is not", [](TensorView& view) { view.dtype = static_cast<Dtype>(9); }, "dtype 9"},
      {"rows that run backwards", [](TensorView& view) { view.strides[0] = -20; }, "overlap or run backwards"},
      {"rows that overlap", [](TensorView& view) { view.strides[0] = 1; }, "overlap or run backwards"},
      {"columns apart", [](TensorView& view) { view.strides[1] = 2; }, "must be contiguous"},
      {"no memory", [](TensorView& view) { view.data = nullptr; }, "no memory"},
      {"memory of a device", [](TensorView& view) { view.device.kind = DeviceKind::kCuda; }, "host memory"},
  };
  return kViews;
}

TEST(HostileArguments, ViewsThatNoTensorHas) {
  for (const std::string_view backend : support::kMovingBackends) {
    Alone alone(backend, small_world());
    for (TensorView DispatchInput::*member :
         {&DispatchInput::hidden_states, &DispatchInput::topk_ids, &DispatchInput::topk_weights}) {
      for (const HostileView& hostile : hostile_views()) {
        SCOPED_TRACE(std::string(backend) + ": " + hostile.name);
        DispatchInput input = alone.tensors.input();
        hostile.spoil(input.*member);
        alone.expect_dispatch_refused(input, {}, hostile.message);
      }
    }
  }
}

TEST(HostileArguments, MisalignedTensors) {
  for (const std::string_view backend : support::kMovingBackends) {
    SCOPED_TRACE(backend);
    Alone alone(backend, small_world());
    DispatchInput input = alone.tensors.input();
    for (TensorView DispatchInput::*member :
         {&DispatchInput::hidden_states, &DispatchInput::topk_ids, &DispatchInput::topk_weights})
      --(input.*member).shape[0];
    move_by_a_byte(input.hidden_states);
    ++input.hidden_states.shape[0];
    alone.expect_dispatch_refused(input, {}, "must start at a multiple of its element's 2 bytes");
  }
}

TEST(HostileArguments, BalancingStatisticsOutOfReach) {
  for (const std::string_view backend :
       support::moving_backends_that([](const Contract& contract) { return contract.takes_eplb_stats; })) {
    SCOPED_TRACE(backend);
    support::WorldSpec spec = small_world();
    spec.eplb_entries = spec.params.num_experts;
    Alone alone(backend, spec);
    DispatchInput input = alone.tensors.input();
    input.eplb_local_stats.device.kind = DeviceKind::kCuda;
    alone.expect_dispatch_refused(input, {}, "host memory");
    input = alone.tensors.input();
    input.eplb_local_stats.shape[0] = -8;
    alone.expect_dispatch_refused(input, {}, "must not be negative");
    input = alone.tensors.input();
    std::array<std::int32_t, 9> entries{};
    input.eplb_local_stats.data = reinterpret_cast<std::byte*>(entries.data()) + 1;
    alone.expect_dispatch_refused(input, {}, "must start at a multiple of its element's 4 bytes");
    DispatchResult into;
    into.eplb_gathered_stats = TensorView(reinterpret_cast<std::byte*>(entries.data()) + 1, Dtype::kI32, {1, 8});
    alone.expect_dispatch_refused(alone.tensors.input(), {.into = &into}, "must start at a multiple");
  }
}

// One dimension more is for the blocks of results in blocks, which only some backends have; others are never right.
TEST(HostileArguments, OutputsWithAWrongNumberOfDimensions) {
  constexpr std::int64_t kRows = 48;  // of any backend's result
  for (const std::string_view backend : support::kMovingBackends) {
    SCOPED_TRACE(backend);
    Alone alone(backend, small_world());
    const OutputLayout layout = alone.communication.contract().output_layout;
    const bool blocked = layout == OutputLayout::kRankMajor || layout == OutputLayout::kExpertMajor;
    std::array<std::uint16_t, kRows * 20> memory{};
    std::vector<TensorView> wrong{TensorView(memory.data(), Dtype::kBf16, {kRows * 20}),
                                  TensorView(memory.data(), Dtype::kBf16, {kRows / 6, 6, 20, 1})};
    if (!blocked) wrong.emplace_back(memory.data(), Dtype::kBf16, std::initializer_list<std::int64_t>{kRows, 20, 1});
    DispatchResult into;
    for (const TensorView& view : wrong) {
      into.hidden_states = view;
      alone.expect_dispatch_refused(alone.tensors.input(), {.into = &into}, "2 dimensions");
    }
    into.hidden_states = TensorView(memory.data(), Dtype::kBf16, {kRows, 20});
    ASSERT_TRUE(alone.communication.dispatch(alone.tensors.input(), {.into = &into}, alone.result).ok());
    EXPECT_EQ(alone.result.hidden_states.num_dims, 2);
    EXPECT_EQ(alone.result.hidden_states.data, memory.data());
  }
}

TEST(HostileArguments, OutputsInBlocksThatOverlap) {
  for (const std::string_view backend : {"one_sided", "two_sided", "low_latency"}) {
    SCOPED_TRACE(backend);
    Alone alone(backend, small_world());
    const std::int64_t blocks = std::string_view(backend) == "low_latency" ? 8 : 1;
    std::vector<std::uint16_t> memory(static_cast<std::size_t>(blocks * 6 * 20 + 1));
    DispatchResult into;
    const auto expect = [&](const std::function<void(TensorView&)>& spoil, const std::string& message) {
      into.hidden_states = TensorView(memory.data(), Dtype::kBf16, {blocks, 6, 20});
      spoil(into.hidden_states);
      alone.expect_dispatch_refused(alone.tensors.input(), {.into = &into}, message);
    };
    expect([](TensorView& view) { view.strides[1] = 19; }, "overlap");
    expect([](TensorView& view) { view.strides[1] = -20; }, "backwards");
    expect([](TensorView& view) { view.strides[0] = -120; }, "backwards");
    expect([](TensorView& view) { view.data = view.as<std::byte>() + 1; }, "must start at a multiple");
    if (blocks > 1) expect([](TensorView& view) { view.strides[0] = 100; }, "overlap");
  }
}

TEST(HostileArguments, ExpertOutputInBlocksThatOverlap) {
  const std::vector<HostileView> views{
      {"rows overlap", [](TensorView& view) { view.strides[1] = 19; }, "overlap"},
      {"rows backwards", [](TensorView& view) { view.strides[1] = -20; }, "backwards"},
      {"blocks backwards", [](TensorView& view) { view.strides[0] = -120; }, "backwards"},
      {"a byte off", [](TensorView& view) { view.data = view.as<std::byte>() + 1; }, "must start at a multiple"},
      {"no memory", [](TensorView& view) { view.data = nullptr; }, "no memory"},
      {"a device's", [](TensorView& view) { view.device.kind = DeviceKind::kCuda; }, "host memory"},
      {"columns apart", [](TensorView& view) { view.strides[2] = 2; }, "contiguous"},
      {"negative", [](TensorView& view) { view.shape[0] = -1; }, "must not be negative"},
      {"blocks overlap", [](TensorView& view) { view.strides[0] = 100; }, "overlap"},
  };
  for (const std::string_view backend : {"one_sided", "two_sided", "low_latency"}) {
    Alone alone(backend, small_world());
    const std::int64_t blocks = std::string_view(backend) == "low_latency" ? 8 : 1;
    std::vector<std::uint16_t> memory(static_cast<std::size_t>(blocks * 6 * 20 + 1));
    std::vector<std::uint16_t> sums(std::size_t{4} * 20);
    TensorView output(sums.data(), Dtype::kBf16, {4, 20});
    for (const HostileView& hostile : views) {
      if (blocks == 1 && hostile.name == "blocks overlap") continue;
      SCOPED_TRACE(std::string(backend) + ": " + hostile.name);
      ASSERT_TRUE(alone.communication.dispatch(alone.tensors.input(), {}, alone.result).ok());
      TensorView rows(memory.data(), Dtype::kBf16, {blocks, 6, 20});
      hostile.spoil(rows);
      expect_refused(
          [&] { (void)alone.communication.combine(alone.result.handle, {.expert_output = rows}, {}, output); },
          hostile.message);
      alone.expect_good_round();
    }
  }
}

// [rows, blocks, hidden] in memory, seen as [blocks, rows, hidden].
TEST(HostileArguments, ExpertOutputWhoseBlocksInterleaveIsRight) {
  Alone alone("low_latency", small_world());
  std::vector<std::vector<float>> sums;
  for (const bool interleaved : {false, true}) {
    std::vector<float> memory(std::size_t{8} * 6 * 20);
    TensorView rows(memory.data(), Dtype::kF32, {8, 6, 20});
    if (interleaved) {
      rows.strides[0] = 20;
      rows.strides[1] = 160;
    }
    for (std::int64_t block = 0; block < 8; ++block) {
      for (std::int64_t i = 0; i < 120; ++i) {
        memory[static_cast<std::size_t>(block * rows.strides[0] + i / 20 * rows.strides[1] + i % 20)] =
            static_cast<float>(1 + block * 7 % 5 + i % 9);
      }
    }
    ASSERT_TRUE(alone.communication.dispatch(alone.tensors.input(), {}, alone.result).ok());
    std::vector<float>& sum = sums.emplace_back(std::size_t{4} * 20);
    TensorView output(sum.data(), Dtype::kF32, {4, 20});
    ASSERT_TRUE(alone.communication.combine(alone.result.handle, {.expert_output = rows}, {}, output).ok());
  }
  EXPECT_EQ(sums[0], sums[1]);
  EXPECT_NE(sums[0], std::vector<float>(sums[0].size()));
}

// A number of dimensions below 0 is not the same as a tensor that is not given.
TEST(HostileArguments, CombineWeightsWithNoNumberOfDimensions) {
  Alone alone("high_throughput", small_world());
  std::array<std::uint16_t, 80> rows{};
  std::array<float, 12> weights{};
  TensorView spoiled(weights.data(), Dtype::kF32, {4, 3});
  spoiled.num_dims = -1;
  for (const bool given : {true, false}) {
    ASSERT_TRUE(alone.communication.dispatch(alone.tensors.input(), {}, alone.result).ok());
    CombineInput input{.expert_output = TensorView(rows.data(), Dtype::kBf16, {alone.result.counts.num_rows, 20})};
    CombineOptions options;
    (given ? input.topk_weights : options.topk_weights_output) = spoiled;
    TensorView output(rows.data(), Dtype::kBf16, {4, 20});
    expect_refused([&] { (void)alone.communication.combine(alone.result.handle, input, options, output); },
                   "-1 dimensions");
    alone.expect_good_round();
  }
}

// Where rows may be narrower than hidden_size, both sides of one combine are equally so.
TEST(HostileArguments, OutputOfAnotherWidthThanExpertOutput) {
  Alone alone("one_sided", small_world());
  std::array<std::uint16_t, 120> rows{};
  std::array<std::uint16_t, 80> sums{};
  for (const bool split : {false, true}) {
    ASSERT_TRUE(alone.communication.dispatch(alone.tensors.input(), {}, alone.result).ok());
    const CombineInput input{.expert_output = TensorView(rows.data(), Dtype::kBf16, {6, 20})};
    TensorView narrow(sums.data(), Dtype::kBf16, {4, 19});
    TensorView right(sums.data(), Dtype::kBf16, {4, 20});
    if (split) {
      auto* halves = alone.communication.get<SplitPhases>();
      ASSERT_TRUE(halves->combine_send(alone.result.handle, input, {}).ok());
      expect_refused([&] { (void)halves->combine_receive(alone.result.handle, narrow); }, "20 elements");
      EXPECT_TRUE(halves->combine_receive(alone.result.handle, right).ok());
    } else {
      expect_refused([&] { (void)alone.communication.combine(alone.result.handle, input, {}, narrow); }, "20 elements");
    }
    alone.expect_good_round();
  }
}

TEST(HostileArguments, CastsThatDoNotExist) {
  Alone alone("low_latency", small_world());
  alone.expect_dispatch_refused(alone.tensors.input(), {.cast = static_cast<DispatchCast>(4)}, "cast is 4");
}

TEST(HostileArguments, ReceiveStatisticsOutOfReach) {
  Alone alone("low_latency", small_world());
  std::array<std::int32_t, 9> routes{};
  std::array<std::int64_t, 2> waits{};
  const auto off = [](auto& list) { return reinterpret_cast<std::byte*>(list.data()) + 1; };
  DispatchOptions options{.routes_per_expert = TensorView(off(routes), Dtype::kI32, {8})};
  alone.expect_dispatch_refused(alone.tensors.input(), options, "aligned");
  options = {.wait_per_source = TensorView(off(waits), Dtype::kI64, {1})};
  alone.expect_dispatch_refused(alone.tensors.input(), options, "aligned");
  options = {.routes_per_expert = TensorView(routes.data(), Dtype::kI32, {8})};
  options.routes_per_expert.num_dims = 7;
  alone.expect_dispatch_refused(alone.tensors.input(), options, "7 dimensions");
  options.routes_per_expert.num_dims = 1;
  options.routes_per_expert.shape[0] = -8;
  alone.expect_dispatch_refused(alone.tensors.input(), options, "must not be negative");
}

TEST(HostileArguments, ReceiveStatisticsStopAtTheLargestNumber) {
  Alone alone("low_latency", small_world());
  std::array<std::int32_t, 8> routes{};
  routes.fill(std::numeric_limits<std::int32_t>::max() - 1);
  std::array<std::int64_t, 1> waits{kLargest};
  const DispatchOptions options{.routes_per_expert = TensorView(routes.data(), Dtype::kI32, {8}),
                                .wait_per_source = TensorView(waits.data(), Dtype::kI64, {1})};
  for (int round = 0; round < 3; ++round)
    ASSERT_TRUE(alone.communication.dispatch(alone.tensors.input(), options, alone.result).ok());
  bool reached = false;
  for (const std::int32_t count : routes) {
    EXPECT_GE(count, std::numeric_limits<std::int32_t>::max() - 1);
    reached = reached || count == std::numeric_limits<std::int32_t>::max();
  }
  EXPECT_TRUE(reached);
  EXPECT_EQ(waits[0], kLargest);
}

// What the send half was told holds, whatever the receive half is told.
TEST(HostileArguments, ReceiveHalfThatIsToldOtherThings) {
  Alone alone("high_throughput", small_world());
  auto* halves = alone.communication.get<SplitPhases>();
  ASSERT_TRUE(
      halves->dispatch_send(alone.tensors.input(), {.num_worst_tokens = 6, .expert_alignment = 4}, alone.result).ok());
  ASSERT_TRUE(halves->dispatch_receive({.num_worst_tokens = kLargest, .expert_alignment = 0}, alone.result).ok());
  EXPECT_EQ(alone.result.hidden_states.shape[0], 6);
  for (const std::int64_t rows : alone.result.counts.aligned_rows_per_expert)
    EXPECT_EQ(rows % 4, 0);
  alone.expect_good_round();
}

TEST(HostileArguments, ReceiveHalfWithStatisticsOutOfReach) {
  Alone alone("low_latency", small_world());
  auto* halves = alone.communication.get<SplitPhases>();
  ASSERT_TRUE(halves->dispatch_send(alone.tensors.input(), {}, alone.result).ok());
  std::array<std::int32_t, 8> routes{};
  DispatchOptions options{.routes_per_expert = TensorView(routes.data(), Dtype::kI32, {7})};
  expect_refused([&] { (void)halves->dispatch_receive(options, alone.result); }, "[8]");
  options.routes_per_expert = TensorView(routes.data(), Dtype::kI32, {8});
  ASSERT_TRUE(halves->dispatch_receive(options, alone.result).ok());
  alone.expect_good_round();
}

// 0 is right for ranks without tokens, and the message says so.
TEST(HostileArguments, RuntimeMaxTokensOfZero) {
  for (const std::string_view backend :
       support::moving_backends_that([](const Contract& contract) { return contract.takes_runtime_max_tokens; })) {
    SCOPED_TRACE(backend);
    Alone alone(backend, small_world());
    alone.expect_dispatch_refused(
        alone.tensors.input(), {.runtime_max_tokens_per_rank = 0},
        "runtime_max_tokens_per_rank is 0; it must be at least this rank's 4 tokens and at most");
    support::WorldSpec spec = small_world();
    spec.num_tokens = {0};
    const support::World world = support::make_world(spec);
    EXPECT_NO_THROW((void)support::play_round(alone.communication, world, {.runtime_max_tokens = 0}, alone.result));
    const support::RankTensors none(world, 0, false);
    alone.expect_dispatch_refused(none.input(), {.runtime_max_tokens_per_rank = -1}, "at least this rank's 0 tokens");
  }
}

}  // namespace
}  // namespace tokenyard
