// SPDX-License-Identifier: Apache-2.0
// How the communications of a group agree on the queues that they share (docs/design/0003-shared-queues.md): each rank
// offers what it has, all offers are exchanged, and the same rule on the same offers gives every rank the same answer.
// Thread rule: as the group's, one thread at a time per rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tokenyard/group.h"

#include "engine/shared_queues.h"

namespace tokenyard::communication {

using QueueOwner = std::shared_ptr<engine::SharedQueues>;  // shared, because any of its communications may go last

// What this rank's communications of the group have, null when nothing that a new one could share.
[[nodiscard]] QueueOwner queues_of(const Group& group, std::int64_t queue_bytes);

// This rank's offer, one word of text without a newline.
[[nodiscard]] std::string queue_offer(const Group& group, const QueueOwner& queues);

struct QueueAgreement {
  bool share = false;            // what every rank offered; else all make new ones
  std::uint64_t generation = 0;  // of the shared or new ones
  std::uint32_t user = 0;        // the number of the new communication among their users, from 1 on
};

// From all ranks' offers. Notes the numbers given, whatever becomes of the communication.
[[nodiscard]] QueueAgreement agree_on_queues(const Group& group,
                                             const std::vector<std::string>& offers,
                                             const QueueOwner& own);

// New queues, from now on what the group's communications share.
void publish_queues(const Group& group, const QueueOwner& queues);

}  // namespace tokenyard::communication
