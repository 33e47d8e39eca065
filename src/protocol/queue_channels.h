// SPDX-License-Identifier: Apache-2.0
// How GPUs use the queue from one rank to another: as several rings side by side, the channels, so that blocks work on
// them without a word to each other. Token t crosses in channel t % count, in ascending order of tokens. What a channel
// is follows from the size of a queue and of an entry alone, so grids are free per rank and call.
//
// Each channel has a word of its own in the queue's lines of filled and drained words (queue_layout.h). Every operation
// starts with empty rings, and its words carry its epoch.
#pragma once

#include <cstdint>

#include "protocol/host_device.h"
#include "protocol/layout.h"
#include "protocol/queue_layout.h"
#include "protocol/stamp.h"

namespace tokenyard::protocol {

inline constexpr int kChannelsOfLine = kLineBytes / static_cast<int>(sizeof(std::uint64_t));
inline constexpr int kMaxQueueChannels = kMaxWordLines * kChannelsOfLine;
inline constexpr std::int64_t kLeastChannelEntries = 2;  // one is filled while another is drained

struct QueueChannels {
  std::int64_t entry_bytes = 1;
  std::int64_t entries = 1;  // of a channel
  int count = 1;

  // The queue holds an entry at least.
  TOKENYARD_HD static constexpr QueueChannels of(std::int64_t queue_bytes, std::int64_t entry_bytes) {
    const std::int64_t all = queue_bytes / entry_bytes;
    int count = word_lines(queue_bytes) * kChannelsOfLine;
    while (count > 1 && all / count < kLeastChannelEntries)
      count /= 2;
    return {entry_bytes, all / count, count};
  }

  // Of the entry with this number in the channel, from 0 on, from the start of the queue.
  TOKENYARD_HD constexpr std::int64_t entry(int channel, std::int64_t number) const {
    return (channel * entries + number % entries) * entry_bytes;
  }
};

// What a filled word tells: entries of the channel so far, and whether no more will come.
TOKENYARD_HD constexpr std::uint64_t encode_filled(std::uint32_t epoch, std::uint32_t entries, bool last) {
  return encode_stamp(epoch, entries << 1 | (last ? 1U : 0U));
}

TOKENYARD_HD constexpr std::int64_t filled_entries(std::uint64_t word) {
  return stamp_rows(word) >> 1;
}

TOKENYARD_HD constexpr bool filled_last(std::uint64_t word) {
  return (stamp_rows(word) & 1U) != 0;
}

}  // namespace tokenyard::protocol
