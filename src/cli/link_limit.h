// SPDX-License-Identifier: Apache-2.0
// What the link of a device can do at best, in each direction while the other is as busy; what rounds are compared
// with. Thread rule: plain data.
#pragma once

#include <string>
#include <string_view>

namespace tokenyard::cli {

// A link of the kind that figures are for carries more; below it, something else uses it or it is not what it should
// be, and all figures of the run are void.
inline constexpr double kSoundLink = 350;

struct LinkLimit {
  // Gigabytes a second; 0 where there is no link.
  double gb_per_s = 0;
  std::string reason;  // why there is none

  [[nodiscard]] bool there() const { return gb_per_s > 0; }

  [[nodiscard]] bool sound() const { return gb_per_s >= kSoundLink; }

  [[nodiscard]] std::string_view state() const {
    if (!there()) return "no link";
    return sound() ? "sound" : "void";
  }
};

}  // namespace tokenyard::cli
