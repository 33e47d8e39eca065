// SPDX-License-Identifier: Apache-2.0
// Groups of threads: all members meet in one hub.
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "group/factories.h"
#include "group/failures.h"
#include "group/gather_ledger.h"
#include "system/deadline.h"
#include "system/random.h"

namespace tokenyard::group {

namespace {

class Hub {
 public:
  explicit Hub(int num_ranks) : ledger_(num_ranks) {}

  std::vector<Bytes> all_gather(int rank, std::span<const std::byte> bytes, std::chrono::milliseconds wait) {
    const system::Deadline deadline = system::Deadline::after(wait);
    Bytes contribution(bytes.begin(), bytes.end());
    std::unique_lock lock(mutex_);
    if (lost_ >= 0) throw peer_lost_error(rank, lost_);
    if (!ledger_.may_contribute(rank)) {
      throw too_far_ahead_error(rank, ledger_.missing(ledger_.next_sequence(rank) - kMaxCollectivesAhead));
    }
    const std::uint64_t sequence = ledger_.contribute(rank, std::move(contribution));
    if (ledger_.complete(sequence)) changed_.notify_all();
    changed_.wait_until(lock, deadline.at(), [&] { return ledger_.complete(sequence) || lost_ >= 0; });
    // Complete comes first: who leaves after its last collective takes nothing from those who still read it.
    if (ledger_.complete(sequence)) return ledger_.read(rank, sequence);
    ledger_.stop_waiting(rank, sequence);
    if (lost_ >= 0) throw peer_lost_error(rank, lost_);
    throw timeout_error("a collective", rank, wait, ledger_.missing(sequence));
  }

  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    if (lost_ < 0) lost_ = rank;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  GatherLedger ledger_;
  int lost_ = -1;  // the first who left: later ones mostly follow from it
};

class InProcessMember final : public GroupImpl {
 public:
  // The hub is shared because members go in any order, each on its own thread.
  InProcessMember(const Membership& membership, std::shared_ptr<Hub> hub)
      : GroupImpl(membership), hub_(std::move(hub)) {}

  InProcessMember(const InProcessMember&) = delete;
  InProcessMember& operator=(const InProcessMember&) = delete;
  InProcessMember(InProcessMember&&) = delete;
  InProcessMember& operator=(InProcessMember&&) = delete;

  ~InProcessMember() override { hub_->leave(membership().rank); }

  std::vector<Bytes> all_gather(std::span<const std::byte> bytes, std::chrono::milliseconds deadline) override {
    return hub_->all_gather(membership().rank, bytes, deadline);
  }

 private:
  std::shared_ptr<Hub> hub_;
};

}  // namespace

std::vector<std::unique_ptr<GroupImpl>> make_in_process(int num_ranks, std::chrono::milliseconds deadline) {
  const auto hub = std::make_shared<Hub>(num_ranks);
  const std::uint64_t nonce = system::random_u64();
  std::vector<std::unique_ptr<GroupImpl>> members;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Membership membership{.rank = rank, .num_ranks = num_ranks, .nonce = nonce, .deadline = deadline};
    members.push_back(std::make_unique<InProcessMember>(membership, hub));
  }
  return members;
}

}  // namespace tokenyard::group
