// SPDX-License-Identifier: Apache-2.0
// The layout of a window: one set of sections, the same on every rank, computed once from shapes and passed around by
// value. Sizes and offsets come from the same cursor, so they cannot disagree. Who writes what:
//
//   section            written by                       read by
//   life               peer p its own line              this rank, when it waits long (not with queues)
//   released           peer p its own line per phase    this rank, before it stores to p again
//   headers            source s its own lines           this rank
//   counts             source s its own rows            this rank (final places only)
//   chunks             source s its own lines           this rank
//   stats              source s its own row             this rank
//   payload            a space per source: source s space s; else any source, at the places the counts give
//   combine, weights   this rank                        the origins of its rows
//   given weights      origin s its own rows            this rank: weights that were not known at dispatch
//
// Lines and rows have `depth` slots; operation n of a phase uses slot n % depth. With queues (queue_layout.h), chunks,
// payload, combine and weights have no room here.
#pragma once

#include <cstdint>

#include "protocol/chunk.h"
#include "protocol/formats.h"
#include "protocol/host_device.h"
#include "protocol/planes.h"
#include "protocol/round_spec.h"
#include "protocol/stamp.h"

namespace tokenyard::protocol {

inline constexpr std::int64_t kLineBytes = 64;
inline constexpr std::int64_t kSectionAlignment = 128;

// Chunk lines of a window with a budget: 16 bytes for each 4 KiB that a rank's rows may have.
inline constexpr std::int64_t kLeastChunkLines = 4;
inline constexpr std::int64_t kBudgetPerChunkLine = 4 << 10;

// Dispatch, combine, and the weights that origins push before a combine.
enum PhaseIndex : int { kDispatchPhase, kCombinePhase, kWeightsPhase, kNumPhases };

// Everything that sizes a window.
struct WindowShape {
  int num_ranks = 1;
  int tokens_per_chunk = kMaxChunkTokens;
  std::int64_t max_tokens = 0;  // per source rank
  Placement placement = Placement::kCompact;
  int depth = 1;
  std::int64_t row_capacity = 0;    // bytes of the library's planes of one row, rounded up
  std::int64_t extra_capacity = 0;  // bytes of the extras of one row
  std::int64_t stats_entries = 0;   // i32 statistics of one source
  std::int64_t combine_row_bytes = 0;
  std::int64_t weights_row_bytes = 0;
  std::int64_t given_weights_row_bytes = 0;
  // Of one queue, which lies in a window of queues; 0: rows have places of their own. With queues, no section grows
  // with max_tokens.
  std::int64_t queue_bytes = 0;
  // Bytes of the whole window, whatever the rows need; 0: as many as they need. Sections then start at offsets that do
  // not depend on the rows: control, and of the rest one half for received rows, the other for rows of combine.
  std::int64_t budget_bytes = 0;
  // Whether 128 bytes that a GPU stores by one instruction are seen whole or not at all by another.
  bool whole_lines = true;
};

TOKENYARD_HD constexpr int slot_of(std::uint32_t epoch, int depth) {
  return static_cast<int>(epoch % static_cast<std::uint32_t>(depth));
}

// Where every section starts, in bytes from the window's start, and how its parts are strided.
class WindowLayout {
 public:
  TOKENYARD_HD static constexpr WindowLayout of(const WindowShape& shape) {
    WindowLayout layout;
    layout.shape_ = shape;
    const std::int64_t ranks = shape.num_ranks;
    const bool queued = shape.queue_bytes > 0;
    layout.life_ = layout.take(queued ? 0 : ranks * kLineBytes);
    layout.released_ = layout.take(std::int64_t{kNumPhases} * ranks * kLineBytes);
    layout.headers_ =
        layout.take(std::int64_t{kNumPhases} * kHeaderSlots * ranks * static_cast<std::int64_t>(sizeof(HeaderLine)));
    layout.counts_stride_ = counts_first(shape.placement) ? align_up(ranks * 4, kLineBytes) : 0;
    layout.counts_ = layout.take(std::int64_t{kHeaderSlots} * ranks * layout.counts_stride_);
    const std::int64_t slots = shape.depth;
    const std::int64_t chunk_lines = queued ? 0 : layout.chunk_lines();
    layout.chunks_stride_ = align_up(chunk_lines * static_cast<std::int64_t>(sizeof(ChunkLine)), kLineBytes);
    layout.chunks_ = layout.take(slots * ranks * layout.chunks_stride_);
    layout.stats_stride_ = align_up(shape.stats_entries * 4, kLineBytes);
    layout.stats_ = layout.take(ranks * layout.stats_stride_);
    layout.rows_ = layout.end_;
    layout.payload_stride_ = payload_capacity(layout.payload_rows(), shape.row_capacity, shape.extra_capacity);
    layout.payload_ = layout.take(queued ? 0 : slots * layout.num_spaces() * layout.payload_stride_);
    layout.begin_second_half();
    layout.combine_stride_ = align_up(shape.combine_row_bytes, kRowAlignment);
    const std::int64_t combine_rows = queued ? 0 : slots * layout.combine_rows();
    layout.combine_ = layout.take(combine_rows * layout.combine_stride_);
    layout.weights_stride_ = align_up(shape.weights_row_bytes, kRowAlignment);
    layout.weights_ = layout.take(combine_rows * layout.weights_stride_);
    layout.given_weights_ = layout.take(slots * layout.combine_rows() * shape.given_weights_row_bytes);
    layout.end_at_budget();
    return layout;
  }

