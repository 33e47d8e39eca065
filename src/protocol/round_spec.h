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
  kRankMajor,  // to the owners of its experts; in the source's space, row = token index
  // As rank major on the wire; the receiver then copies each row to every expert it is for, and combine weighs and
  // reduces what the experts gave before a row crosses back.
  kExpertMajor,
};

// How rows reach the receiver.
enum class Transport : std::uint8_t {
  kWindow,  // each row to a place of its own in the receiver's window
  kQueue,   // through bounded queues, which the receiver drains into memory of its own
};

// What a row of combine is while it crosses.
enum class CombineWire : std::uint8_t { kParamsDtype, kF8e4m3, kLogarithmic };

// What the receiver makes of the ids it is sent.
enum class IdView : std::uint8_t { kCargo, kGlobal, kLocal };

struct RoundSpec {
  Placement placement = Placement::kCompact;
  IdView ids = IdView::kCargo;
  int depth = 1;  // operations that may be open at once
  Transport transport = Transport::kWindow;
  CombineWire combine_wire = CombineWire::kParamsDtype;
  bool weights_back = false;  // combine can bring routing weights back to their tokens
};

// Final places need every rank's counts before the first row is stored.
TOKENYARD_HD constexpr bool counts_first(Placement placement) {
  return placement == Placement::kEveryRank || placement == Placement::kCompact;
}

// The receiver copies rows out by expert, and weighs and reduces them before they go back.
TOKENYARD_HD constexpr bool by_expert(Placement placement) {
  return placement == Placement::kExpertMajor;
}

// Otherwise each source has a space of its own, where a token's index is its row.
TOKENYARD_HD constexpr bool space_per_source(Placement placement) {
  return !counts_first(placement);
}

TOKENYARD_HD constexpr bool routed(Placement placement) {
  return placement != Placement::kEveryRank;
}

}  // namespace tokenyard::protocol
