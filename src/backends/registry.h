// SPDX-License-Identifier: Apache-2.0
// The list of backends as the rest of the library sees it: data and pure functions.
#pragma once

#include <span>

#include "communication/backend.h"

namespace tokenyard::registry {

[[nodiscard]] std::span<const communication::Backend* const> all();
// The backend that a config struct belongs to. Throws kUnsupported when this build leaves it out.
[[nodiscard]] const communication::Backend& backend_of(const BackendConfig& config);

}  // namespace tokenyard::registry
