// SPDX-License-Identifier: Apache-2.0
// Arrival is told per chunk: consecutive tokens of one source. The size of a chunk follows from the params alone, so
// threads, SMs and token counts are free per rank and call.
#pragma once

#include <cstdint>

#include "protocol/formats.h"
#include "protocol/host_device.h"

namespace tokenyard::protocol {

inline constexpr int kMaxChunkTokens = 64;  // a chunk's tokens are the bits of one word
inline constexpr std::int64_t kChunkBytes = 256 << 10;

// The largest power of two up to 64 whose rows stay within kChunkBytes, at least 1.
TOKENYARD_HD constexpr int chunk_tokens(std::int64_t dispatch_bytes_per_token) {
  int tokens = kMaxChunkTokens;
  while (tokens > 1 && tokens * dispatch_bytes_per_token > kChunkBytes)
    tokens /= 2;
  return tokens;
}

TOKENYARD_HD constexpr std::int64_t num_chunks(std::int64_t num_tokens, int tokens_per_chunk) {
  return ceil_div(num_tokens, tokens_per_chunk);
}

}  // namespace tokenyard::protocol
