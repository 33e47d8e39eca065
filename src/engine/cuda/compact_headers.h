// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other before rows go to final places: a part of the window that only the CUDA engine has, made
// of units that tell of their own arrival (tagged_units.h), so that nothing is released or acquired on the way.
//
//   unit 0     the digest of what must agree
//   unit 1     the argument that must agree
//   unit 2     tokens of the source, and the status of its operation
//   then       rows for each rank, two a unit
//   last       rows for each expert of this rank, two a unit; these come later than the others, and only who waits for
//              counts on the host looks at them
#pragma once

#include <cstdint>

#include "engine/cuda/tagged_units.h"
#include "protocol/host_device.h"
#include "protocol/layout.h"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {

// [kHeaderSlots, num_ranks, units of a source]
struct CompactHeaders {
  static constexpr int kFirstCounts = 3;

  std::int64_t start = 0;  // in the window
  int num_ranks = 1;
  int units = 0;         // of a header
  int expert_units = 0;  // behind it

  TOKENYARD_HD static constexpr CompactHeaders of(const protocol::WindowLayout& layout, int num_experts) {
    const protocol::WindowShape& shape = layout.shape();
    CompactHeaders headers{.start = layout.bytes(), .num_ranks = shape.num_ranks};
    if (shape.placement != protocol::Placement::kCompact || shape.queue_bytes > 0) return headers;
    headers.units = kFirstCounts + units_of(shape.num_ranks);
    // Rank 0 owns as many experts as any.
    headers.expert_units = units_of(protocol::num_local_experts(num_experts, shape.num_ranks, 0));
    return headers;
  }

  TOKENYARD_HD constexpr std::int64_t bytes() const {
    return std::int64_t{protocol::kHeaderSlots} * num_ranks * source_bytes();
  }

  TOKENYARD_HD constexpr std::int64_t unit(int slot, int source, int index) const {
    return start + (static_cast<std::int64_t>(slot) * num_ranks + source) * source_bytes() + index * kTaggedBytes;
  }

 private:
  TOKENYARD_HD static constexpr int units_of(int words) {
    return static_cast<int>(protocol::ceil_div(words, kTaggedWords));
  }

  TOKENYARD_HD constexpr std::int64_t source_bytes() const {
    return protocol::align_up((units + expert_units) * kTaggedBytes, protocol::kLineBytes);
  }
};

}  // namespace tokenyard::engine::cuda