  // Whether the rows have room in the window; always so without a budget.
  TOKENYARD_HD constexpr bool fits() const { return fits_; }

  TOKENYARD_HD constexpr const WindowShape& shape() const { return shape_; }

  TOKENYARD_HD constexpr std::int64_t bytes() const { return end_; }

  TOKENYARD_HD constexpr std::int64_t max_chunks() const {
    return num_chunks(shape_.max_tokens, shape_.tokens_per_chunk);
  }

  // Lines of one source: with a budget a number of its own, enough for the chunks that fit it unless rows are tiny.
  TOKENYARD_HD constexpr std::int64_t chunk_lines() const {
    return shape_.budget_bytes > 0 ? kLeastChunkLines + shape_.budget_bytes / (kBudgetPerChunkLine * shape_.num_ranks)
                                   : max_chunks();
  }

  // Rows of one payload space: a source's tokens, or all ranks' tokens at final places.
  TOKENYARD_HD constexpr std::int64_t payload_rows() const {
    return space_per_source(shape_.placement) ? shape_.max_tokens : combine_rows();
  }

  TOKENYARD_HD constexpr std::int64_t num_spaces() const {
    return space_per_source(shape_.placement) ? shape_.num_ranks : 1;
  }

  TOKENYARD_HD constexpr std::int64_t combine_rows() const { return shape_.num_ranks * shape_.max_tokens; }

  TOKENYARD_HD constexpr std::int64_t life(int peer) const { return life_ + peer * kLineBytes; }

  TOKENYARD_HD constexpr std::int64_t released(int phase, int peer) const {
    return released_ + (static_cast<std::int64_t>(phase) * shape_.num_ranks + peer) * kLineBytes;
  }

  TOKENYARD_HD constexpr std::int64_t header(int phase, int slot, int source) const {
    const std::int64_t index = (static_cast<std::int64_t>(phase) * kHeaderSlots + slot) * shape_.num_ranks + source;
    return headers_ + index * static_cast<std::int64_t>(sizeof(HeaderLine));
  }

  // i32 [num_ranks]: how many rows `source` sends to each rank.
  TOKENYARD_HD constexpr std::int64_t counts(int slot, int source) const {
    return counts_ + (static_cast<std::int64_t>(slot) * shape_.num_ranks + source) * counts_stride_;
  }

  TOKENYARD_HD constexpr std::int64_t chunk(int source, std::int64_t index, int slot = 0) const {
    return chunks_ + (static_cast<std::int64_t>(slot) * shape_.num_ranks + source) * chunks_stride_ +
           index * static_cast<std::int64_t>(sizeof(ChunkLine));
  }

  TOKENYARD_HD constexpr std::int64_t stats(int source) const { return stats_ + source * stats_stride_; }

  // Where rows begin: everything before it is words and lines.
  TOKENYARD_HD constexpr std::int64_t rows() const { return rows_; }

