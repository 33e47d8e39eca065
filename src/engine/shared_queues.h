// SPDX-License-Identifier: Apache-2.0
// What all communications with queues of one member of a group share: the window of queues, whose turn it is, and the
// fault that they have in common (docs/design/0003-shared-queues.md). Only what this rank knows is here; the words of
// the window are the engines' affair.
// Thread rule: one thread at a time over all these communications; `Visit` checks it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tokenyard/error.h"

#include "fabric/window.h"
#include "protocol/queue_layout.h"

namespace tokenyard::engine {

class SharedQueues {
 public:
  // `generation` is the number of these queues on every rank. Turns go on from `turn`.
  SharedQueues(std::uint64_t generation,
               std::unique_ptr<fabric::Window> window,
               const protocol::QueueLayout& layout,
               std::uint32_t turn);

  [[nodiscard]] std::uint64_t generation() const { return generation_; }

  [[nodiscard]] const fabric::Window& window() const { return *window_; }

  [[nodiscard]] const protocol::QueueLayout& layout() const { return layout_; }

  // A communication is a user; its number is the same on every rank, and the label is what errors call it.
  [[nodiscard]] std::uint32_t last_user() const { return last_user_; }

  // The number is given, also when it will not join.
  void reserve_user(std::uint32_t user) { last_user_ = user; }

  void join(std::uint32_t user, std::string label);
  void leave(std::uint32_t user);
  [[nodiscard]] std::string label_of(std::uint32_t user) const;

  // Throws kInvalidState, and names what is open, when an operation of `user` may not begin now.
  void check_turn(int phase, std::uint32_t user) const;
  // Takes the next turn, open until `end`.
  std::uint32_t begin(int phase, std::uint32_t user);

  // Takes the next turn and has no use for it.
  std::uint32_t skip(int phase) { return ++turns_[index(phase)]; }

  [[nodiscard]] bool holds(int phase, std::uint32_t turn, std::uint32_t user) const {
    const Open& open = open_[index(phase)];
    return open.user == user && open.turn == turn;
  }

  void end(int phase) { open_[index(phase)].user = 0; }

  [[nodiscard]] bool is_open(int phase) const { return open_[index(phase)].user != 0; }

  // The last one that was taken.
  [[nodiscard]] std::uint32_t turn(int phase) const { return turns_[index(phase)]; }

  // The turn before the first one since the words of the window were zero.
  [[nodiscard]] std::uint32_t before_first() const { return before_first_; }

  // A fault that one communication ended in is every communication's, until each has forgotten it.
  void fail(const Status& fault);

  [[nodiscard]] bool faulted() const { return faulted_; }

  [[nodiscard]] const Status& last_fault() const { return last_fault_; }

  [[nodiscard]] std::uint64_t num_faults() const { return num_faults_; }

  // Forgets open turns; the words must become zero on every rank. `turn` is agreed and ahead of every rank's turns.
  void set_back(std::uint32_t turn);
  [[nodiscard]] std::uint32_t latest_turn() const;

  // One thread's stay inside the queues. Throws kInvalidState when another thread is there.
  class Visit {
   public:
    explicit Visit(SharedQueues* queues);
    ~Visit();
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    Visit(Visit&&) = delete;
    Visit& operator=(Visit&&) = delete;

   private:
    SharedQueues* queues_;
  };

 private:
  struct Open {
    std::uint32_t user = 0;  // 0: none
    std::uint32_t turn = 0;
  };

  struct User {
    std::uint32_t number = 0;
    std::string label;
  };

  static std::size_t index(int phase) { return static_cast<std::size_t>(phase); }

  std::uint64_t generation_;
  std::unique_ptr<fabric::Window> window_;
  protocol::QueueLayout layout_;
  std::array<std::uint32_t, protocol::kNumQueuePhases> turns_{};
  std::array<Open, protocol::kNumQueuePhases> open_{};
  std::uint32_t before_first_;
  std::uint32_t last_user_ = 0;
  std::vector<User> users_;
  bool faulted_ = false;  // since the words were zero
  Status last_fault_;
  std::uint64_t num_faults_ = 0;
  std::atomic_flag busy_;
};

}  // namespace tokenyard::engine
