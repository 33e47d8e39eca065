// SPDX-License-Identifier: Apache-2.0
// The layout of a window: one set of sections, the same on every rank, computed once from shapes and passed around by
// value. Sizes and offsets come from the same cursor, so they cannot disagree. Who writes what:
//
//   section            written by                       read by
//   life               peer p its own line              this rank, when it waits long
//   released           peer p its own line per phase    this rank, before it stores to p again
//   headers            source s its own lines           this rank
//   counts             source s its own rows            this rank (final places only)
//   chunks             source s its own lines           this rank
//   stats              source s its own row             this rank
//   payload            rank major: source s region s; else any source, at the places the counts give
//   combine, weights   this rank                        the origins of its rows
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
inline constexpr int kNumPhases = 2;  // dispatch, combine

// Everything that sizes a window.
struct WindowShape {
  int num_ranks = 1;
  int tokens_per_chunk = kMaxChunkTokens;
  std::int64_t max_tokens = 0;  // per source rank
  Placement placement = Placement::kCompact;
  std::int64_t row_capacity = 0;    // bytes of the library's planes of one row, rounded up
  std::int64_t extra_capacity = 0;  // bytes of the extras of one row
  std::int64_t stats_entries = 0;   // i32 statistics of one source
  std::int64_t combine_row_bytes = 0;
  std::int64_t weights_row_bytes = 0;
};

// Where every section starts, in bytes from the window's start, and how its parts are strided.
class WindowLayout {
 public:
  TOKENYARD_HD static constexpr WindowLayout of(const WindowShape& shape) {
    WindowLayout layout;
    layout.shape_ = shape;
    const std::int64_t ranks = shape.num_ranks;
    layout.life_ = layout.take(ranks * kLineBytes);
    layout.released_ = layout.take(std::int64_t{kNumPhases} * ranks * kLineBytes);
    layout.headers_ =
        layout.take(std::int64_t{kNumPhases} * kHeaderSlots * ranks * static_cast<std::int64_t>(sizeof(HeaderLine)));
    layout.counts_stride_ = counts_first(shape.placement) ? align_up(ranks * 4, kLineBytes) : 0;
    layout.counts_ = layout.take(std::int64_t{kHeaderSlots} * ranks * layout.counts_stride_);
    layout.chunks_stride_ = align_up(layout.max_chunks() * static_cast<std::int64_t>(sizeof(ChunkLine)), kLineBytes);
    layout.chunks_ = layout.take(ranks * layout.chunks_stride_);
    layout.stats_stride_ = align_up(shape.stats_entries * 4, kLineBytes);
    layout.stats_ = layout.take(ranks * layout.stats_stride_);
    layout.payload_stride_ = payload_capacity(layout.payload_rows(), shape.row_capacity, shape.extra_capacity);
    layout.payload_ = layout.take((shape.placement == Placement::kRankMajor ? ranks : 1) * layout.payload_stride_);
    layout.combine_stride_ = align_up(shape.combine_row_bytes, kRowAlignment);
    layout.combine_ = layout.take(layout.combine_rows() * layout.combine_stride_);
    layout.weights_stride_ = align_up(shape.weights_row_bytes, kRowAlignment);
    layout.weights_ = layout.take(layout.combine_rows() * layout.weights_stride_);
    return layout;
  }

  TOKENYARD_HD constexpr const WindowShape& shape() const { return shape_; }

  TOKENYARD_HD constexpr std::int64_t bytes() const { return end_; }

  TOKENYARD_HD constexpr std::int64_t max_chunks() const {
    return num_chunks(shape_.max_tokens, shape_.tokens_per_chunk);
  }

  // Rows of one payload space: a source's tokens, or all ranks' tokens at final places.
  TOKENYARD_HD constexpr std::int64_t payload_rows() const {
    return shape_.placement == Placement::kRankMajor ? shape_.max_tokens : combine_rows();
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

  TOKENYARD_HD constexpr std::int64_t chunk(int source, std::int64_t index) const {
    return chunks_ + source * chunks_stride_ + index * static_cast<std::int64_t>(sizeof(ChunkLine));
  }

  TOKENYARD_HD constexpr std::int64_t stats(int source) const { return stats_ + source * stats_stride_; }

  // The payload space that `source` stores to, and what it may hold.
  TOKENYARD_HD constexpr std::int64_t payload(int source) const {
    return payload_ + (shape_.placement == Placement::kRankMajor ? source * payload_stride_ : 0);
  }

  TOKENYARD_HD constexpr std::int64_t payload_bytes() const { return payload_stride_; }

  TOKENYARD_HD constexpr std::int64_t combine_row(std::int64_t row) const { return combine_ + row * combine_stride_; }

  TOKENYARD_HD constexpr std::int64_t combine_stride() const { return combine_stride_; }

  TOKENYARD_HD constexpr std::int64_t weights_row(std::int64_t row) const { return weights_ + row * weights_stride_; }

 private:
  TOKENYARD_HD constexpr std::int64_t take(std::int64_t size) {
    const std::int64_t start = end_;
    end_ = align_up(end_ + size, kSectionAlignment);
    return start;
  }

  WindowShape shape_{};
  std::int64_t life_ = 0, released_ = 0, headers_ = 0, counts_ = 0, chunks_ = 0, stats_ = 0, payload_ = 0, combine_ = 0,
               weights_ = 0;
  std::int64_t counts_stride_ = 0, chunks_stride_ = 0, stats_stride_ = 0, payload_stride_ = 0, combine_stride_ = 0,
               weights_stride_ = 0;
  std::int64_t end_ = 0;
};

}  // namespace tokenyard::protocol
