// SPDX-License-Identifier: Apache-2.0
// Groups over the caller's own collectives. They are only as bounded as the caller's are: deadlines are not enforced.
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "tokenyard/error.h"

#include "group/factories.h"
#include "system/random.h"

namespace tokenyard::group {

namespace {

std::vector<Bytes> checked_gather(const GroupCallbacks& callbacks, std::span<const std::byte> bytes) {
  std::vector<Bytes> result = callbacks.all_gather(bytes);
  if (result.size() != static_cast<std::size_t>(callbacks.num_ranks)) {
    throw Error(ErrorCode::kMismatch,
                "the all_gather callback returned " + std::to_string(result.size()) + " entries; the group has " +
                    std::to_string(callbacks.num_ranks) + " ranks",
                callbacks.rank);
  }
  const Bytes& own = result[static_cast<std::size_t>(callbacks.rank)];
  if (own.size() != bytes.size() || (!own.empty() && std::memcmp(own.data(), bytes.data(), own.size()) != 0)) {
    throw Error(ErrorCode::kMismatch,
                "the all_gather callback returned other bytes for rank " + std::to_string(callbacks.rank) +
                    " than that rank gave; entries must be in rank order",
                callbacks.rank);
  }
  return result;
}

// Everybody draws a number and rank 0's is taken; the same exchange shows whether the ranks agree on who they are.
std::uint64_t agree_on_nonce(const GroupCallbacks& callbacks) {
  std::array<std::uint64_t, 3> card{system::random_u64(), static_cast<std::uint64_t>(callbacks.rank),
                                    static_cast<std::uint64_t>(callbacks.num_ranks)};
  const std::vector<Bytes> cards = checked_gather(callbacks, std::as_bytes(std::span(card)));
  std::uint64_t nonce = 0;
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    if (cards[rank].size() != sizeof(card)) {
      throw Error(ErrorCode::kMismatch,
                  "rank " + std::to_string(rank) + " sent " + std::to_string(cards[rank].size()) +
                      " bytes when the group was made; " + std::to_string(sizeof(card)) + " were expected",
                  callbacks.rank, static_cast<int>(rank));
    }
    std::memcpy(card.data(), cards[rank].data(), sizeof(card));
    if (card[1] != rank || card[2] != cards.size()) {
      throw Error(ErrorCode::kMismatch,
                  "entry " + std::to_string(rank) + " of the all_gather callback came from rank " +
                      std::to_string(card[1]) + " of " + std::to_string(card[2]) + "; the group has " +
                      std::to_string(cards.size()) + " ranks in rank order",
                  callbacks.rank, static_cast<int>(rank));
    }
    if (rank == 0) nonce = card[0];
  }
  return nonce;
}

class CallbackMember final : public GroupImpl {
 public:
  CallbackMember(const Membership& membership, GroupCallbacks callbacks)
      : GroupImpl(membership), callbacks_(std::move(callbacks)) {}

  std::vector<Bytes> all_gather(std::span<const std::byte> bytes, std::chrono::milliseconds) override {
    return checked_gather(callbacks_, bytes);
  }

  void barrier(std::chrono::milliseconds) override { callbacks_.barrier(); }

 private:
  GroupCallbacks callbacks_;
};

}  // namespace

std::unique_ptr<GroupImpl> make_from_callbacks(GroupCallbacks callbacks) {
  const Membership membership{.rank = callbacks.rank,
                              .num_ranks = callbacks.num_ranks,
                              .nonce = agree_on_nonce(callbacks),
                              .deadline = GroupOptions{}.deadline,
                              .offers_agreement = false};
  return std::make_unique<CallbackMember>(membership, std::move(callbacks));
}

}  // namespace tokenyard::group
