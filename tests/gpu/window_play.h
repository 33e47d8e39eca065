// SPDX-License-Identifier: Apache-2.0
// One rank's part of what all ranks do with windows: each in turn writes everybody's, and all look at all.
// Thread rule: collective; called by one thread of each rank.
#pragma once

#include <cstdint>
#include <memory>

#include "tokenyard/group.h"

#include "fabric/window.h"

namespace tokenyard::gpu_tests {

// Allocated and connected, its device the thread's current one.
[[nodiscard]] std::unique_ptr<fabric::Window> make_window(const Group& group, const fabric::WindowRequest& request);

// Throws support::CheckFailure at the first byte that is not as it should be. Nobody reads any more on return.
void play_with_window(const Group& group, const fabric::Window& window);

// The pattern that the turns of play_with_window leave in `owner`'s window.
[[nodiscard]] std::uint64_t last_seed(int num_ranks, int owner);

}  // namespace tokenyard::gpu_tests
