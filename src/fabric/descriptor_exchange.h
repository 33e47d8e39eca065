// SPDX-License-Identifier: Apache-2.0
// Gives every rank a descriptor of every other rank's segment, for ranks that are processes of one host, whatever kind
// of group joins them: descriptors cannot travel through a group's collectives, so the ranks meet on Unix sockets.
// Thread rule: collective; called by one thread of each rank.
#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "tokenyard/group.h"

#include "system/file_descriptor.h"

namespace tokenyard::fabric {

// Entry p is a descriptor of rank p's `own_fd`; the own entry is invalid. `wanted`, when not empty, has an entry per
// rank: descriptors are exchanged only with ranks marked nonzero (those of other processes), and rank i must want j
// exactly when j wants i. No helper thread: each rank serves and visits its peers from one poll loop.
//
// Throws on every rank: kPeerFailed when a rank could not take part (its own error on that rank), kMismatch when
// `wanted` is not symmetric, kUnsupported naming a peer on another host or in another network namespace. Throws
// kPeerLost naming a rank that died or gave up meanwhile, kTimeout naming those that did not come.
[[nodiscard]] std::vector<system::FileDescriptor> exchange_descriptors(const Group& group,
                                                                       int own_fd,
                                                                       std::span<const char> wanted,
                                                                       std::chrono::milliseconds deadline);

}  // namespace tokenyard::fabric
