// SPDX-License-Identifier: Apache-2.0
// What small rounds rest on: a line of 128 bytes that eight threads store with one instruction is seen as a whole or
// not at all, on one device and over the link. No document of the hardware promises it, so it is looked at.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "gpu/device_ranks.h"
#include "gpu/lines.h"
#include "gpu/window_play.h"
#include "support/check.h"

namespace tokenyard::gpu_tests {
namespace {

class LinesOnGpu : public testing::TestWithParam<Shape> {};

TEST_P(LinesOnGpu, ArriveWhole) {
  const Shape shape = GetParam();
  TOKENYARD_NEEDS_DEVICES_OF(shape);
  support::run(support::RankKind::kThreads, 2, [&](const Group& group) {
    std::string reason;
    const int device = shape.spread ? group.rank() % std::max(num_devices(reason), 1) : 0;
    for (const int blocks : {1, 16, 48}) {
      for (const int threads : {128, 512}) {
        LineTraffic traffic{.blocks = blocks, .threads = threads, .generations = 3000};
        const auto window =
            make_window(group, {.bytes = bytes_of(traffic), .device = {.kind = DeviceKind::kCuda, .index = device}});
        traffic.theirs = window->peer(1 - group.rank());
        traffic.mine = window->own();
        const LinesSeen seen = exchange_lines(traffic);
        group.barrier();
        support::check_eq(seen.awaited, 0, "lines that did not come");
        support::check_eq(seen.torn, 0, "lines that were torn");
      }
    }
  });
}

std::string title(const testing::TestParamInfo<Shape>& tested) {
  return tested.param.spread ? "two" : "one";
}

INSTANTIATE_TEST_SUITE_P(Devices, LinesOnGpu, testing::Values(Shape{}, Shape{.spread = true}), title);

}  // namespace
}  // namespace tokenyard::gpu_tests
