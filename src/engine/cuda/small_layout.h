// SPDX-License-Identifier: Apache-2.0
// Where rows of small rounds arrive, in units that tell of their own arrival: two words of a row, each with a flag
// beside it in the 8 bytes that are stored at once. An encoding of the CUDA engine's own, in a part of the window that
// plain rounds never use.
//
//   headers   [2, num_ranks, 3 units]:         by parity of the epoch, from each source
//   dispatch  [2, num_ranks, tokens, packet]: by parity of the epoch, from each source: presence, then the row's lanes
//   combine   [2, num_ranks, tokens, row]:    by parity of the epoch, from each owner: the row that it owes the token
//
// A rank that has seen a peer's header of dispatch n + 1 knows that the peer has read what it was sent in dispatch n
// and in the combine of that round, so units of n + 2 may be stored over those of n without asking.
#pragma once

#include <cstdint>

#include "protocol/host_device.h"
#include "protocol/layout.h"
#include "protocol/planes.h"

namespace tokenyard::engine::cuda {

inline constexpr std::int64_t kUnitBytes = 16;
inline constexpr int kUnitWords = 2;    // of a row in a unit, 4 bytes each
inline constexpr int kUnitsAtOnce = 4;  // of a thread, loaded before it stores the first
inline constexpr int kHeaderUnits = 3;
inline constexpr std::int64_t kSmallTokens = 512;
inline constexpr std::int64_t kSmallBytes = std::int64_t{64} << 20;  // of a window, at most

// Never 0, which is what memory holds that nobody wrote; neighbours that share a flag differ in parity.
TOKENYARD_HD constexpr std::uint32_t flag_of(std::uint32_t epoch) {
  return epoch == 0xFFFFFFFFU ? 1 : epoch + 1;
}

TOKENYARD_HD constexpr std::int64_t units_of(std::int64_t bytes) {
  return protocol::ceil_div(protocol::ceil_div(bytes, 4), kUnitWords);
}

struct SmallLayout {
  std::int64_t start = 0;    // in the window
  std::int64_t packets = 0;  // where those of dispatch start
  std::int64_t tokens = 0;   // of a source in a small round; 0: there are no small rounds
  std::int64_t packet_bytes = 0;
  std::int64_t row_bytes = 0;
  int num_ranks = 1;

  TOKENYARD_HD static constexpr SmallLayout of(const protocol::WindowLayout& layout) {
    const protocol::WindowShape& shape = layout.shape();
    SmallLayout small;
    small.start = layout.bytes();
    small.num_ranks = shape.num_ranks;
    // Each lane starts with a word of its own.
    const std::int64_t lanes = shape.row_capacity + shape.extra_capacity + 4 * protocol::kMaxPlanes;
    small.packet_bytes = (1 + units_of(lanes)) * kUnitBytes;
    small.row_bytes = units_of(shape.combine_row_bytes) * kUnitBytes;
    small.packets = small.start + protocol::align_up(2 * shape.num_ranks * kHeaderUnits * kUnitBytes, 128);
    const std::int64_t most = kSmallBytes / (2 * shape.num_ranks * (small.packet_bytes + small.row_bytes));
    small.tokens = shape.max_tokens < kSmallTokens ? shape.max_tokens : kSmallTokens;
    if (small.tokens > most) small.tokens = most;
    if (shape.placement != protocol::Placement::kRankMajor || shape.queue_bytes > 0) small.tokens = 0;
    return small;
  }

  TOKENYARD_HD constexpr std::int64_t bytes() const {
    return tokens == 0 ? 0 : packets - start + 2 * num_ranks * tokens * (packet_bytes + row_bytes);
  }

  TOKENYARD_HD constexpr std::int64_t header(std::uint32_t epoch, int source) const {
    return start + (std::int64_t{epoch % 2} * num_ranks + source) * kHeaderUnits * kUnitBytes;
  }

  TOKENYARD_HD constexpr std::int64_t packet(std::uint32_t epoch, int source, std::int64_t token) const {
    return packets + ((std::int64_t{epoch % 2} * num_ranks + source) * tokens + token) * packet_bytes;
  }

  TOKENYARD_HD constexpr std::int64_t row(std::uint32_t epoch, int owner, std::int64_t token) const {
    return packets + 2 * num_ranks * tokens * packet_bytes +
           ((std::int64_t{epoch % 2} * num_ranks + owner) * tokens + token) * row_bytes;
  }
};

}  // namespace tokenyard::engine::cuda
