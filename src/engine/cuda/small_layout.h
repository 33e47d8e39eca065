// SPDX-License-Identifier: Apache-2.0
// Where rows of small rounds arrive: in lines of 128 bytes that tell of their own arrival. 15 words of 8 bytes are
// data, the last is a flag. A line is stored by one instruction of eight neighbouring threads, and loaded so, and is
// seen as a whole or not at all; GPU tests hold that against the hardware (line_test). An encoding of the CUDA engine's
// own, in a part of the window that plain rounds never use.
//
//   dispatch  [2, num_ranks, tokens, packet]:  by parity of the epoch, from each source: control lines, then the lanes
//   combine   [2, num_ranks, tokens, row]:     by parity of the epoch, from each owner: the row that it owes the token
//
// Control lines come for every token that the round has room for, to every rank: whether the token comes, its ids, and
// how many tokens the source has. A rank that has the control lines of a peer's dispatch n + 1 knows that the peer has
// read what it was sent in dispatch n and in the combine of that round, so lines of n + 2 may be stored over those of n
// without asking.
#pragma once

#include <cstdint>

#include "protocol/host_device.h"
#include "protocol/layout.h"
#include "protocol/planes.h"

namespace tokenyard::engine::cuda {

inline constexpr std::int64_t kDataLineBytes = 128;
inline constexpr int kLineThreads = 8;  // that store or load a line, 16 bytes each
inline constexpr int kLineWords = 15;   // of 8 bytes, besides the flag
inline constexpr int kSmallLanes = 8;   // payloads of a small round, at most
inline constexpr std::int64_t kSmallTokens = 512;
inline constexpr std::int64_t kSmallBytes = std::int64_t{64} << 20;  // of a window, at most

// Control lines hold words of 4 bytes: tokens of the source, whether this one comes, then its ids.
inline constexpr int kControlWords = 2 * kLineWords;
inline constexpr int kFirstId = 2;

TOKENYARD_HD constexpr int control_lines(int top_k) {
  return (kFirstId + top_k + kControlWords - 1) / kControlWords;
}

// Words of 8 bytes that a row takes.
TOKENYARD_HD constexpr std::int64_t words_of(std::int64_t row_bytes) {
  return protocol::ceil_div(row_bytes, 8);
}

TOKENYARD_HD constexpr std::int64_t lines_of(std::int64_t words) {
  return protocol::ceil_div(words, kLineWords);
}

// The flag of an operation's lines: what both sides must agree on, and the epoch. Never 0, which is what memory holds
// that nobody wrote; neighbours whose flags are equal differ in parity.
TOKENYARD_HD constexpr std::uint64_t flag_of(std::uint32_t epoch, std::uint32_t agreed) {
  return static_cast<std::uint64_t>(agreed) << 32 | (epoch == 0xFFFFFFFFU ? 1 : epoch + 1);
}

TOKENYARD_HD constexpr bool same_epoch(std::uint64_t flag, std::uint64_t other) {
  return static_cast<std::uint32_t>(flag) == static_cast<std::uint32_t>(other);
}

struct SmallLayout {
  std::int64_t start = 0;   // in the window
  std::int64_t tokens = 0;  // of a source in a small round; 0: there are no small rounds
  std::int64_t packet_bytes = 0;
  std::int64_t row_bytes = 0;
  int num_ranks = 1;

  TOKENYARD_HD static constexpr SmallLayout of(const protocol::WindowLayout& layout) {
    const protocol::WindowShape& shape = layout.shape();
    SmallLayout small;
    if (shape.placement != protocol::Placement::kRankMajor || shape.queue_bytes > 0) return small;
    constexpr int kMostTopK = 64;
    small.start = layout.bytes();
    small.num_ranks = shape.num_ranks;
    const std::int64_t words = words_of(shape.row_capacity + shape.extra_capacity) + kSmallLanes;
    small.packet_bytes = (control_lines(kMostTopK) + lines_of(words)) * kDataLineBytes;
    small.row_bytes = lines_of(words_of(shape.combine_row_bytes)) * kDataLineBytes;
    const std::int64_t most = kSmallBytes / (2 * shape.num_ranks * (small.packet_bytes + small.row_bytes));
    small.tokens = shape.max_tokens < kSmallTokens ? shape.max_tokens : kSmallTokens;
    if (small.tokens > most) small.tokens = most;
    return small;
  }

  TOKENYARD_HD constexpr std::int64_t bytes() const { return 2 * num_ranks * tokens * (packet_bytes + row_bytes); }

  TOKENYARD_HD constexpr std::int64_t packet(std::uint32_t epoch, int source, std::int64_t token) const {
    return start + slot(epoch, source, token) * packet_bytes;
  }

  TOKENYARD_HD constexpr std::int64_t row(std::uint32_t epoch, int owner, std::int64_t token) const {
    return start + 2 * num_ranks * tokens * packet_bytes + slot(epoch, owner, token) * row_bytes;
  }

 private:
  TOKENYARD_HD constexpr std::int64_t slot(std::uint32_t epoch, int from, std::int64_t token) const {
    return (std::int64_t{epoch % 2} * num_ranks + from) * tokens + token;
  }
};

}  // namespace tokenyard::engine::cuda
