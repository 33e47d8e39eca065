// SPDX-License-Identifier: Apache-2.0
#include "cli/cuda/devices.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "tokenyard/error.h"

#include "cli/cuda/own_process.h"
#include "fabric/cuda/driver.h"
#include "fabric/window.h"

namespace tokenyard::cli {
namespace {

struct Answer {
  std::array<char, 512> reason{};  // why there is none
  int count = 0;
  int num_sms = 0;
  std::array<std::array<char, 128>, 64> names{};
};

void look(Answer& answer) {
  const Support support = fabric::find_fabric(DeviceKind::kCuda).probe();
  if (support.state != Support::State::kUsable) return put(answer.reason, support.reason);
  int count = 0;
  fabric::cuda::require(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  count = std::min(count, static_cast<int>(answer.names.size()));
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    fabric::cuda::require(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    put(answer.names[static_cast<std::size_t>(device)], properties.name);
    const int fewer = answer.num_sms == 0 ? properties.multiProcessorCount : answer.num_sms;
    answer.num_sms = std::min(fewer, properties.multiProcessorCount);
  }
  answer.count = count;
  if (count == 0) put(answer.reason, "there is no CUDA device");
}

}  // namespace

CudaDevices cuda_devices() {
  // As many queues as CUDA takes, unless the caller said how many: streams of ranks that are threads wait for each
  // other where they share one. Read when CUDA starts.
  static_cast<void>(::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0));
  const auto answer = ask_in_own_process<Answer>(look);
  if (answer.count == 0) {
    throw Error(ErrorCode::kUnsupported, std::string("--engine cuda cannot be used here: ") + answer.reason.data());
  }
  CudaDevices devices{.names = {}, .num_sms = answer.num_sms};
  for (int device = 0; device < answer.count; ++device)
    devices.names.emplace_back(answer.names[static_cast<std::size_t>(device)].data());
  return devices;
}

}  // namespace tokenyard::cli
