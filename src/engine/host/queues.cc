// SPDX-License-Identifier: Apache-2.0
#include "engine/host/queues.h"

namespace tokenyard::engine::host {

Queues::Queues(const Setup& setup, const std::vector<WindowView>& windows)
    : windows_(windows), rank_(setup.rank), queue_bytes_(setup.layout.queue_bytes()) {
  to_.resize(windows.size());
  from_.resize(windows.size());
}

void Queues::begin(protocol::PhaseIndex phase, std::uint32_t epoch, std::int64_t entry_bytes) {
  phase_ = phase;
  epoch_ = epoch;
  entry_bytes_ = entry_bytes;
  num_entries_ = queue_bytes_ / entry_bytes;
  // The two sides work at once when a part of the ring is told of while the rest is being filled.
  batch_ = std::max<std::int64_t>(1, num_entries_ / 4);
  std::ranges::fill(to_, Progress{});
  std::ranges::fill(from_, Progress{});
}

}  // namespace tokenyard::engine::host
