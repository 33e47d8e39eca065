// SPDX-License-Identifier: Apache-2.0
// A group joins the ranks that will share windows: threads of one process, processes of one host, or ranks that
// reach each other over TCP; or it wraps whatever the caller already has (MPI, torch.distributed).
//
// A group is used for set-up only: no byte of a token travels through it. Collective calls must be made by all
// ranks in the same order. Different groups are independent, may overlap and may live in one process.
// Thread rule: one thread at a time per rank's `Group`; different ranks' groups may be used concurrently.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tokenyard {

class Group;

namespace group {
class GroupImpl;
struct SharedSlot;
SharedSlot& shared_slot(const Group& group);
}  // namespace group

using Bytes = std::vector<std::byte>;

struct GroupOptions {
  // How long a rank waits for the others to join and for each collective call.
  std::chrono::milliseconds deadline{60'000};
};

// The caller's own means. Such a group offers no agreement on dead ranks: its collectives hang when theirs do.
struct GroupCallbacks {
  int rank = 0;
  int num_ranks = 1;
  // Returns every rank's bytes in rank order; lengths may differ between ranks.
  std::function<std::vector<Bytes>(std::span<const std::byte>)> all_gather;
  std::function<void()> barrier;
};

// Cheap to copy; copies are the same member. A communication keeps the group it was made with alive. The last copy to
// go leaves the group without waiting for anyone; only rank 0, where it serves a store, may linger up to 2 s to hand a
// member the results it is owed.
class Group {
 public:
  // `num_ranks` members for threads of this process, in rank order. Throws kInvalidArgument unless
  // 1 <= num_ranks <= 1024.
  static std::vector<Group> in_process(int num_ranks, const GroupOptions& options = {});

  // Processes of one host and one user that agree on `name` (1 to 64 characters of [A-Za-z0-9._-]). Blocks until all
  // have joined. Rank 0 serves the group on an abstract Unix socket that only the same user may use; nothing is
  // left behind, also after kill -9 of every rank. Throws kTimeout naming who is missing.
  static Group on_host(std::string_view name, int rank, int num_ranks, const GroupOptions& options = {});

  // Ranks that reach `address` ("127.0.0.1:29500", "[::1]:29500"), on which rank 0 serves the group's store; the wire
  // format is in docs/store.md. The port is bound only to the address given. Blocks until all have joined.
  static Group over_tcp(std::string_view address, int rank, int num_ranks, const GroupOptions& options = {});

  // Wraps the caller's collectives. Collective: one all_gather shares the nonce and checks ranks and size. Throws
  // kInvalidArgument when a callback is missing or the rank out of range.
  static Group from_callbacks(GroupCallbacks callbacks);

  [[nodiscard]] int rank() const;
  [[nodiscard]] int num_ranks() const;
  // A random number that all members share and other sessions do not.
  [[nodiscard]] std::uint64_t nonce() const;
  // Whether a dead member is noticed by the others (false for callbacks).
  [[nodiscard]] bool offers_agreement() const;

  // Collective. Every rank's bytes in rank order; at most kMaxGatherBytes each. Throws kTimeout naming the ranks that
  // did not come, or kPeerLost naming one that left. A collective that timed out counts as made: the group works on
  // once every rank has made the same number of calls.
  [[nodiscard]] std::vector<Bytes> all_gather(std::span<const std::byte> bytes) const;
  [[nodiscard]] std::vector<Bytes> all_gather(std::span<const std::byte> bytes,
                                              std::chrono::milliseconds deadline) const;
  // Collective: an all_gather of nothing.
  void barrier() const;
  void barrier(std::chrono::milliseconds deadline) const;

  static constexpr std::int64_t kMaxGatherBytes = 1 << 20;
  static constexpr int kMaxRanks = 1024;

 private:
  friend group::SharedSlot& group::shared_slot(const Group& group);

  explicit Group(std::shared_ptr<group::GroupImpl> impl);
  // Shared because communications made from a group outlive the caller's variable.
  std::shared_ptr<group::GroupImpl> impl_;
};

}  // namespace tokenyard
