// SPDX-License-Identifier: Apache-2.0
// The layout of a queue window, which all communications with queues of one group share: bounded rings from each rank
// to each other, and the words that say how far they are filled and drained. Who writes what:
//
//   section        written by                    read by
//   life           peer p its own line           this rank, when it waits long
//   begun          peer p its own line a phase   this rank, when it waits: the operation that p took up last
//   filled         source s its own line a phase this rank: entries of s's queue to it
//   drained        peer p its own line a phase   this rank: entries of this rank's queue to p
// (large queues have a few lines of words, not one)
//   queues         source s its own a phase      this rank
//
// Every word but life carries a turn: the number of an operation among those of all communications on these queues, one
// count for each phase.
#pragma once

#include <cstdint>

#include "protocol/formats.h"
#include "protocol/host_device.h"
#include "protocol/layout.h"
#include "protocol/stamp.h"

namespace tokenyard::protocol {

inline constexpr int kNumQueuePhases = 2;  // dispatch and combine

// Who splits a queue has words for each part of it, so there is a line of words for each so many bytes.
inline constexpr std::int64_t kQueueBytesPerLine = 256 << 10;
inline constexpr int kMaxWordLines = 4;

TOKENYARD_HD constexpr int word_lines(std::int64_t queue_bytes) {
  const std::int64_t lines = ceil_div(queue_bytes, kQueueBytesPerLine);
  return lines < kMaxWordLines ? static_cast<int>(lines) : kMaxWordLines;
}

// Drained words: the receiver needs no more entries of this turn, and has read all that it will.
inline constexpr std::uint32_t kNeedsNoMore = 0xFFFFFFFE;

// The last turn of whose entries the receiver needs no more; `before` while the word is as nobody wrote it.
TOKENYARD_HD constexpr std::uint32_t turn_released(std::uint64_t drained, std::uint32_t before) {
  if ((drained & 0xFFFFFFFFU) == 0) return before;
  const auto turn = static_cast<std::uint32_t>(drained >> 32);
  return stamp_rows(drained) == kNeedsNoMore ? turn : turn - 1;
}

// Entries of `turn` that a filled or drained word tells of.
TOKENYARD_HD constexpr std::int64_t entries_told(std::uint64_t word, std::uint32_t turn) {
  return stamp_is(word, turn) ? std::int64_t{stamp_rows(word)} : 0;
}

// Users count from 1, so that a word that nobody wrote tells of none.
TOKENYARD_HD constexpr std::uint64_t encode_begun(std::uint32_t turn, std::uint32_t user) {
  return (static_cast<std::uint64_t>(turn) << 32) | user;
}

TOKENYARD_HD constexpr std::uint32_t begun_turn(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32);
}

TOKENYARD_HD constexpr std::uint32_t begun_user(std::uint64_t word) {
  return static_cast<std::uint32_t>(word & 0xFFFFFFFFU);
}

class QueueLayout {
 public:
  TOKENYARD_HD static constexpr QueueLayout of(int num_ranks, std::int64_t queue_bytes) {
    QueueLayout layout;
    layout.num_ranks_ = num_ranks;
    layout.queue_bytes_ = queue_bytes;
    layout.words_ = align_up(std::int64_t{num_ranks} * kLineBytes, kSectionAlignment);
    layout.word_stride_ = word_lines(queue_bytes) * kLineBytes;
    layout.queues_ =
        layout.words_ + align_up(kNumWords * kNumQueuePhases * num_ranks * layout.word_stride_, kSectionAlignment);
    layout.stride_ = align_up(queue_bytes, kSectionAlignment);
    return layout;
  }

  TOKENYARD_HD constexpr int num_ranks() const { return num_ranks_; }

  // Of one queue.
  TOKENYARD_HD constexpr std::int64_t queue_bytes() const { return queue_bytes_; }

  TOKENYARD_HD constexpr std::int64_t bytes() const { return queue(kNumQueuePhases, 0); }

  TOKENYARD_HD constexpr std::int64_t life(int peer) const { return peer * kLineBytes; }

  TOKENYARD_HD constexpr std::int64_t begun(int phase, int peer) const { return word(0, phase, peer); }

  TOKENYARD_HD constexpr std::int64_t filled(int phase, int source) const { return word(1, phase, source); }

  TOKENYARD_HD constexpr std::int64_t drained(int phase, int peer) const { return word(2, phase, peer); }

  // Where the queues begin: everything before is words.
  TOKENYARD_HD constexpr std::int64_t queues() const { return queues_; }

  TOKENYARD_HD constexpr std::int64_t queue(int phase, int source) const {
    return queues_ + (static_cast<std::int64_t>(phase) * num_ranks_ + source) * stride_;
  }

 private:
  static constexpr std::int64_t kNumWords = 3;

  TOKENYARD_HD constexpr std::int64_t word(int kind, int phase, int peer) const {
    return words_ + ((static_cast<std::int64_t>(kind) * kNumQueuePhases + phase) * num_ranks_ + peer) * word_stride_;
  }

  int num_ranks_ = 1;
  std::int64_t queue_bytes_ = 0;
  std::int64_t words_ = 0, word_stride_ = 0, queues_ = 0, stride_ = 0;
};

}  // namespace tokenyard::protocol
