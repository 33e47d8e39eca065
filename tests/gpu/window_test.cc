// SPDX-License-Identifier: Apache-2.0
// Windows in GPU memory: every rank reaches every window, by copies and by kernels, however ranks and devices are
// paired.
#include "fabric/window.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <tuple>

#include "tokenyard/error.h"

#include "fabric/cuda/driver.h"
#include "gpu/gpu_ranks.h"
#include "gpu/pattern.h"
#include "gpu/window_play.h"
#include "support/check.h"

namespace tokenyard::gpu_tests {
namespace {

using fabric::find_fabric;
using fabric::WindowRequest;
using fabric::cuda::require;
using support::check;
using support::check_bytes;
using support::check_eq;
using support::RankKind;

enum class Placement : std::uint8_t { kOneDevice, kAllDevices };
enum class Memory : std::uint8_t { kDevice, kMappedHost };

WindowRequest request_of(std::int64_t bytes, int device, Memory memory = Memory::kDevice) {
  return {.bytes = bytes, .device = {DeviceKind::kCuda, device}, .allow_mapped_host = memory == Memory::kMappedHost};
}

using Case = std::tuple<RankKind, int, Placement, Memory>;

class GpuWindow : public ::testing::TestWithParam<Case> {};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  const auto& [kind, num_ranks, placement, memory] = info.param;
  return std::to_string(num_ranks) + "_" + std::string(name(kind)) +
         (placement == Placement::kOneDevice ? "_on_one_device" : "_on_all_devices") +
         (memory == Memory::kDevice ? "" : "_in_mapped_host_memory");
}

TEST_P(GpuWindow, EveryRankReachesEveryWindow) {
  const auto& [kind, num_ranks, placement, memory] = GetParam();
  TOKENYARD_NEEDS_DEVICES(placement == Placement::kAllDevices ? 2 : 1);
  const int num_devices = placement == Placement::kAllDevices ? machine().num_devices : 1;
  const Memory where = memory;
  run_on_gpus(kind, num_ranks, [&](const Group& group) {
    const int device = group.rank() % num_devices;
    for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{4096}, (std::int64_t{3} << 20) + 5}) {
      const auto window = make_window(group, request_of(bytes, device, where));
      check(window->device() == Device{DeviceKind::kCuda, device}, "the window is of another device");
      check_eq(window->bytes(), bytes, "the window's bytes");
      play_with_window(group, *window);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All,
                         GpuWindow,
                         ::testing::Combine(::testing::Values(RankKind::kThreads, RankKind::kProcesses),
                                            ::testing::Values(1, 2, 4, 8),
                                            ::testing::Values(Placement::kOneDevice, Placement::kAllDevices),
                                            ::testing::Values(Memory::kDevice, Memory::kMappedHost)),
                         name_of);

// What is left of a rank's window when the rank lets go of it: all, for those who still look.
void check_outlives_owner(RankKind kind, int num_devices, Memory memory) {
  constexpr std::int64_t kBytes = (1 << 20) + 3;
  run_on_gpus(kind, 2, [&](const Group& group) {
    auto window = make_window(group, request_of(kBytes, group.rank() % num_devices, memory));
    play_with_window(group, *window);
    if (group.rank() == 1) {
      window.reset();
      if (kind == RankKind::kThreads) group.barrier(kDeadline);
      return;  // the end of a process
    }
    try {
      group.barrier(kDeadline);
      check(kind == RankKind::kThreads, "the process of rank 1 did not end");
    } catch (const Error& error) {
      check(error.code() == ErrorCode::kPeerLost && kind == RankKind::kProcesses, error.what());
    }
    const std::byte* left = window->peer(1);
    check_eq(count_differences(left, kBytes, last_seed(2, 1)), 0, "bytes that differ after the owner has left");
    store_pattern(window->peer(1), kBytes, 77);
    check_bytes(copy_from_device(left, kBytes).data(), pattern(77, kBytes), "stores after the owner has left");
  });
}

TEST(GpuWindowLife, AWindowOutlivesItsOwner) {
  TOKENYARD_NEEDS_DEVICES(1);
  for (const RankKind kind : {RankKind::kThreads, RankKind::kProcesses}) {
    for (const Memory memory : {Memory::kDevice, Memory::kMappedHost})
      check_outlives_owner(kind, machine().num_devices, memory);
  }
}

TEST(GpuWindowLife, OneRankMayHaveSeveralWindows) {
  TOKENYARD_NEEDS_DEVICES(1);
  const int num_devices = machine().num_devices;
  run_on_gpus(RankKind::kProcesses, 2, [&](const Group& group) {
    const int device = group.rank() % num_devices;
    const auto first = make_window(group, request_of(5000, device));
    const auto host = make_window(group, request_of(5000, device, Memory::kMappedHost));
    const auto second = make_window(group, request_of(7000, device));
    play_with_window(group, *first);
    play_with_window(group, *host);
    play_with_window(group, *second);
    check_bytes(copy_from_device(first->own(), 5000).data(), pattern(last_seed(2, group.rank()), 5000),
                "the first window after the others were used");
  });
}

int current_device() {
  int device = -1;
  require(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

TEST(GpuWindowCaller, TheCurrentDeviceStays) {
  TOKENYARD_NEEDS_DEVICES(1);
  const int last = machine().num_devices - 1;
  run_on_gpus(RankKind::kThreads, 1, [&](const Group& group) {
    require(cudaSetDevice(0), "cudaSetDevice");
    for (const Memory memory : {Memory::kDevice, Memory::kMappedHost}) {
      auto window = find_fabric(DeviceKind::kCuda).allocate(request_of(4096, last, memory));
      check_eq(current_device(), 0, "the current device after allocate");
      window->connect(group, kDeadline);
      check_eq(current_device(), 0, "the current device after connect");
      window.reset();
      check_eq(current_device(), 0, "the current device after the window's end");
    }
    require(cudaGetLastError(), "something before");
  });
}

// A context takes hundreds of megabytes, and rank processes would all take them on device 0.
TEST(GpuWindowCaller, NoContextIsMadeOnOtherDevices) {
  TOKENYARD_NEEDS_DEVICES(2);
  run_on_gpus(RankKind::kThreads, 1, [](const Group& group) {
    auto window = find_fabric(DeviceKind::kCuda).allocate(request_of(4096, 1));
    window->connect(group, kDeadline);
    window.reset();
    PFN_cuDevicePrimaryCtxGetState_v7000 get_state = nullptr;
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    require(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &address, 7000, cudaEnableDefault, &found),
            "cudaGetDriverEntryPointByVersion");
    check(found == cudaDriverEntryPointSuccess, "there is no cuDevicePrimaryCtxGetState");
    get_state = reinterpret_cast<PFN_cuDevicePrimaryCtxGetState_v7000>(address);
    unsigned flags = 0;
    int active = -1;
    const fabric::cuda::Driver& cu = fabric::cuda::driver();
    require(cu, get_state(0, &flags, &active), "cuDevicePrimaryCtxGetState");
    check_eq(active, 0, "whether device 0 has a context");
  });
}

// Kernels of two ranks that run at once on one device see each other's stores, as rounds need it.
TEST(GpuWindowCaller, RanksOfOneProcessShareAddressesOnADevice) {
  TOKENYARD_NEEDS_DEVICES(1);
  run_on_gpus(RankKind::kThreads, 3, [](const Group& group) {
    const auto window = make_window(group, request_of(4096, 0));
    const auto own = reinterpret_cast<std::uintptr_t>(window->own());
    const auto owns = group.all_gather(std::as_bytes(std::span(&own, 1)), kDeadline);
    for (int peer = 0; peer < group.num_ranks(); ++peer) {
      const auto seen = reinterpret_cast<std::uintptr_t>(window->peer(peer));
      check_bytes(owns[static_cast<std::size_t>(peer)].data(), std::as_bytes(std::span(&seen, 1)),
                  "the address of the window of rank " + std::to_string(peer));
    }
    group.barrier(kDeadline);
  });
}

}  // namespace
}  // namespace tokenyard::gpu_tests
