// SPDX-License-Identifier: Apache-2.0
// What goes wrong with windows in GPU memory: all ranks hear of it, with the reason, and nothing stays behind.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <string>

#include "tokenyard/error.h"

#include "fabric/cuda/driver.h"
#include "fabric/window.h"
#include "gpu/gpu_ranks.h"
#include "gpu/window_play.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using fabric::find_fabric;
using fabric::Window;
using fabric::WindowRequest;
using fabric::cuda::require;
using support::check;
using support::check_throws;
using support::RankKind;

constexpr std::int64_t kMegabyte = 1 << 20;

WindowRequest request_of(std::int64_t bytes, int device) {
  return {.bytes = bytes, .device = {DeviceKind::kCuda, device}};
}

std::unique_ptr<Window> allocate(const WindowRequest& request) {
  return find_fabric(DeviceKind::kCuda).allocate(request);
}

struct DeviceBytes {
  std::size_t free = 0;
  std::size_t total = 0;
};

// Of the thread's current device.
DeviceBytes device_bytes() {
  DeviceBytes bytes;
  require(cudaMemGetInfo(&bytes.free, &bytes.total), "cudaMemGetInfo");
  return bytes;
}

// What a rank's process holds, and how much of its device is free.
struct Holdings {
  std::int64_t descriptors = 0;
  std::int64_t mappings = 0;
  std::int64_t free_bytes = 0;
};

Holdings holdings() {
  std::ifstream maps("/proc/self/maps");
  return {.descriptors = std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                       std::filesystem::directory_iterator()),
          .mappings = std::count(std::istreambuf_iterator<char>(maps), std::istreambuf_iterator<char>(), '\n'),
          .free_bytes = static_cast<std::int64_t>(device_bytes().free)};
}

// `step` may fail or not; a first round brings what stays for good. A window of `kLeaked` bytes left behind each time
// would be seen many times over.
constexpr std::int64_t kLeaked = 64 * kMegabyte;

void check_leaves_nothing(const Group& group, int device, const std::function<void()>& step) {
  require(cudaSetDevice(device), "cudaSetDevice");
  const auto together = [&] {
    step();
    group.barrier(kDeadline);
  };
  together();
  const Holdings before = holdings();
  group.barrier(kDeadline);
  constexpr int kRounds = 20;
  for (int i = 0; i < kRounds; ++i)
    together();
  const Holdings after = holdings();
  group.barrier(kDeadline);
  // Of ranks that are threads, one may be in the middle of looking.
  const auto slack = static_cast<std::int64_t>(group.num_ranks());
  check(after.descriptors <= before.descriptors + slack,
        "open descriptors: " + std::to_string(before.descriptors) + " before, " + std::to_string(after.descriptors));
  // The driver maps as it likes, but not in every round.
  check(after.mappings < before.mappings + kRounds,
        "mappings: " + std::to_string(before.mappings) + " before, " + std::to_string(after.mappings));
  check(after.free_bytes >= before.free_bytes - kLeaked / 2,
        "free bytes: " + std::to_string(before.free_bytes) + " before, " + std::to_string(after.free_bytes));
}

TEST(GpuWindowFailure, ADeviceThatDoesNotExist) {
  TOKENYARD_NEEDS_DEVICES(1);
  run_on_gpus(RankKind::kThreads, 2, [](const Group&) {
    int count = 0;
    require(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    for (const bool mapped_host : {false, true}) {
      for (const int index : {count, count + 100, -1}) {
        check_throws(
            ErrorCode::kInvalidArgument, {"no CUDA device " + std::to_string(index), "sees " + std::to_string(count)},
            [&] {
              (void)allocate({.bytes = 1, .device = {DeviceKind::kCuda, index}, .allow_mapped_host = mapped_host});
            });
      }
    }
  });
}

TEST(GpuWindowFailure, NoBytes) {
  TOKENYARD_NEEDS_DEVICES(1);
  run_on_gpus(RankKind::kThreads, 1, [](const Group&) {
    for (const bool mapped_host : {false, true}) {
      for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{-1}}) {
        check_throws(ErrorCode::kInvalidArgument, {std::to_string(bytes) + " bytes", "at least 1"}, [&] {
          (void)allocate({.bytes = bytes, .device = {DeviceKind::kCuda, 0}, .allow_mapped_host = mapped_host});
        });
      }
    }
  });
}

TEST(GpuWindowFailure, MoreBytesThanTheDeviceHas) {
  TOKENYARD_NEEDS_DEVICES(1);
  run_on_gpus(RankKind::kThreads, 2, [](const Group& group) {
    require(cudaSetDevice(0), "cudaSetDevice");
    const auto total = static_cast<std::int64_t>(device_bytes().total);
    check_leaves_nothing(group, 0, [&] {
      check_throws(ErrorCode::kSystem, {"it has ", "device 0 ("},
                   [&] { (void)allocate(request_of(total + (total / 2), 0)); });
      check_throws(ErrorCode::kSystem, {"it has "},
                   [&] { (void)allocate(request_of(std::numeric_limits<std::int64_t>::max(), 0)); });
      // Contexts lie in the rest, so this much is never free.
      check_throws(ErrorCode::kSystem, {"cuMemCreate of ", "CUDA_ERROR_OUT_OF_MEMORY", "device 0 ("},
                   [&] { (void)allocate(request_of(total, 0)); });
    });
  });
}

