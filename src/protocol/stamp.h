// SPDX-License-Identifier: Apache-2.0
// The words that tell of arrival and of release, and the epochs they carry.
//
// A stamp is one 8-byte word {epoch:32, rows + 1:32}. It is compared for equality of its epoch, never for order, so a
// wrapped epoch is as good as any. The low half is never 0: a word that nobody has written is no stamp of any epoch.
#pragma once

#include <cstdint>

#include "protocol/host_device.h"

namespace tokenyard::protocol {

TOKENYARD_HD constexpr std::uint64_t encode_stamp(std::uint32_t epoch, std::uint32_t rows) {
  return (static_cast<std::uint64_t>(epoch) << 32) | (static_cast<std::uint64_t>(rows) + 1);
}

TOKENYARD_HD constexpr bool stamp_is(std::uint64_t word, std::uint32_t epoch) {
  return (word & 0xFFFFFFFFU) != 0 && static_cast<std::uint32_t>(word >> 32) == epoch;
}

TOKENYARD_HD constexpr std::uint32_t stamp_rows(std::uint64_t word) {
  return static_cast<std::uint32_t>(word & 0xFFFFFFFFU) - 1;
}

// What a receiver tells a source, in one word: the last operation of which it will read no more rows, and the last one
// of which it will read no more headers and counts. They differ while a result is a view and a later operation was
// given up. Both only move forward and never lag by half the epochs, so a signed difference orders them.
TOKENYARD_HD constexpr std::uint64_t encode_progress(std::uint32_t rows_released, std::uint32_t headers_read) {
  return (static_cast<std::uint64_t>(headers_read) << 32) | rows_released;
}

TOKENYARD_HD constexpr bool reached(std::uint32_t at, std::uint32_t epoch) {
  return static_cast<std::int32_t>(at - epoch) >= 0;
}

TOKENYARD_HD constexpr std::uint32_t rows_released(std::uint64_t progress) {
  return static_cast<std::uint32_t>(progress & 0xFFFFFFFFU);
}

TOKENYARD_HD constexpr std::uint32_t headers_read(std::uint64_t progress) {
  return static_cast<std::uint32_t>(progress >> 32);
}

// Header lines have two slots, used in turn: a rank writes the header of operation n only after the peer read that of
// n - 2. In the usual order it has: its header of n - 1 came after that.
inline constexpr int kHeaderSlots = 2;

TOKENYARD_HD constexpr int header_slot(std::uint32_t epoch) {
  return static_cast<int>(epoch % kHeaderSlots);
}

enum class HeaderStatus : std::uint8_t { kOk, kAborted };

// What a source tells each receiver once an operation. Everything but `stamp` is written before it and read after it.
struct alignas(64) HeaderLine {
  std::uint64_t stamp;      // dispatch: rows sent to this receiver; combine: rows owed to it
  std::uint64_t mask;       // rank major: which tokens of chunk 0 have a row here; with queues: the operation's turn
  std::uint64_t digest;     // of the arguments that must agree
  std::int64_t agreed;      // an argument that must agree and whose values an error should name
  std::int64_t row_limit;   // combine: rows of the dispatch that the receiver kept (num_worst_tokens)
  std::int32_t num_tokens;  // dispatch: tokens of the source
  HeaderStatus status;
  // Dispatch: tokens of the source, and rows for this receiver, in the whole call, of which this may be one part of
  // several.
  std::int32_t call_tokens;
  std::int32_t call_rows;
};

static_assert(sizeof(HeaderLine) == 64);

// Arrival of one chunk. `mask` is written before `stamp` and read after it.
struct ChunkLine {
  std::uint64_t stamp;
  // Rank major: bit i = token i of the chunk has a row here. Final places, CUDA: the chunk's first row.
  std::uint64_t mask;
};

static_assert(sizeof(ChunkLine) == 16);

}  // namespace tokenyard::protocol
