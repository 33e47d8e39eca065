// SPDX-License-Identifier: Apache-2.0
// The text that tells hosts apart.
// Thread rule: callable from any thread.
#pragma once

#include <string>

namespace tokenyard::system {

// Equal for all processes of one running kernel, containers among them, and different on every other host.
[[nodiscard]] std::string host_identity();

}  // namespace tokenyard::system
