// SPDX-License-Identifier: Apache-2.0
// Where rows of small rounds arrive: in lines of 128 bytes that tell of their own arrival. 15 words of 8 bytes are
// data, the last is a flag. A line is stored by one instruction of eight neighbouring threads, and loaded so, and is
// seen as a whole or not at all; GPU tests hold that against the hardware (line_test). An encoding of the CUDA engine's
// own, in a part of the window that plain rounds never use.
//
//   signs     [2, num_ranks, tokens, 16 bytes]:  by parity of the epoch, from each source: whether the token comes
//   dispatch  [2, num_ranks, tokens, packet]:    from each source: the payloads' rows, each from a line of its own on,
//                                                then the ids
//   combine   [2, num_ranks, tokens, row]:       by parity of the epoch, from each owner: the row that it owes the
//   token
//
// Signs come for every token that the round has room for, to every rank. A rank that has the signs of a peer's dispatch
// n + 1 knows that the peer has read what it was sent in dispatch n and in the combine of that round, so lines of n + 2
// may be stored over those of n without asking.
#pragma once

#include <cstdint>

#include "protocol/host_device.h"
#include "protocol/layout.h"
#include "protocol/planes.h"

namespace tokenyard::engine::cuda {

inline constexpr std::int64_t kDataLineBytes = 128;
inline constexpr int kLineThreads = 8;  // that store or load a line, 16 bytes each
inline constexpr int kLineWords = 15;   // of 8 bytes, besides the flag
inline constexpr std::int64_t kLineData = std::int64_t{8} * kLineWords;
inline constexpr int kSmallLanes = 6;              // payloads of a small round besides the ids, at most
inline constexpr int kSmallTopK = 32;              // a pick for each lane of a warp
inline constexpr int kSmallRanks = 32;             // in one word
inline constexpr std::int64_t kSmallTokens = 448;  // with more, bulk copies are faster
inline constexpr std::int64_t kSmallBytes = std::int64_t{64} << 20;  // of a window, at most
inline constexpr std::int64_t kSignBytes = 16;

TOKENYARD_HD constexpr std::int64_t lines_of(std::int64_t bytes) {
  return protocol::ceil_div(bytes, kLineData);
}

// An epoch's mark in words that hold 0 when nobody has written them. Epochs that share one are half of all apart.
TOKENYARD_HD constexpr std::uint32_t mark_of(std::uint32_t epoch) {
  return epoch == 0 ? std::uint32_t{1} << 31 : epoch;
}

// The flag of an operation's lines: what both sides must agree on, and the epoch's mark.
TOKENYARD_HD constexpr std::uint64_t flag_of(std::uint32_t epoch, std::uint32_t agreed) {
  return static_cast<std::uint64_t>(agreed) << 32 | mark_of(epoch);
}

// A sign is two words that are each whole by themselves: whether the token comes and how many tokens its source has,
// and the flag.
TOKENYARD_HD constexpr std::uint64_t sign_of(std::uint32_t epoch, std::uint32_t tokens, bool comes) {
  return static_cast<std::uint64_t>(tokens << 1 | (comes ? 1U : 0U)) << 32 |
         static_cast<std::uint32_t>(flag_of(epoch, 0));
}

TOKENYARD_HD constexpr bool comes(std::uint64_t sign) {
  return (sign >> 32 & 1U) != 0;
}

TOKENYARD_HD constexpr std::int32_t tokens_of(std::uint64_t sign) {
  return static_cast<std::int32_t>(sign >> 33);
}

TOKENYARD_HD constexpr bool same_epoch(std::uint64_t flag, std::uint64_t other) {
  return static_cast<std::uint32_t>(flag) == static_cast<std::uint32_t>(other);
}

struct SmallLayout {
  std::int64_t start = 0;    // in the window, of the signs
  std::int64_t packets = 0;  // and of the others
  std::int64_t rows = 0;
  std::int64_t end = 0;
  std::int64_t tokens = 0;  // of a source in a small round; 0: there are no small rounds
  std::int64_t packet_bytes = 0;
  std::int64_t row_bytes = 0;
  int num_ranks = 1;

  TOKENYARD_HD static constexpr SmallLayout of(const protocol::WindowLayout& layout) {
    const protocol::WindowShape& shape = layout.shape();
    SmallLayout small;
    if (shape.placement != protocol::Placement::kRankMajor || shape.queue_bytes > 0) return small;
    if (shape.num_ranks > kSmallRanks || !shape.whole_lines) return small;
    small.start = protocol::align_up(layout.bytes(), kDataLineBytes);
    small.num_ranks = shape.num_ranks;
    const std::int64_t lines =
        lines_of(shape.row_capacity + shape.extra_capacity) + kSmallLanes + lines_of(std::int64_t{4} * kSmallTopK);
    small.packet_bytes = lines * kDataLineBytes;
    small.row_bytes = lines_of(shape.combine_row_bytes) * kDataLineBytes;
    const std::int64_t most =
        kSmallBytes / (std::int64_t{2} * shape.num_ranks * (kSignBytes + small.packet_bytes + small.row_bytes));
    small.tokens = shape.max_tokens < kSmallTokens ? shape.max_tokens : kSmallTokens;
    if (small.tokens > most) small.tokens = most;
    small.packets = small.start + protocol::align_up(small.slots() * kSignBytes, kDataLineBytes);
    small.rows = small.packets + small.slots() * small.packet_bytes;
    small.end = small.rows + small.slots() * small.row_bytes;
    return small;
  }

  TOKENYARD_HD constexpr std::int64_t bytes(const protocol::WindowLayout& layout) const {
    return tokens == 0 ? 0 : end - layout.bytes();
  }

  TOKENYARD_HD constexpr std::int64_t sign(std::uint32_t epoch, int source, std::int64_t token) const {
    return start + within(slot(epoch, source, token), kSignBytes);
  }

  TOKENYARD_HD constexpr std::int64_t packet(std::uint32_t epoch, int source, std::int64_t token) const {
    return packets + within(slot(epoch, source, token), packet_bytes);
  }

  TOKENYARD_HD constexpr std::int64_t row(std::uint32_t epoch, int owner, std::int64_t token) const {
    return rows + within(slot(epoch, owner, token), row_bytes);
  }

 private:
  TOKENYARD_HD constexpr std::int64_t slots() const { return std::int64_t{2} * num_ranks * tokens; }

  // There are not many of them, in kSmallBytes.
  TOKENYARD_HD constexpr std::uint32_t slot(std::uint32_t epoch, int from, std::int64_t token) const {
    const auto all = static_cast<std::uint32_t>(tokens);
    return (epoch % 2 * static_cast<std::uint32_t>(num_ranks) + static_cast<std::uint32_t>(from)) * all +
           static_cast<std::uint32_t>(token);
  }

  TOKENYARD_HD static constexpr std::int64_t within(std::uint32_t slot, std::int64_t bytes) {
    const std::uint32_t at = slot * static_cast<std::uint32_t>(bytes);
    return at;
  }
};

}  // namespace tokenyard::engine::cuda
