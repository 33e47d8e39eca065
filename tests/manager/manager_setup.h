// SPDX-License-Identifier: Apache-2.0
// What the manager's tests share: options with short deadlines, strategies that put the backends of every build under
// each scheme, and what a process holds.
// Thread rule: pure functions; `memfd_mappings` reads the whole process.
#pragma once

#include <array>
#include <cstdint>
#include <fstream>
#include <string>

#include "tokenyard/manager.h"

#include "manager/state.h"
#include "support/round.h"

namespace tokenyard::manager_tests {

inline ManagerOptions options_for(const Group& group) {
  return {.group = group, .communication = support::test_options()};
}

// Compact rows whose window is sized by the request: shared handles of which there may be several, on a backend that
// has a budget of SMs, in every build.
inline manager::Wanted sized_by_request(const manager::Asked& asked) {
  manager::Wanted wanted{.params = asked.params, .config = asked.config};
  wanted.params.max_tokens_per_rank = asked.request.max_num_tokens_per_dp_rank.value_or(0);
  wanted.params.hidden_size = asked.request.token_hidden_size.value_or(0);
  return wanted;
}

inline constexpr std::array<std::string_view, 2> kSharedArguments{"max_num_tokens_per_dp_rank", "token_hidden_size"};
inline constexpr std::array<std::string_view, 1> kSharedUnkeyed{"HighThroughputConfig::max_num_sms"};

inline constexpr manager::Strategy kShared{.backend = "high_throughput",
                                           .scheme = manager::Scheme::kShared,
                                           .required = kSharedArguments,
                                           .wanted = sized_by_request,
                                           .unkeyed = kSharedUnkeyed};

inline constexpr manager::Strategy kBySizes{.backend = "one_sided", .scheme = manager::Scheme::kBySizes};

// `high_throughput` as its users make it: handles without arguments, from a byte budget.
inline ManagerOptions budget_options(const Group& group) {
  ManagerOptions options = options_for(group);
  options.knobs.high_throughput_buffer_mebibytes = 1;
  return options;
}

inline ManagerOptions shared_options(const Group& group) {
  ManagerOptions options = options_for(group);
  options.params = {.num_experts = 8, .top_k = 2};
  return options;
}

inline HandleRequest sized(int tokens, int hidden) {
  return {.max_num_tokens_per_dp_rank = tokens, .token_hidden_size = hidden};
}

// Windows that this process maps: one for each rank of a communication, as threads share their mappings.
inline std::int64_t memfd_mappings() {
  std::int64_t count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    count += line.find("memfd:") != std::string::npos ? 1 : 0;
  return count;
}

}  // namespace tokenyard::manager_tests
