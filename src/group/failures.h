// SPDX-License-Identifier: Apache-2.0
// The errors that collectives of every kind of group throw, worded once.
// Thread rule: pure.
#pragma once

#include <chrono>
#include <span>
#include <string>

#include "tokenyard/error.h"

namespace tokenyard::group {

// "rank 3", "ranks 1, 2 and 5"; a long list is cut and its rest counted.
[[nodiscard]] std::string name_ranks(std::span<const int> ranks);

// `what` is "all_gather" or "joining group 'x'".
[[nodiscard]] Error timeout_error(const std::string& what,
                                  int rank,
                                  std::chrono::milliseconds waited,
                                  std::span<const int> missing);
[[nodiscard]] Error peer_lost_error(int rank, int peer);
[[nodiscard]] Error too_far_ahead_error(int rank, std::span<const int> behind);

}  // namespace tokenyard::group
