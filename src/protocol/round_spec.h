// SPDX-License-Identifier: Apache-2.0
// A backend as the engines see it: a point of a small space. An engine knows these properties and no backend by name.
#pragma once

#include <cstdint>

#include "tokenyard/tensor.h"

#include "protocol/host_device.h"

namespace tokenyard::protocol {

// Where a row comes to lie in its receiver's window, and whom a token goes to.
enum class Placement : std::uint8_t {
  kEveryRank,  // to all ranks; at its final place, ordered by (source rank, token)
  kCompact,    // to the owners of its experts; at its final place, ordered by (source rank, token)
  kRankMajor,  // to the owners of its experts; in the source's region, slot = token index
};

// What the receiver makes of the ids it is sent.
enum class IdView : std::uint8_t { kCargo, kGlobal, kLocal };

struct RoundSpec {
  Placement placement = Placement::kCompact;
  IdView ids = IdView::kCargo;
  int depth = 1;              // operations that may be open at once
  bool weights_back = false;  // combine can bring routing weights back to their tokens
  bool low_precision_combine = false;
};

// Final places need every rank's counts before the first row is stored.
TOKENYARD_HD constexpr bool counts_first(Placement placement) {
  return placement != Placement::kRankMajor;
}

TOKENYARD_HD constexpr bool routed(Placement placement) {
  return placement != Placement::kEveryRank;
}

}  // namespace tokenyard::protocol
