// SPDX-License-Identifier: Apache-2.0
#include "communication/queue_sharing.h"

#include <algorithm>
#include <sstream>

#include "tokenyard/error.h"

#include "group/group_impl.h"

namespace tokenyard::communication {
namespace {

struct Offer {
  std::uint64_t queues = 0;           // their generation; 0: none
  std::uint32_t last_user = 0;        // of these queues
  std::uint64_t last_generation = 0;  // that this rank knows of
};

Offer parse(const std::string& text, int rank) {
  Offer offer;
  std::istringstream stream(text);
  if (stream >> offer.queues >> offer.last_user >> offer.last_generation) return offer;
  throw Error(ErrorCode::kMismatch,
              "rank " + std::to_string(rank) + " says \"" + text +
                  "\" of its queues instead of three numbers; do all ranks run the same build?",
              -1, rank);
}

}  // namespace

QueueOwner queues_of(const Group& group, std::int64_t queue_bytes) {
  QueueOwner queues = std::static_pointer_cast<engine::SharedQueues>(group::shared_slot(group).object.lock());
  const bool fit = queues != nullptr && !queues->faulted() && queues->layout().queue_bytes() >= queue_bytes;
  return fit ? queues : nullptr;
}

std::string queue_offer(const Group& group, const QueueOwner& queues) {
  return std::to_string(queues == nullptr ? 0 : queues->generation()) + " " +
         std::to_string(queues == nullptr ? 0 : queues->last_user()) + " " +
         std::to_string(group::shared_slot(group).generation);
}

// A generation that is above all that any rank knows was never given, also when some ranks missed an exchange that
// others completed; so queues of one number are the same on all ranks. Users are counted alike.
QueueAgreement agree_on_queues(const Group& group, const std::vector<std::string>& offers, const QueueOwner& own) {
  QueueAgreement agreement{.share = own != nullptr};
  std::uint64_t last = 0;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    const Offer offer = parse(offers[rank], static_cast<int>(rank));
    agreement.share = agreement.share && offer.queues == own->generation();
    agreement.user = std::max(agreement.user, offer.last_user + 1);
    last = std::max(last, offer.last_generation);
  }
  if (agreement.share) {
    agreement.generation = own->generation();
    own->reserve_user(agreement.user);
    return agreement;
  }
  agreement.user = 1;
  agreement.generation = last + 1;
  group::shared_slot(group).generation = agreement.generation;
  return agreement;
}

void publish_queues(const Group& group, const QueueOwner& queues) {
  group::shared_slot(group).object = queues;
}

}  // namespace tokenyard::communication
