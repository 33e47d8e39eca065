// SPDX-License-Identifier: Apache-2.0
// What a backend's folder provides: data and pure functions. The communication knows no backend by name.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tokenyard/backends.h"

#include "protocol/layout.h"
#include "protocol/round_spec.h"

namespace tokenyard::communication {

// A field of a config as text, for comparing it between ranks.
using Fields = std::vector<std::pair<std::string, std::string>>;

// How the engines run a configured backend.
struct Plan {
  protocol::RoundSpec spec{};
  protocol::WindowShape shape{};
  std::int64_t gpu_queue_bytes = 0;  // of the shape's queues where windows are in a GPU's memory; 0: as on the host
  int max_num_sms = 0;               // cap of SmBudget; 0: the backend has no such interface
  bool one_host = false;             // ranks on other hosts are refused
  bool stats_cover_all = false;      // statistics have exactly WindowShape::stats_entries, or are not given
};

struct Backend {
  BackendInfo info{};
  // Throws kInvalidArgument for a config that makes no sense, kUnsupported for a backend that moves nothing. `params`
  // are valid.
  Plan (*plan)(const MoeParams& params, const BackendConfig& config, int num_ranks) = nullptr;
  Fields (*fields)(const BackendConfig& config) = nullptr;
  // The config with room for `extra` bytes a token; only where Contract::grows.
  BackendConfig (*with_extra_capacity)(const BackendConfig& config, std::int64_t extra) = nullptr;
  std::int64_t (*extra_capacity)(const BackendConfig& config) = nullptr;
  // Bytes that the window has whatever the params say, or 0; only where windows may be made so.
  std::int64_t (*byte_budget)(const BackendConfig& config) = nullptr;
};

// Of a window, and of a dispatch's results. No memory is larger, and sums of a few such sizes fit 64 bits.
inline constexpr std::int64_t kMaxWindowBytes = kMaxTensorBytes;

// Bytes that one rank provides: its window and, where rows cross in queues, that of the queues.
[[nodiscard]] std::int64_t window_bytes(const Plan& plan);
// Bytes of the largest dispatch output of one rank.
[[nodiscard]] std::int64_t output_bytes(const MoeParams& params, const protocol::WindowLayout& layout);

// The backend's plan. Throws what `validate` and the backend throw, and kInvalidArgument for a number of ranks that no
// group has and for a window or results that no memory can hold.
[[nodiscard]] Plan plan_checked(const Backend& backend,
                                const MoeParams& params,
                                const BackendConfig& config,
                                int num_ranks);

// The parts of a window's shape that follow from the params alone.
[[nodiscard]] protocol::WindowShape base_shape(const MoeParams& params, protocol::Placement placement, int num_ranks);

}  // namespace tokenyard::communication
