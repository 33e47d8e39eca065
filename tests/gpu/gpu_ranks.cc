// SPDX-License-Identifier: Apache-2.0
#include "gpu/gpu_ranks.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>

#include "fabric/cuda/context.h"
#include "fabric/window.h"
#include "support/check.h"
#include "system/file_descriptor.h"

namespace tokenyard::gpu_tests {
namespace {

using support::check;
using support::RankKind;
using support::RunOptions;

constexpr RunOptions kOptions{.limit = std::chrono::seconds(110), .group_deadline = kDeadline};

void check_cuda_is_untouched() {
  void* driver = ::dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  if (driver != nullptr) ::dlclose(driver);
  check(driver == nullptr, "the CUDA driver is loaded in the process that forks the ranks");
}

// "2 " or "0 reason".
std::string look() {
  const Support support = fabric::find_fabric(DeviceKind::kCuda).probe();
  if (support.state != Support::State::kUsable) return "0 " + support.reason;
  const fabric::cuda::Driver& cu = fabric::cuda::driver();
  int usable = 0;
  for (int index = 0; index < fabric::cuda::device_count(cu); ++index) {
    CUdevice device = 0;
    fabric::cuda::require(cu, cu.device_get(&device, index), "cuDeviceGet");
    if (!fabric::cuda::missing_for_windows(cu, device).empty()) break;
    ++usable;
  }
  return std::to_string(usable) + " the first that cannot hold windows ends the count";
}

Machine look_in_child() {
  check_cuda_is_untouched();
  std::array<int, 2> ends{};
  check(::pipe2(ends.data(), O_CLOEXEC) == 0, "pipe2 failed");
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  check(pid >= 0, "fork failed");
  if (pid == 0) {
    std::string text = "0 looking for devices failed";
    try {
      text = look();
    } catch (const std::exception& error) {
      text = std::string("0 ") + error.what();
    }
    const bool told = ::write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size());
    ::_exit(told ? 0 : 1);
  }
  ::close(ends[1]);
  const system::FileDescriptor from(ends[0]);
  std::string text;
  std::array<char, 512> part{};
  for (ssize_t got = 0; (got = ::read(from.get(), part.data(), part.size())) > 0;)
    text.append(part.data(), static_cast<std::size_t>(got));
  ::waitpid(pid, nullptr, 0);
  const std::size_t space = text.find(' ');
  check(space != std::string::npos, "the child that looked for devices said nothing");
  return {.num_devices = std::stoi(text), .unusable = text.substr(space + 1)};
}

}  // namespace

const Machine& machine() {
  static const Machine found = look_in_child();
  return found;
}

void run_on_gpus(RankKind kind, int num_ranks, const support::RankFunction& fn) {
  check_cuda_is_untouched();
  if (kind == RankKind::kProcesses) return support::run_processes(num_ranks, fn, kOptions);
  support::run_processes(
      1, [&](const Group&) { support::run_ranks(num_ranks, fn, kOptions); }, kOptions);
}

}  // namespace tokenyard::gpu_tests
