// SPDX-License-Identifier: Apache-2.0
// What lines of JSON say of devices. Thread rule: pure functions.
#pragma once

#include <nlohmann/json.hpp>

#include "cli/engine_choice.h"

namespace tokenyard::cli {

// Nothing on the host.
inline void add_devices(nlohmann::ordered_json& line, const EngineChoice& engine) {
  if (engine.on_host()) return;
  line["device"] = engine.device_name;
  line["devices"] = engine.devices;
}

}  // namespace tokenyard::cli
