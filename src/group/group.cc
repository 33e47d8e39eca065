// SPDX-License-Identifier: Apache-2.0
#include "tokenyard/group.h"

#include <algorithm>
#include <string>
#include <utility>

#include "tokenyard/error.h"

#include "group/factories.h"
#include "system/tcp_socket.h"

namespace tokenyard {

namespace {

using std::chrono::milliseconds;

constexpr std::size_t kMaxNameLength = 64;

void check_num_ranks(int num_ranks) {
  if (num_ranks >= 1 && num_ranks <= Group::kMaxRanks) return;
  throw Error(ErrorCode::kInvalidArgument,
              "num_ranks is " + std::to_string(num_ranks) + "; it must be 1 to " + std::to_string(Group::kMaxRanks));
}

void check_rank(int rank, int num_ranks) {
  check_num_ranks(num_ranks);
  if (rank >= 0 && rank < num_ranks) return;
  throw Error(ErrorCode::kInvalidArgument,
              "rank is " + std::to_string(rank) + "; it must be 0 to " + std::to_string(num_ranks - 1), rank);
}

void check_deadline(milliseconds deadline) {
  if (deadline.count() >= 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              "the deadline is " + std::to_string(deadline.count()) + " ms; it must not be negative");
}

bool allowed_in_name(char c) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
}

void check_name(std::string_view name) {
  if (name.empty() || name.size() > kMaxNameLength) {
    throw Error(ErrorCode::kInvalidArgument, "the group's name has " + std::to_string(name.size()) +
                                                 " characters; it must have 1 to " + std::to_string(kMaxNameLength));
  }
  const auto bad = std::find_if_not(name.begin(), name.end(), allowed_in_name);
  if (bad == name.end()) return;
  throw Error(ErrorCode::kInvalidArgument,
              "the group's name has character " + std::to_string(static_cast<int>(static_cast<unsigned char>(*bad))) +
                  " at position " + std::to_string(bad - name.begin()) + "; [A-Za-z0-9._-] are allowed");
}

}  // namespace

Group::Group(std::shared_ptr<group::GroupImpl> impl) : impl_(std::move(impl)) {}

std::vector<Group> Group::in_process(int num_ranks, const GroupOptions& options) {
  check_num_ranks(num_ranks);
  check_deadline(options.deadline);
  std::vector<Group> groups;
  for (auto& member : group::make_in_process(num_ranks, options.deadline))
    groups.push_back(Group(std::move(member)));
  return groups;
}

Group Group::on_host(std::string_view name, int rank, int num_ranks, const GroupOptions& options) {
  check_name(name);
  check_rank(rank, num_ranks);
  check_deadline(options.deadline);
  return Group(group::make_on_host(name, rank, num_ranks, options.deadline));
}

Group Group::over_tcp(std::string_view address, int rank, int num_ranks, const GroupOptions& options) {
  const system::TcpAddress parsed = system::parse_tcp_address(address);
  check_rank(rank, num_ranks);
  check_deadline(options.deadline);
  return Group(group::make_over_tcp(parsed, rank, num_ranks, options.deadline));
}

Group Group::from_callbacks(GroupCallbacks callbacks) {
  check_rank(callbacks.rank, callbacks.num_ranks);
  if (!callbacks.all_gather || !callbacks.barrier) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string("the callback ") + (callbacks.all_gather ? "barrier" : "all_gather") +
                    " is missing; a group needs both all_gather and barrier",
                callbacks.rank);
  }
  return Group(group::make_from_callbacks(std::move(callbacks)));
}

int Group::rank() const {
  return impl_->membership().rank;
}

int Group::num_ranks() const {
  return impl_->membership().num_ranks;
}

std::uint64_t Group::nonce() const {
  return impl_->membership().nonce;
}

bool Group::offers_agreement() const {
  return impl_->membership().offers_agreement;
}

std::vector<Bytes> Group::all_gather(std::span<const std::byte> bytes) const {
  return all_gather(bytes, impl_->membership().deadline);
}

std::vector<Bytes> Group::all_gather(std::span<const std::byte> bytes, milliseconds deadline) const {
  if (bytes.size() > static_cast<std::size_t>(kMaxGatherBytes)) {
    throw Error(ErrorCode::kInvalidArgument,
                "all_gather of " + std::to_string(bytes.size()) + " bytes; a rank may give at most " +
                    std::to_string(kMaxGatherBytes),
                rank());
  }
  check_deadline(deadline);
  return impl_->all_gather(bytes, deadline);
}

void Group::barrier() const {
  barrier(impl_->membership().deadline);
}

void Group::barrier(milliseconds deadline) const {
  check_deadline(deadline);
  impl_->barrier(deadline);
}

group::SharedSlot& group::shared_slot(const Group& group) {
  return group.impl_->shared_slot();
}

}  // namespace tokenyard