TEST(GpuWindowFailure, WindowsThatComeAndGoLeaveNothing) {
  TOKENYARD_NEEDS_DEVICES(1);
  const int num_devices = machine().num_devices;
  for (const RankKind kind : {RankKind::kThreads, RankKind::kProcesses}) {
    for (const bool mapped_host : {false, true}) {
      run_on_gpus(kind, 2, [&](const Group& group) {
        const int device = group.rank() % num_devices;
        check_leaves_nothing(group, device, [&] {
          // The barrier of make_window lets all take hold before the first lets go.
          (void)make_window(
              group, {.bytes = kLeaked, .device = {DeviceKind::kCuda, device}, .allow_mapped_host = mapped_host});
        });
      });
    }
  }
}

// `request` differs between ranks: all throw kMismatch with `parts`, and leave nothing.
void check_mismatch(const std::function<WindowRequest(int rank)>& request, const std::vector<std::string>& parts) {
  for (const RankKind kind : {RankKind::kThreads, RankKind::kProcesses}) {
    run_on_gpus(kind, 3, [&](const Group& group) {
      check_leaves_nothing(group, 0, [&] {
        const auto window = allocate(request(group.rank()));
        check_throws(ErrorCode::kMismatch, parts, [&] { window->connect(group, kDeadline); });
        group.barrier(kDeadline);
      });
    });
  }
}

TEST(GpuWindowFailure, SizesMustAgree) {
  TOKENYARD_NEEDS_DEVICES(1);
  check_mismatch([](int rank) { return request_of(rank == 1 ? kLeaked + 1 : kLeaked, 0); },
                 {"rank 1", std::to_string(kLeaked), std::to_string(kLeaked + 1)});
}

TEST(GpuWindowFailure, PlacesOfMemoryMustAgree) {
  TOKENYARD_NEEDS_DEVICES(1);
  check_mismatch(
      [](int rank) {
        return WindowRequest{.bytes = kLeaked, .device = {DeviceKind::kCuda, 0}, .allow_mapped_host = rank == 2};
      },
      {"rank 2", "mapped host memory", "allow_mapped_host"});
}

TEST(GpuWindowFailure, ARankThatDiesBeforeConnectIsNamed) {
  TOKENYARD_NEEDS_DEVICES(1);
  const int num_devices = machine().num_devices;
  run_on_gpus(RankKind::kProcesses, 3, [&](const Group& group) {
    const int device = group.rank() % num_devices;
    require(cudaSetDevice(device), "cudaSetDevice");
    auto window = allocate(request_of(kLeaked, device));
    group.barrier(kDeadline);
    if (group.rank() == 2) ::_exit(0);
    const support::Stopwatch watch;
    check_throws(ErrorCode::kPeerLost, {"rank 2"}, [&] { window->connect(group, kDeadline); });
    watch.check_below(std::chrono::milliseconds(20'000), "noticing the death");
    window.reset();
    // What the window held is there again, for this rank at least.
    const std::size_t free = device_bytes().free;
    const auto again = allocate(request_of(kLeaked, device));
    check(device_bytes().free < free, "a window takes no memory");
  });
}

// Each process sees only the device of its own, as launchers often set it up.
void hide_other_devices(int rank) {
  check(::setenv("CUDA_VISIBLE_DEVICES", std::to_string(rank).c_str(), 1) == 0, "setenv failed");
}

TEST(GpuWindowFailure, HiddenDevicesAreNamed) {
  TOKENYARD_NEEDS_DEVICES(2);
  run_on_gpus(RankKind::kProcesses, 2, [](const Group& group) {
    hide_other_devices(group.rank());
    const auto window = allocate(request_of(4096, 0));
    check_throws(ErrorCode::kUnsupported,
                 {"no peer access between device 0 (", "of rank 0", "of rank 1", "CUDA_VISIBLE_DEVICES hides it"},
                 [&] { window->connect(group, kDeadline); });
    group.barrier(kDeadline);
  });
}

TEST(GpuWindowFailure, ADeviceHiddenFromOneRankIsEverybodysFailure) {
  TOKENYARD_NEEDS_DEVICES(2);
  run_on_gpus(RankKind::kProcesses, 2, [](const Group& group) {
    if (group.rank() == 1) hide_other_devices(1);
    const auto window = allocate(request_of(4096, 0));
    check_throws(group.rank() == 1 ? ErrorCode::kUnsupported : ErrorCode::kPeerFailed,
                 {"rank 1: no peer access between device 0 (", "CUDA_VISIBLE_DEVICES"},
                 [&] { window->connect(group, kDeadline); });
    group.barrier(kDeadline);
  });
}

TEST(GpuWindowFailure, MappedHostMemoryReachesHiddenDevices) {
  TOKENYARD_NEEDS_DEVICES(2);
  run_on_gpus(RankKind::kProcesses, 2, [](const Group& group) {
    hide_other_devices(group.rank());
    const auto window =
        make_window(group, {.bytes = 5000, .device = {DeviceKind::kCuda, 0}, .allow_mapped_host = true});
    play_with_window(group, *window);
  });
}

TEST(GpuWindowFailure, AForkAfterTheFirstUseIsRefused) {
  TOKENYARD_NEEDS_DEVICES(1);
  run_on_gpus(RankKind::kProcesses, 1, [](const Group&) {
    check(find_fabric(DeviceKind::kCuda).probe().state == Support::State::kUsable, "CUDA is not usable");
    support::run_processes(1, [](const Group&) {
      check_throws(ErrorCode::kUnsupported, {"forked", "fork first"}, [] { (void)allocate(request_of(1, 0)); });
      check(find_fabric(DeviceKind::kCuda).probe().state == Support::State::kUnusable, "usable after fork");
    });
  });
}

}  // namespace
}  // namespace tokenyard::gpu_tests
