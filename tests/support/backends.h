// SPDX-License-Identifier: Apache-2.0
// Which backends the suites drive, and a communication of one for the world of a test.
// Thread rule: pure functions; `communication_for` is collective over the group.
#pragma once

#include <array>
#include <numeric>
#include <string_view>
#include <vector>

#include "tokenyard/communication.h"

#include "support/round.h"
#include "support/world.h"

namespace tokenyard::support {

inline constexpr std::array<std::string_view, 5> kMovingBackends{"all_gather", "high_throughput", "low_latency",
                                                                 "one_sided", "two_sided"};

// Those of whose contract something is asked. A test that needs it is made for them and for no other, so that a skip in
// the output always is about the machine.
[[nodiscard]] inline std::vector<std::string_view> moving_backends_that(bool (*promise)(const Contract&)) {
  std::vector<std::string_view> chosen;
  for (const std::string_view backend : kMovingBackends) {
    if (promise(find_backend(backend).contract)) chosen.push_back(backend);
  }
  return chosen;
}

[[nodiscard]] inline bool takes_extras(const Contract& contract) {
  return contract.takes_extra_payloads;
}

// Otherwise ids are cargo, which nobody looks into.
[[nodiscard]] inline bool routes(const Contract& contract) {
  return contract.id_space != IdSpace::kCargo;
}

[[nodiscard]] inline bool gives_combine_input(const Contract& contract) {
  return contract.gives_combine_input;
}

[[nodiscard]] inline bool takes_any_number_of_experts(const Contract& contract) {
  return contract.num_experts_multiple_of == 1;
}

// The backend's config with room for what the world sends besides the rows.
[[nodiscard]] inline BackendConfig config_for(std::string_view backend, const WorldSpec& spec) {
  const std::int64_t extra_bytes =
      std::accumulate(spec.extra_row_bytes.begin(), spec.extra_row_bytes.end(), std::int64_t{0});
  if (backend == "all_gather") return AllGatherConfig{.extra_payload_bytes_per_token = extra_bytes};
  if (backend == "high_throughput") return HighThroughputConfig{};
  if (backend == "low_latency") return LowLatencyConfig{};
  if (backend == "two_sided") return TwoSidedConfig{};
  return OneSidedConfig{.extra_payload_bytes_per_token = extra_bytes,
                        .eplb_stats_num_experts = static_cast<int>(spec.eplb_entries),
                        .use_low_precision_combine = false};
}

[[nodiscard]] inline Communication communication_for(const Group& group,
                                                     std::string_view backend,
                                                     const WorldSpec& spec,
                                                     const CommunicationOptions& options = test_options()) {
  return create_communication(group, spec.params, config_for(backend, spec), options);
}

}  // namespace tokenyard::support
