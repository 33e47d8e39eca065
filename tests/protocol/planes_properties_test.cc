// SPDX-License-Identifier: Apache-2.0
// The payloads of one dispatch share the space of its rows: whatever widths pass the capacity check, their planes stay
// apart and inside the space that creation made.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <array>
#include <cstdint>
#include <string>

#include "backends/registry.h"
#include "protocol/layout.h"

namespace tokenyard::protocol {
namespace {

using Widths = std::array<std::int64_t, kMaxPlanes>;

// RapidCheck starts with small values; this size gives the whole range at once.
constexpr int kFullRange = 2000;
constexpr int kDrawsPerLayout = 20;
constexpr std::int64_t kWeightBytes = 4;  // f32, the widest

MoeParams draw_params() {
  MoeParams params{.num_experts = 4 * *rc::gen::inRange(1, 75),
                   .top_k = *rc::gen::inRange(1, kMaxTopK + 1),
                   .hidden_size = *rc::gen::inRange(1, 8000),
                   .max_tokens_per_rank = *rc::gen::inRange(1, 5000)};
  params.dtype = *rc::gen::element(Dtype::kBf16, Dtype::kF16, Dtype::kF32);
  params.dispatch_format =
      *rc::gen::element(DispatchFormat::kNone, DispatchFormat::kFp8PerTensor, DispatchFormat::kFp8Block128,
                        DispatchFormat::kMxfp8, DispatchFormat::kNvfp4, DispatchFormat::kMxfp4);
  return params;
}

BackendConfig with_room_for_extras(const BackendInfo& info, std::int64_t bytes) {
  if (info.name == "all_gather") return AllGatherConfig{.extra_payload_bytes_per_token = bytes};
  if (info.name == "one_sided") {
    OneSidedConfig config;
    config.extra_payload_bytes_per_token = bytes;
    return config;
  }
  return info.default_config;
}

// In [0, most], the ends often.
std::int64_t draw_up_to(std::int64_t most) {
  return *rc::gen::oneOf(rc::gen::just(most), rc::gen::just<std::int64_t>(0),
                         rc::gen::resize(kFullRange, rc::gen::inRange<std::int64_t>(0, most + 1)));
}

// Cuts `room` into the extra planes; what is left stays unused.
void draw_extras(std::int64_t room, Widths& widths) {
  const int count = *rc::gen::inRange(0, kMaxExtraPayloads + 1);
  for (int i = 0; i < count; ++i) {
    const std::int64_t bytes = draw_up_to(room);
    widths[static_cast<std::size_t>(kFirstExtraPlane) + static_cast<std::size_t>(i)] = bytes;
    room -= bytes;
  }
}

// Any widths that a dispatch of this communication may have (communication/dispatch_arguments.cc).
Widths draw_widths(const BackendInfo& info, const MoeParams& params, std::int64_t extra_room) {
  Widths widths{};
  const std::int64_t row_room = dispatch_bytes_per_token(params);
  // Where a communication grows, rows, scales and extras share their room.
  const std::int64_t row_most = info.contract.grows ? row_room + extra_room : row_room;
  const std::int64_t hidden = draw_up_to(row_most);
  const std::int64_t scale = draw_up_to(row_most - hidden);
  widths[kHiddenPlane] = hidden;
  widths[kScalePlane] = scale;
  const bool routed = info.contract.output_layout != OutputLayout::kEveryRank;
  widths[kIdsPlane] = *rc::gen::element<std::int64_t>(0, params.top_k * (routed ? 4 : 8));
  widths[kWeightsPlane] = *rc::gen::element<std::int64_t>(0, params.top_k * kWeightBytes);
  if (info.contract.takes_router_logits) widths[kLogitsPlane] = draw_up_to(std::int64_t{4} * params.num_experts);
  if (info.contract.takes_extra_payloads) {
    draw_extras(info.contract.grows ? row_most - hidden - scale : extra_room, widths);
  }
  return widths;
}

void assert_planes_hold(const PlanePlan& plan, const Widths& widths, std::int64_t num_rows, std::int64_t room) {
  std::int64_t end = 0;
  for (std::size_t i = 0; i < plan.planes.size(); ++i) {
    const Plane& plane = plan.planes[i];
    RC_ASSERT(plane.row_bytes == widths[i]);
    if (plane.row_bytes == 0) continue;
    RC_ASSERT(plane.offset >= end);  // planes come in order
    RC_ASSERT(plane.offset % kPlaneAlignment == 0);
    RC_ASSERT(plane.stride >= plane.row_bytes);
    if (i < kFirstExtraPlane) {
      RC_ASSERT(plane.stride % kRowAlignment == 0);
    } else {
      RC_ASSERT(plane.stride == plane.row_bytes);
    }
    end = plane.offset + (num_rows - 1) * plane.stride + plane.row_bytes;
  }
  RC_ASSERT(end <= plan.bytes);
  RC_ASSERT(plan.bytes <= room);
}

TEST(PlanesPropertiesTest, NeverOverlapForWidthsThatFit) {
  for (const communication::Backend* backend : registry::all()) {
    const BackendInfo& info = backend->info;
    if (!info.moves_tokens) continue;
    EXPECT_TRUE(rc::check("planes of " + std::string(info.name), [&] {
      const MoeParams params = *rc::gen::resize(kFullRange, rc::gen::exec(draw_params));
      const std::int64_t extra_room = info.contract.takes_extra_payloads ? *rc::gen::inRange<std::int64_t>(0, 5000) : 0;
      const int num_ranks = *rc::gen::inRange(1, 65);
      const auto shape = backend->plan(params, with_room_for_extras(info, extra_room), num_ranks).shape;
      RC_ASSERT(shape.extra_capacity == extra_room);
      const WindowLayout layout = WindowLayout::of(shape);
      for (int draw = 0; draw < kDrawsPerLayout; ++draw) {
        const Widths widths = draw_widths(info, params, extra_room);
        assert_planes_hold(plan_planes(widths, layout.payload_rows()), widths, layout.payload_rows(),
                           layout.payload_bytes());
      }
    }));
  }
}

// One byte more than every plane can round up to would not fit: the capacity is no gift.
TEST(PlanesPropertiesTest, CapacityIsCloseToWhatIsNeeded) {
  const MoeParams params{.num_experts = 64, .top_k = 8, .hidden_size = 7168, .max_tokens_per_rank = 4096};
  for (const communication::Backend* backend : registry::all()) {
    if (!backend->info.moves_tokens || backend->info.contract.takes_extra_payloads) continue;
    const WindowLayout layout = WindowLayout::of(backend->plan(params, backend->info.default_config, 8).shape);
    Widths widths{};
    widths[kHiddenPlane] = 14'336;
    widths[kIdsPlane] = widths[kWeightsPlane] = 32;
    const PlanePlan plan = plan_planes(widths, layout.payload_rows());
    EXPECT_LE(plan.bytes, layout.payload_bytes());
    EXPECT_LT(static_cast<double>(layout.payload_bytes()), 1.01 * static_cast<double>(plan.bytes));
  }
}

TEST(PlanesPropertiesTest, GoldenPlan) {
  Widths widths{};
  widths[kHiddenPlane] = 20;
  widths[kIdsPlane] = 8;
  widths[kFirstExtraPlane] = 3;
  constexpr std::int64_t kRows = 10;
  const PlanePlan plan = plan_planes(widths, kRows);
  EXPECT_EQ(plan.planes[kHiddenPlane].offset, 0);
  EXPECT_EQ(plan.planes[kHiddenPlane].stride, 32);
  EXPECT_EQ(plan.planes[kIdsPlane].offset, 384);  // 320 rounded up to 128
  EXPECT_EQ(plan.planes[kIdsPlane].stride, 16);
  EXPECT_EQ(plan.planes[kFirstExtraPlane].offset, 640);  // 384 + 160 rounded up
  EXPECT_EQ(plan.planes[kFirstExtraPlane].stride, 3);
  EXPECT_EQ(plan.bytes, 768);
}

}  // namespace
}  // namespace tokenyard::protocol
