// SPDX-License-Identifier: Apache-2.0
// The list of fabrics, and what they say where they cannot be used. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "fabric/window.h"
#include "unit/group_helpers.h"

namespace tokenyard {

namespace {

using namespace testing_groups;
using fabric::FabricInfo;
using fabric::find_fabric;

TEST(Fabric, HostMemoryIsAlwaysThere) {
  const FabricInfo& host = find_fabric(DeviceKind::kCpu);
  EXPECT_EQ(host.name, "host");
  EXPECT_EQ(host.probe().state, Support::State::kUsable);
  const auto window = host.allocate({.bytes = 4097});
  EXPECT_EQ(window->device(), (Device{DeviceKind::kCpu, 0}));
  EXPECT_EQ(window->bytes(), 4097);
  EXPECT_TRUE(std::all_of(window->own(), window->own() + 4097, [](std::byte b) { return b == std::byte{0}; }));
}

TEST(Fabric, HostMemoryIsNotThatOfADevice) {
  expect_error(ErrorCode::kInvalidArgument, {"device 3", "host memory"}, [] {
    (void)find_fabric(DeviceKind::kCpu).allocate({.bytes = 1, .device = {DeviceKind::kCuda, 3}});
  });
}

#ifdef TOKENYARD_CUDA

// In a child, because CUDA does not survive fork() and other tests of this program fork.
TEST(Fabric, WithoutADriverCudaSaysWhy) {
  if (std::filesystem::exists("/proc/driver/nvidia/version")) GTEST_SKIP() << "this machine has a CUDA driver";
  Child child([] {
    const FabricInfo& cuda = find_fabric(DeviceKind::kCuda);
    EXPECT_EQ(cuda.name, "cuda");
    // Twice: a failure is not remembered as a success.
    for (int i = 0; i < 2; ++i) {
      const Support support = cuda.probe();
      EXPECT_EQ(support.state, Support::State::kUnusable);
      EXPECT_NE(support.reason.find("no CUDA driver"), std::string::npos) << support.reason;
      expect_error(ErrorCode::kUnsupported, {support.reason}, [&] {
        (void)cuda.allocate({.bytes = 1, .device = {DeviceKind::kCuda, 0}});
      });
    }
    return !::testing::Test::HasFailure();
  });
  EXPECT_TRUE(child.wait());
}

TEST(Fabric, CudaRefusesHostMemory) {
  expect_error(ErrorCode::kInvalidArgument, {"memory of the host"},
               [] { (void)find_fabric(DeviceKind::kCuda).allocate({.bytes = 1}); });
}

#else

TEST(Fabric, ABuildWithoutCudaRefusesGpuMemory) {
  expect_error(ErrorCode::kUnsupported, {"built without CUDA: configure with TOKENYARD_CUDA=ON"},
               [] { (void)find_fabric(DeviceKind::kCuda); });
}

#endif

}  // namespace

}  // namespace tokenyard
