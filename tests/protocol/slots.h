// SPDX-License-Identifier: Apache-2.0
// Every slot of a window, asked of the layout one by one, and whether they are disjoint, aligned and inside.
// Works at compile time too. Thread rule: pure functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "protocol/layout.h"

namespace tokenyard::protocol {

struct Slot {
  std::int64_t begin = 0;
  std::int64_t bytes = 0;
  std::int64_t alignment = 1;
};

// Calls visit(Slot) for all lines, rows and payload spaces. Sections that the shape has no use for have no slots.
template <class Visit>
constexpr void for_each_slot(const WindowLayout& layout, Visit&& visit) {
  const WindowShape& shape = layout.shape();
  const int ranks = shape.num_ranks;
  for (int peer = 0; peer < ranks; ++peer)
    visit(Slot{layout.life(peer), kLineBytes, kLineBytes});
  for (int phase = 0; phase < kNumPhases; ++phase) {
    for (int peer = 0; peer < ranks; ++peer) {
      visit(Slot{layout.released(phase, peer), kLineBytes, kLineBytes});
      for (int slot = 0; slot < kHeaderSlots; ++slot)
        visit(Slot{layout.header(phase, slot, peer), sizeof(HeaderLine), alignof(HeaderLine)});
    }
  }
  for (int source = 0; source < ranks; ++source) {
    for (int slot = 0; slot < kHeaderSlots && counts_first(shape.placement); ++slot)
      visit(Slot{layout.counts(slot, source), std::int64_t{4} * ranks, kLineBytes});
    for (std::int64_t chunk = 0; chunk < layout.max_chunks(); ++chunk)
      visit(Slot{layout.chunk(source, chunk), sizeof(ChunkLine), sizeof(ChunkLine)});
    // Two sources must not write to one line of the cache.
    if (layout.max_chunks() > 0)
      visit(Slot{align_up(layout.chunk(source, layout.max_chunks() - 1) + 16, kLineBytes), 0, kLineBytes});
    if (shape.stats_entries > 0) visit(Slot{layout.stats(source), 4 * shape.stats_entries, kLineBytes});
    if (source == 0 || shape.placement == Placement::kRankMajor)
      visit(Slot{layout.payload(source), layout.payload_bytes(), kPlaneAlignment});
  }
  for (std::int64_t row = 0; row < layout.combine_rows(); ++row) {
    if (shape.combine_row_bytes > 0) visit(Slot{layout.combine_row(row), shape.combine_row_bytes, kRowAlignment});
    if (shape.weights_row_bytes > 0) visit(Slot{layout.weights_row(row), shape.weights_row_bytes, kRowAlignment});
  }
}

// Sorts them. Inside means in [0, bytes).
constexpr bool disjoint_aligned_inside(std::span<Slot> slots, std::int64_t bytes) {
  std::sort(slots.begin(), slots.end(),
            [](const Slot& a, const Slot& b) { return a.begin != b.begin ? a.begin < b.begin : a.bytes < b.bytes; });
  std::int64_t end = 0;
  for (const Slot& slot : slots) {
    if (slot.begin < end || slot.begin % slot.alignment != 0) return false;
    end = slot.begin + slot.bytes;
  }
  return end <= bytes;
}

}  // namespace tokenyard::protocol
