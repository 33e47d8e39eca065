// SPDX-License-Identifier: Apache-2.0
// The version of these headers and of the library that was linked.
#pragma once

#include <string_view>

namespace tokenyard {

inline constexpr int kVersionMajor = 0;
inline constexpr int kVersionMinor = 1;
inline constexpr int kVersionPatch = 0;

// "0.1.0", of the library linked.
[[nodiscard]] std::string_view version();

}  // namespace tokenyard
