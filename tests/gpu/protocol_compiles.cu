// SPDX-License-Identifier: Apache-2.0
// src/protocol is device code too: a kernel that uses each of its parts. Compiling it is the test.
#include "protocol/block_cast.h"
#include "protocol/casts.h"
#include "protocol/chunk.h"
#include "protocol/digest.h"
#include "protocol/layout.h"
#include "protocol/life.h"
#include "protocol/log_wire.h"
#include "protocol/owner.h"
#include "protocol/planes.h"
#include "protocol/queue_layout.h"
#include "protocol/stamp.h"

namespace tokenyard {

__global__ void touch_protocol(protocol::WindowLayout layout, std::uint64_t* words, float* values) {
  const int index = static_cast<int>(threadIdx.x);
  protocol::Digest digest;
  digest.add(static_cast<std::uint64_t>(layout.payload(index) + layout.combine_row(index)));
  words[0] = digest.value() + protocol::encode_stamp(1, 2) + protocol::encode_progress(3, 4) +
             protocol::encode_life({.kind = protocol::LifeKind::kWaiting, .peer = 5});
  words[1] = static_cast<std::uint64_t>(protocol::chunk_tokens(14336) + protocol::owner_of(64, 7, index));
  std::array<std::int64_t, protocol::kMaxPlanes> widths{};
  widths[0] = 32;
  words[2] = static_cast<std::uint64_t>(protocol::plan_planes(widths, 8).bytes);
  words[3] = protocol::turn_released(words[0], 6) + static_cast<std::uint64_t>(protocol::QueueLayout::of(7, 8).bytes());
  values[index] = protocol::decode<protocol::Bf16>(protocol::encode<protocol::Bf16>(values[index])) +
                  protocol::decode<protocol::F8e4m3>(protocol::encode<protocol::F8e4m3>(values[index]));
}

__global__ void touch_row_formats(const float* values, std::uint8_t* codes, std::byte* wire, float* decoded) {
  const auto count = static_cast<std::int64_t>(blockDim.x);
  const protocol::RowBytes bytes = protocol::cast_row_bytes(DispatchCast::kFp8Block128Ue8m0, count);
  const float scale = protocol::cast_block(codes, values, count, DispatchCast::kFp8Block128);
  codes[bytes.values] = protocol::encode_e8m0(protocol::block_scale(DispatchCast::kFp8Block128Ue8m0, 0x43E00000u));
  protocol::encode_log_block(wire, values, count);
  protocol::decode_log_block(decoded, wire, count);
  decoded[protocol::log_row_bytes(count)] = scale;
}

}  // namespace tokenyard
