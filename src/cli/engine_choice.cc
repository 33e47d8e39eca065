// SPDX-License-Identifier: Apache-2.0
#include "cli/engine_choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <numeric>

#include <CLI/CLI.hpp>

#include "tokenyard/error.h"

#include "cli/cuda/devices.h"

namespace tokenyard::cli {

void add_engine_options(CLI::App& command, EngineOptions& options) {
  const std::map<std::string, EngineKind> kinds{{"host", EngineKind::kHost}, {"cuda", EngineKind::kCuda}};
  command.add_option("--engine", options.kind, "What moves the rows: host or cuda")
      ->transform(CLI::CheckedTransformer(kinds))
      ->default_str("host");
  CLI::Option* list = command.add_option("--device", options.devices, "cuda: devices, over which ranks go round robin")
                          ->delimiter(',')
                          ->check(CLI::NonNegativeNumber);
  command.add_option("--num-devices", options.num_devices, "cuda: the first N devices; default: all")
      ->check(CLI::PositiveNumber)
      ->excludes(list);
  command.add_flag("--mapped-host", options.mapped_host,
                   "cuda: windows in pinned host memory, for devices without peer access to each other");
}

std::string describe_devices(const EngineChoice& choice) {
  if (choice.on_host()) return {};
  return fmt::format(" on {} ({})", choice.device_name, fmt::join(choice.devices, ", "));
}

EngineChoice choose_engine(const EngineOptions& options) {
  EngineChoice choice{.kind = options.kind,
                      .devices = options.devices,
                      .device_name = {},
                      .num_sms = 0,
                      .mapped_host = options.mapped_host};
  if (choice.on_host()) {
    if (options.devices.empty() && options.num_devices == 0 && !options.mapped_host) return choice;
    throw Error(ErrorCode::kInvalidArgument, "--device, --num-devices and --mapped-host are for --engine cuda");
  }
  const CudaDevices there = cuda_devices();
  const auto count = static_cast<int>(there.names.size());
  if (options.num_devices > count) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--num-devices is {}; this machine has {}", options.num_devices, count));
  }
  if (choice.devices.empty()) {
    choice.devices.resize(static_cast<std::size_t>(options.num_devices > 0 ? options.num_devices : count));
    std::iota(choice.devices.begin(), choice.devices.end(), 0);
  }
  for (const int device : choice.devices) {
    if (device < count) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--device has {}; this machine has devices 0 to {}", device, count - 1));
  }
  choice.device_name = there.names[static_cast<std::size_t>(choice.devices.front())];
  choice.num_sms = there.num_sms;
  return choice;
}

}  // namespace tokenyard::cli
