// SPDX-License-Identifier: Apache-2.0
// The engine that a command runs on, and the devices of its ranks.
// Thread rule: call from the main thread, before anything of this process uses a device.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tokenyard/communication.h"

namespace CLI {
class App;
}  // namespace CLI

namespace tokenyard::cli {

struct EngineOptions {
  EngineKind kind = EngineKind::kHost;
  std::vector<int> devices;  // empty: the first `num_devices`
  int num_devices = 0;       // 0: all
  bool mapped_host = false;
};

// --engine, --device, --num-devices, --mapped-host
void add_engine_options(CLI::App& command, EngineOptions& options);

struct EngineChoice {
  EngineKind kind = EngineKind::kHost;
  std::vector<int> devices;  // as the CUDA runtime counts; empty for the host
  std::string device_name;   // of the first device
  int num_sms = 0;           // multiprocessors of the machine's device that has fewest; 0 for the host
  bool mapped_host = false;  // CommunicationOptions::allow_mapped_host

  [[nodiscard]] bool on_host() const { return kind == EngineKind::kHost; }

  [[nodiscard]] std::string_view engine_name() const { return on_host() ? "host" : "cuda"; }

  // Ranks go round robin over the devices; 0 on the host.
  [[nodiscard]] int device_of(int rank) const {
    return on_host() ? 0 : devices[static_cast<std::size_t>(rank) % devices.size()];
  }
};

// " on NVIDIA H200 (0, 1)" for headings; empty on the host.
[[nodiscard]] std::string describe_devices(const EngineChoice& choice);

// Throws kUnsupported with the reason where this build or machine has no such engine, and kInvalidArgument for devices
// that are not there.
[[nodiscard]] EngineChoice choose_engine(const EngineOptions& options);

}  // namespace tokenyard::cli