  // The payload space that `source` stores to, and what it may hold. With queues such spaces are the receiver's own.
  TOKENYARD_HD constexpr std::int64_t payload(int source, int slot = 0) const {
    const std::int64_t space = space_per_source(shape_.placement) ? source : 0;
    return payload_ + (slot * num_spaces() + space) * payload_stride_;
  }

  TOKENYARD_HD constexpr std::int64_t payload_bytes() const { return payload_stride_; }

  TOKENYARD_HD constexpr std::int64_t combine_row(std::int64_t row, int slot = 0) const {
    return combine_ + (slot * combine_rows() + row) * combine_stride_;
  }

  TOKENYARD_HD constexpr std::int64_t combine_stride() const { return combine_stride_; }

  TOKENYARD_HD constexpr std::int64_t weights_row(std::int64_t row, int slot = 0) const {
    return weights_ + (slot * combine_rows() + row) * weights_stride_;
  }

  // f32 [max_tokens, top_k], dense: the weights that `origin` gave at combine.
  TOKENYARD_HD constexpr std::int64_t given_weights(int origin, int slot) const {
    return given_weights_ + (slot * combine_rows() + origin * shape_.max_tokens) * shape_.given_weights_row_bytes;
  }

 private:
  TOKENYARD_HD constexpr std::int64_t take(std::int64_t size) {
    const std::int64_t start = end_;
    end_ = align_up(end_ + size, kSectionAlignment);
    return start;
  }

  TOKENYARD_HD constexpr void begin_second_half() {
    if (shape_.budget_bytes == 0) return;
    const std::int64_t half = (shape_.budget_bytes - rows_) / 2;
    const std::int64_t second = rows_ + (half > 0 ? half / kSectionAlignment * kSectionAlignment : 0);
    fits_ = end_ <= second && max_chunks() <= chunk_lines();
    end_ = second;
  }

  TOKENYARD_HD constexpr void end_at_budget() {
    if (shape_.budget_bytes == 0) return;
    fits_ = fits_ && end_ <= shape_.budget_bytes;
    end_ = shape_.budget_bytes;
  }

  WindowShape shape_{};
  bool fits_ = true;
  std::int64_t life_ = 0, released_ = 0, headers_ = 0, counts_ = 0, chunks_ = 0, stats_ = 0, rows_ = 0, payload_ = 0,
               combine_ = 0, weights_ = 0, given_weights_ = 0;
  std::int64_t counts_stride_ = 0, chunks_stride_ = 0, stats_stride_ = 0, payload_stride_ = 0, combine_stride_ = 0,
               weights_stride_ = 0;
  std::int64_t end_ = 0;
};

// The most tokens per rank, up to `limit`, for which a window with a budget has room; 0: not even for one.
TOKENYARD_HD constexpr std::int64_t most_tokens_within_budget(WindowShape shape, std::int64_t limit) {
  std::int64_t row = shape.row_capacity + shape.extra_capacity;
  if (row < shape.combine_row_bytes) row = shape.combine_row_bytes;
  if (row < kRowAlignment) row = kRowAlignment;
  const std::int64_t bound = shape.budget_bytes / (shape.num_ranks * row);
  std::int64_t most = 0;
  std::int64_t too_many = (bound < limit ? bound : limit) + 1;
  while (too_many - most > 1) {
    shape.max_tokens = most + (too_many - most) / 2;
    if (WindowLayout::of(shape).fits()) {
      most = shape.max_tokens;
    } else {
      too_many = shape.max_tokens;
    }
  }
  return most;
}

// A budget with room for the shape, one byte less of which has none.
TOKENYARD_HD constexpr std::int64_t least_budget(WindowShape shape) {
  std::int64_t too_small = 0;
  shape.budget_bytes = kSectionAlignment;
  while (!WindowLayout::of(shape).fits()) {
    too_small = shape.budget_bytes;
    shape.budget_bytes *= 2;
  }
  std::int64_t enough = shape.budget_bytes;
  while (enough - too_small > 1) {
    shape.budget_bytes = too_small + (enough - too_small) / 2;
    if (WindowLayout::of(shape).fits()) {
      enough = shape.budget_bytes;
    } else {
      too_small = shape.budget_bytes;
    }
  }
  return enough;
}

}  // namespace tokenyard::protocol
