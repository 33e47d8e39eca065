// SPDX-License-Identifier: Apache-2.0
// What expert-major rounds need of a window besides rows: units that tell of their own arrival (two words, each with a
// tag beside it in the 8 bytes that are stored at once), and a word for each row. An encoding of the CUDA engine's
// own, behind the layout.
//
//   headers   [2, num_ranks, 4 units]              what must agree, tokens of the source, and its rows for this rank
//   counts    [2, num_ranks, local experts, unit]  rows and routes of each of this rank's experts
//   packets   [2, num_ranks, tokens, units]        the token's row among the source's rows for this rank, or kNoRow;
//                                                  then for each pick its place or kNoPlace, and its weight
//   arrived   [2, num_ranks, tokens] u64           the stamp of the token's row
//   given     [2, num_ranks, tokens, units]        the token's weights, where its origin gave them at combine
//   returned  [2, num_ranks, tokens] u64           the stamp of this rank's token's row that came back from each owner
//   lines     [2, num_ranks, tokens, lines]        the token's row, values then scales, in lines that tell of their own
//                                                  arrival (small_layout.h)
//   back      [2, num_ranks, tokens, lines]        the row that came back from each owner, also in lines
//
// Where few tokens come, rows cross in lines, which need no stamps; else in the sections of the layout. Which it is, is
// settled when the window is made.
//
// Everything has two slots, used in turn by the epochs of dispatch, or of combine for given weights and what returns. A
// place counts through all of an expert's rows: expert * rows of an expert + row. On the way the row counts from the
// first of the source's.
#pragma once

#include <cstdint>

#include "engine/cuda/small_layout.h"
#include "engine/cuda/tagged_units.h"
#include "protocol/host_device.h"
#include "protocol/layout.h"
#include "protocol/stamp.h"

namespace tokenyard::engine::cuda {

inline constexpr int kExpertDepth = 2;
inline constexpr int kExpertHeaderUnits = 4;
inline constexpr std::int32_t kNoRow = -1;
inline constexpr std::int32_t kNoPlace = -1;

inline constexpr std::int64_t kLinesTokens = 512;                       // of a rank, at most, whose rows cross in lines
inline constexpr std::int64_t kLinesBytes = std::int64_t{512} << 20;    // of a window, at most
inline constexpr std::int64_t kLinesRowBytes = std::int64_t{64} << 10;  // of a row, at most: a block has it whole

class ExpertLayout {
 public:
  TOKENYARD_HD static constexpr ExpertLayout of(const protocol::WindowLayout& layout, int top_k, int num_experts) {
    ExpertLayout expert;
    const std::int64_t ranks = layout.shape().num_ranks;
    const std::int64_t tokens = layout.shape().max_tokens;
    expert.ranks_ = ranks;
    expert.tokens_ = tokens;
    expert.experts_ = protocol::ceil_div(num_experts, ranks);
    expert.packet_bytes_ = units_of(1 + 2 * top_k) * kTaggedBytes;
    expert.given_bytes_ = units_of(top_k) * kTaggedBytes;
    std::int64_t end = layout.bytes();
    const auto take = [&end](std::int64_t bytes) {
      const std::int64_t start = end;
      end += protocol::align_up(kExpertDepth * bytes, protocol::kSectionAlignment);
      return start;
    };
    expert.headers_ = take(ranks * kExpertHeaderUnits * kTaggedBytes);
    expert.counts_ = take(ranks * expert.experts_ * kTaggedBytes);
    expert.packets_ = take(ranks * tokens * expert.packet_bytes_);
    expert.arrived_ = take(ranks * tokens * 8);
    expert.given_ = take(ranks * tokens * expert.given_bytes_);
    expert.returned_ = take(ranks * tokens * 8);
    expert.row_bytes_ = lines_of(layout.shape().row_capacity) * kDataLineBytes;
    expert.back_bytes_ = lines_of(layout.shape().combine_row_bytes) * kDataLineBytes;
    const std::int64_t all = kExpertDepth * ranks * tokens * (expert.row_bytes_ + expert.back_bytes_);
    expert.in_lines_ = tokens <= kLinesTokens && all <= kLinesBytes && layout.shape().row_capacity <= kLinesRowBytes &&
                       layout.shape().whole_lines;
    expert.lines_ = take(expert.in_lines_ ? ranks * tokens * expert.row_bytes_ : 0);
    expert.back_ = take(expert.in_lines_ ? ranks * tokens * expert.back_bytes_ : 0);
    expert.bytes_ = end - layout.bytes();
    return expert;
  }

  TOKENYARD_HD static constexpr int units_of(int words) {
    return static_cast<int>(protocol::ceil_div(words, kTaggedWords));
  }

  // Whether rows cross in lines.
  TOKENYARD_HD constexpr bool in_lines() const { return in_lines_; }

  // Behind the layout.
  TOKENYARD_HD constexpr std::int64_t bytes() const { return bytes_; }

  TOKENYARD_HD constexpr std::int64_t header(std::uint32_t epoch, int source) const {
    return headers_ + line(epoch, source) * kExpertHeaderUnits * kTaggedBytes;
  }

  TOKENYARD_HD constexpr std::int64_t counts(std::uint32_t epoch, int source) const {
    return counts_ + line(epoch, source) * experts_ * kTaggedBytes;
  }

  TOKENYARD_HD constexpr std::int64_t packet(std::uint32_t epoch, int source, std::int64_t token) const {
    return packets_ + (line(epoch, source) * tokens_ + token) * packet_bytes_;
  }

  TOKENYARD_HD constexpr std::int64_t arrived(std::uint32_t epoch, int source, std::int64_t token) const {
    return arrived_ + (line(epoch, source) * tokens_ + token) * 8;
  }

  TOKENYARD_HD constexpr std::int64_t given(std::uint32_t epoch, int origin, std::int64_t token) const {
    return given_ + (line(epoch, origin) * tokens_ + token) * given_bytes_;
  }

  TOKENYARD_HD constexpr std::int64_t returned(std::uint32_t epoch, int owner, std::int64_t token) const {
    return returned_ + (line(epoch, owner) * tokens_ + token) * 8;
  }

  TOKENYARD_HD constexpr std::int64_t lines(std::uint32_t epoch, int source, std::int64_t token) const {
    return lines_ + (line(epoch, source) * tokens_ + token) * row_bytes_;
  }

  TOKENYARD_HD constexpr std::int64_t back(std::uint32_t epoch, int owner, std::int64_t token) const {
    return back_ + (line(epoch, owner) * tokens_ + token) * back_bytes_;
  }

 private:
  TOKENYARD_HD constexpr std::int64_t line(std::uint32_t epoch, int rank) const {
    return protocol::slot_of(epoch, kExpertDepth) * ranks_ + rank;
  }

  std::int64_t ranks_ = 1, tokens_ = 0, experts_ = 0, packet_bytes_ = 0, given_bytes_ = 0;
  std::int64_t headers_ = 0, counts_ = 0, packets_ = 0, arrived_ = 0, given_ = 0, returned_ = 0, bytes_ = 0;
  std::int64_t row_bytes_ = 0, back_bytes_ = 0, lines_ = 0, back_ = 0;
  bool in_lines_ = false;
};

}  // namespace tokenyard::engine::cuda
