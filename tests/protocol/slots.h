// SPDX-License-Identifier: Apache-2.0
// Every slot of a window, asked of the layout one by one, and whether they are disjoint, aligned and inside.
// Works at compile time too. Thread rule: pure functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "protocol/layout.h"
#include "protocol/queue_layout.h"

namespace tokenyard::protocol {

struct Slot {
  std::int64_t begin = 0;
  std::int64_t bytes = 0;
  std::int64_t alignment = 1;
};

// What has `depth` slots, in one of them.
template <class Visit>
constexpr void for_each_row(const WindowLayout& layout, int slot, Visit&& visit) {
  const WindowShape& shape = layout.shape();
  for (int source = 0; source < shape.num_ranks; ++source) {
    if (shape.given_weights_row_bytes > 0) {
      visit(Slot{layout.given_weights(source, slot), shape.max_tokens * shape.given_weights_row_bytes, 4});
    }
    if (shape.queue_bytes > 0) continue;  // neither lines of chunks nor places for rows
    for (std::int64_t chunk = 0; chunk < layout.max_chunks(); ++chunk)
      visit(Slot{layout.chunk(source, chunk, slot), sizeof(ChunkLine), sizeof(ChunkLine)});
    // Two sources must not write to one line of the cache.
    if (layout.max_chunks() > 0)
      visit(Slot{align_up(layout.chunk(source, layout.max_chunks() - 1, slot) + 16, kLineBytes), 0, kLineBytes});
    if (source < layout.num_spaces())
      visit(Slot{layout.payload(source, slot), layout.payload_bytes(), kPlaneAlignment});
  }
  for (std::int64_t row = 0; row < layout.combine_rows() && shape.queue_bytes == 0; ++row) {
    if (shape.combine_row_bytes > 0) visit(Slot{layout.combine_row(row, slot), shape.combine_row_bytes, kRowAlignment});
    if (shape.weights_row_bytes > 0) visit(Slot{layout.weights_row(row, slot), shape.weights_row_bytes, kRowAlignment});
  }
}

// Of a window of queues.
template <class Visit>
constexpr void for_each_slot(const QueueLayout& layout, Visit&& visit) {
  for (int peer = 0; peer < layout.num_ranks(); ++peer)
    visit(Slot{layout.life(peer), kLineBytes, kLineBytes});
  for (int phase = kDispatchPhase; phase <= kCombinePhase; ++phase) {
    for (int peer = 0; peer < layout.num_ranks(); ++peer) {
      visit(Slot{layout.begun(phase, peer), kLineBytes, kLineBytes});
      visit(Slot{layout.filled(phase, peer), kLineBytes, kLineBytes});
      visit(Slot{layout.drained(phase, peer), kLineBytes, kLineBytes});
      visit(Slot{layout.queue(phase, peer), layout.queue_bytes(), kSectionAlignment});
    }
  }
}

// Calls visit(Slot) for all lines, rows and payload spaces. Sections that the shape has no use for have no slots.
template <class Visit>
constexpr void for_each_slot(const WindowLayout& layout, Visit&& visit) {
  const WindowShape& shape = layout.shape();
  const int ranks = shape.num_ranks;
  for (int peer = 0; peer < ranks && shape.queue_bytes == 0; ++peer)
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
    for (std::int64_t chunk = 0; chunk < layout.max_chunks() && shape.queue_bytes == 0; ++chunk)
      visit(Slot{layout.staged(source, chunk), 8, 8});
    if (shape.stats_entries > 0) visit(Slot{layout.stats(source), 4 * shape.stats_entries, kLineBytes});
  }
  for (int slot = 0; slot < shape.depth; ++slot)
    for_each_row(layout, slot, visit);
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
