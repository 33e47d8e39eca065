// SPDX-License-Identifier: Apache-2.0
#include "engine/shared_queues.h"

#include <algorithm>
#include <utility>

namespace tokenyard::engine {
namespace {

constexpr std::array<const char*, protocol::kNumQueuePhases> kPhaseNames{"dispatch", "combine"};

}  // namespace

SharedQueues::SharedQueues(std::uint64_t generation,
                           std::unique_ptr<fabric::Window> window,
                           const protocol::QueueLayout& layout,
                           std::uint32_t turn)
    : generation_(generation), window_(std::move(window)), layout_(layout), before_first_(turn) {
  turns_.fill(turn);
}

void SharedQueues::join(std::uint32_t user, std::string label) {
  reserve_user(user);
  users_.push_back({user, std::move(label)});
}

void SharedQueues::leave(std::uint32_t user) {
  std::erase_if(users_, [user](const User& one) { return one.number == user; });
}

std::string SharedQueues::label_of(std::uint32_t user) const {
  const auto found = std::ranges::find(users_, user, &User::number);
  const std::string text = "communication " + std::to_string(user);
  return found == users_.end() ? text + " (not of this rank any more)" : text + " (" + found->label + ")";
}

void SharedQueues::check_turn(int phase, std::uint32_t user) const {
  for (int other = 0; other < protocol::kNumQueuePhases; ++other) {
    const Open& open = open_[index(other)];
    if (open.user == 0 || (open.user == user && other != phase)) continue;
    const std::string name = kPhaseNames[index(other)];
    throw Error(ErrorCode::kInvalidState,
                label_of(open.user) + " has a " + name +
                    " that is sent and not received; receive it, or let its handle die, before the next " +
                    kPhaseNames[index(phase)] + " of " + label_of(user) +
                    ": communications of one group share their queues and take turns");
  }
}

std::uint32_t SharedQueues::begin(int phase, std::uint32_t user) {
  const std::uint32_t turn = ++turns_[index(phase)];
  open_[index(phase)] = {user, turn};
  return turn;
}

void SharedQueues::fail(const Status& fault) {
  if (std::exchange(faulted_, true)) return;
  last_fault_ = fault;
  ++num_faults_;
}

void SharedQueues::set_back(std::uint32_t turn) {
  turns_.fill(turn);
  open_.fill({});
  before_first_ = turn;
  faulted_ = false;
}

std::uint32_t SharedQueues::latest_turn() const {
  return protocol::reached(turns_[0], turns_[1]) ? turns_[0] : turns_[1];
}

// Acquire, for what the thread did that was inside before: it pairs with the release of its `~Visit`.
SharedQueues::Visit::Visit(SharedQueues* queues) : queues_(queues) {
  if (queues_ == nullptr || !queues_->busy_.test_and_set(std::memory_order_acquire)) return;
  throw Error(ErrorCode::kInvalidState,
              "another thread is inside an operation of this group's queues; communications that run side by side need "
              "groups of their own");
}

// Release, for the next thread: it pairs with the acquire of its `Visit`.
SharedQueues::Visit::~Visit() {
  if (queues_ != nullptr) queues_->busy_.clear(std::memory_order_release);
}

}  // namespace tokenyard::engine
