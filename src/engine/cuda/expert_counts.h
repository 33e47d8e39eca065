// SPDX-License-Identifier: Apache-2.0
// Where ranks tell each other, with the counts of a dispatch to final places, how many rows each expert gets: a part of
// the window that only the CUDA engine has, so that a rank knows its experts' rows before the rows come. Told by the
// dispatch header.
#pragma once

#include <cstdint>

#include "protocol/host_device.h"
#include "protocol/layout.h"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {

// [kHeaderSlots, num_ranks, experts of a rank] i32, a line or more for each source.
struct ExpertCounts {
  std::int64_t start = 0;  // in the window
  std::int64_t stride = 0;
  int num_ranks = 1;

  TOKENYARD_HD static constexpr ExpertCounts of(const protocol::WindowLayout& layout, int num_experts) {
    const protocol::WindowShape& shape = layout.shape();
    ExpertCounts counts{.start = layout.bytes(), .stride = 0, .num_ranks = shape.num_ranks};
    if (shape.placement != protocol::Placement::kCompact || shape.queue_bytes > 0) return counts;
    // Rank 0 owns as many experts as any.
    const std::int64_t experts = protocol::num_local_experts(num_experts, shape.num_ranks, 0);
    counts.stride = protocol::align_up(experts * 4, protocol::kLineBytes);
    return counts;
  }

  TOKENYARD_HD constexpr std::int64_t bytes() const {
    return std::int64_t{protocol::kHeaderSlots} * num_ranks * stride;
  }

  TOKENYARD_HD constexpr std::int64_t at(int slot, int source) const {
    return start + (static_cast<std::int64_t>(slot) * num_ranks + source) * stride;
  }
};

}  // namespace tokenyard::engine::cuda
