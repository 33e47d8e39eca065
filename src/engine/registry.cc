// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "engine/engine.h"
#include "engine/host/host_engine.h"

namespace tokenyard::engine {

std::span<const EngineInfo> engines() {
  static constexpr std::array kEngines{
      host::kHostEngine,
  };
  return kEngines;
}

}  // namespace tokenyard::engine
