// SPDX-License-Identifier: Apache-2.0
// What a kind of group has to bring. One object is one member; its destructor leaves the group without waiting for
// another member.
// Thread rule: one thread at a time per object; different members may be used concurrently.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tokenyard/group.h"

namespace tokenyard::group {

struct Membership {
  int rank = 0;
  int num_ranks = 1;
  std::uint64_t nonce = 0;
  std::chrono::milliseconds deadline{0};  // of a collective that is given none
  bool offers_agreement = true;
};

// What communications of one member own together. The group does not look into it and keeps it alive for nobody.
struct SharedSlot {
  std::weak_ptr<void> object;
  std::uint64_t generation = 0;  // the last one that ranks agreed on for such an object
};

class GroupImpl {
 public:
  explicit GroupImpl(const Membership& membership) : membership_(membership) {}

  virtual ~GroupImpl() = default;
  GroupImpl(const GroupImpl&) = delete;
  GroupImpl& operator=(const GroupImpl&) = delete;
  GroupImpl(GroupImpl&&) = delete;
  GroupImpl& operator=(GroupImpl&&) = delete;

  [[nodiscard]] const Membership& membership() const { return membership_; }

  // `bytes` is within Group::kMaxGatherBytes and `deadline` is not negative: Group checks both.
  [[nodiscard]] virtual std::vector<Bytes> all_gather(std::span<const std::byte> bytes,
                                                      std::chrono::milliseconds deadline) = 0;

  [[nodiscard]] SharedSlot& shared_slot() { return shared_slot_; }

  virtual void barrier(std::chrono::milliseconds deadline) { static_cast<void>(all_gather({}, deadline)); }

 private:
  Membership membership_;
  SharedSlot shared_slot_;
};

}  // namespace tokenyard::group
