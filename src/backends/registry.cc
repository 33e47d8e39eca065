// SPDX-License-Identifier: Apache-2.0
#include "backends/registry.h"

#include <array>

#include "tokenyard/error.h"

// One line a backend: each folder defines `const communication::Backend& NAME()`. Taking out a line and its folder
// takes out the backend.
#define TOKENYARD_BACKENDS(BACKEND) \
  BACKEND(all_gather)               \
  BACKEND(high_throughput)          \
  BACKEND(low_latency)              \
  BACKEND(one_sided)                \
  BACKEND(two_sided)                \
  BACKEND(passthrough)

namespace tokenyard::registry {

#define TOKENYARD_DECLARE(name) const communication::Backend& name();
TOKENYARD_BACKENDS(TOKENYARD_DECLARE)
#undef TOKENYARD_DECLARE

std::span<const communication::Backend* const> all() {
#define TOKENYARD_ADDRESS(name) &name(),
  static const std::array entries{TOKENYARD_BACKENDS(TOKENYARD_ADDRESS)};
#undef TOKENYARD_ADDRESS
  return entries;
}

const communication::Backend& backend_of(const BackendConfig& config) {
  for (const communication::Backend* backend : all()) {
    if (backend->info.default_config.index() == config.index()) return *backend;
  }
  throw Error(ErrorCode::kUnsupported, "this build leaves out the backend that this config belongs to");
}

}  // namespace tokenyard::registry
