// SPDX-License-Identifier: Apache-2.0
#include "cli/cuda/devices.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <new>

#include "tokenyard/error.h"

#include "cli/ranks.h"
#include "fabric/cuda/driver.h"
#include "fabric/window.h"
#include "system/segment.h"

namespace tokenyard::cli {
namespace {

using Text = std::array<char, 512>;

// In memory that the process that asks shares with this one.
struct Answer {
  Text reason{};  // why there is none
  int count = 0;
  std::array<std::array<char, 128>, 64> names{};
};

template <std::size_t size>
void put(std::array<char, size>& to, std::string_view text) {
  const std::size_t length = std::min(text.size(), size - 1);
  std::copy_n(text.begin(), length, to.begin());
  to[length] = '\0';
}

void look(Answer& answer) {
  const Support support = fabric::find_fabric(DeviceKind::kCuda).probe();
  if (support.state != Support::State::kUsable) return put(answer.reason, support.reason);
  fabric::cuda::require(cudaGetDeviceCount(&answer.count), "cudaGetDeviceCount");
  answer.count = std::min(answer.count, static_cast<int>(answer.names.size()));
  for (int device = 0; device < answer.count; ++device) {
    cudaDeviceProp properties{};
    fabric::cuda::require(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    put(answer.names[static_cast<std::size_t>(device)], properties.name);
  }
  if (answer.count == 0) put(answer.reason, "there is no CUDA device");
}

}  // namespace

std::vector<std::string> cuda_devices() {
  const auto memory = system::Segment::create(sizeof(Answer));
  auto* answer = new (memory.data()) Answer;
  run_ranks(RankKind::kProcesses, 1, [&](const Group& /*group*/) {
    try {
      look(*answer);
    } catch (const std::exception& error) {
      put(answer->reason, error.what());
      answer->count = 0;
    }
  });
  if (answer->count == 0) {
    throw Error(ErrorCode::kUnsupported, std::string("--engine cuda cannot be used here: ") + answer->reason.data());
  }
  std::vector<std::string> names;
  names.reserve(static_cast<std::size_t>(answer->count));
  for (int device = 0; device < answer->count; ++device)
    names.emplace_back(answer->names[static_cast<std::size_t>(device)].data());
  return names;
}

}  // namespace tokenyard::cli
