// SPDX-License-Identifier: Apache-2.0
// src/protocol is device code too: a kernel that uses each of its parts. Compiling it is the test.
#include "protocol/casts.h"
#include "protocol/chunk.h"
#include "protocol/digest.h"
#include "protocol/layout.h"
#include "protocol/life.h"
#include "protocol/owner.h"
#include "protocol/planes.h"
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
  values[index] = protocol::decode<protocol::Bf16>(protocol::encode<protocol::Bf16>(values[index])) +
                  protocol::decode<protocol::F8e4m3>(protocol::encode<protocol::F8e4m3>(values[index]));
}

}  // namespace tokenyard
