// SPDX-License-Identifier: Apache-2.0
// The one place that waits for HighThroughputConfig::{buffer_bytes, intra_host_only}: communications made from a byte
// budget alone. It switches itself on when the config has both fields; until then get_handle of `high_throughput`
// says so. ManagerOptions::params go along as they are.
// Thread rule: pure.
#pragma once

#include <string_view>

#include "tokenyard/error.h"
#include "tokenyard/manager.h"

namespace tokenyard::manager {

template <class Config>
concept TakesByteBudget = requires(Config config) {
  config.buffer_bytes;
  config.intra_host_only;
};

inline constexpr bool kByteBudget = TakesByteBudget<HighThroughputConfig>;

inline constexpr std::string_view kNoByteBudget =
    "this build makes no communication from a byte budget alone; use create_communication with its params";

template <class Config>
[[nodiscard]] Config with_byte_budget(Config config, const ManagerKnobs& knobs) {
  if constexpr (TakesByteBudget<Config>) {
    config.buffer_bytes = knobs.high_throughput_buffer_mebibytes << 20;
    config.intra_host_only = knobs.high_throughput_intra_host_only;
  } else {
    (void)knobs;
  }
  return config;
}

}  // namespace tokenyard::manager
