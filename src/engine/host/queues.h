// SPDX-License-Identifier: Apache-2.0
// Bounded queues between ranks: how rows of one operation cross when the window has no place for all of them.
//
// There is one queue from each rank to each other and phase, in the receiver's window of queues: a ring of entries of
// one size. All communications of a group use the same ones, in turns (engine/shared_queues.h). The sender says how
// many entries it has filled, the receiver how many it has drained, or that it needs no more; both words carry the
// turn, so nothing has to be set back between operations. A ring is used again once the receiver needs no more of the
// turn before; a sender drops the rest of the rows that its receiver needs no more.
// Thread rule: one thread at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/host/queue_view.h"
#include "engine/host/word.h"
#include "engine/shared_queues.h"
#include "protocol/stamp.h"

namespace tokenyard::engine::host {

class Queues {
 public:
  static constexpr std::int64_t kUnknown = -1;

  // Of one phase.
  Queues(const Setup& setup, const std::vector<QueueView>& views, int phase);

  // Every operation takes a turn, and holds it until `end`; one that is given up at once skips its turn.
  void take_turn(std::uint32_t epoch);
  void skip_turn();
  // This rank needs no more rows of the operation that took the last turn; nothing happens when it does not hold it.
  void end();

  [[nodiscard]] bool holds(std::uint32_t epoch) const { return epoch == epoch_ && shared_.holds(phase_, turn_, user_); }

  [[nodiscard]] std::uint32_t turn() const { return turn_; }

  // A rank that came to this turn with another communication; -1: none seen.
  [[nodiscard]] int stranger() const;
  // What is wrong between this rank and one that came in another order.
  [[nodiscard]] std::string describe(int peer) const;

  // Starts the rows of the operation. Nothing is to be sent to, or received from, anyone until `send_to` and
  // `expect_from` say so.
  void begin(std::int64_t entry_bytes);

  void send_to(int peer, std::int64_t entries) { to_[index(peer)] = {entries, 0}; }

  void expect_from(int source, std::int64_t entries) { from_[index(source)] = {entries, 0}; }

  void expect_unknown() { std::ranges::fill(from_, Progress{kUnknown, 0}); }

  [[nodiscard]] bool expects_known(int source) const { return from_[index(source)].total != kUnknown; }

  // A rank that still has to take, or to give, something; -1: none.
  [[nodiscard]] int unsent() const { return first_open(to_); }

  [[nodiscard]] int unreceived() const { return first_open(from_); }

  // Calls write(peer, index, entry) for as many entries as there is room for; true when it wrote any, or learned that
  // the peer needs no more.
  template <class Write>
  bool send_some(int peer, Write&& write) {
    Progress& progress = to_[index(peer)];
    if (progress.done == progress.total) return false;
    const std::uint64_t word = load_acquire(own().drained(phase_, peer));
    const std::uint32_t released = protocol::turn_released(word, shared_.before_first());
    if (protocol::reached(released, turn_)) {
      progress.done = progress.total;
      return true;
    }
    if (!protocol::reached(released, turn_ - 1)) return false;
    const std::int64_t until = std::min(progress.total, protocol::entries_told(word, turn_) + num_entries_);
    if (until <= progress.done) return false;
    while (progress.done < until) {
      const std::int64_t last = std::min(until, progress.done + batch_);
      for (; progress.done < last; ++progress.done)
        write(peer, progress.done, entry(peer, rank_, progress.done));
      publish(views_[index(peer)].filled(phase_, rank_), progress.done, ReleaseSite::kQueueFilled);
    }
    return true;
  }

  // Calls read(source, index, entry) for the entries that have come; true when there were any.
  template <class Read>
  bool receive_some(int source, Read&& read) {
    Progress& progress = from_[index(source)];
    if (progress.total == kUnknown || progress.done == progress.total) return false;
    const std::uint64_t word = load_acquire(own().filled(phase_, source));
    const std::int64_t filled = std::min(progress.total, protocol::entries_told(word, turn_));
    if (filled <= progress.done) return false;
    while (progress.done < filled) {
      const std::int64_t last = std::min(filled, progress.done + batch_);
      for (; progress.done < last; ++progress.done)
        read(source, progress.done, entry(rank_, source, progress.done));
      publish(views_[index(source)].drained(phase_, rank_), progress.done, ReleaseSite::kQueueDrained);
    }
    return true;
  }

 private:
  struct Progress {
    std::int64_t total = 0;
    std::int64_t done = 0;
  };

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  [[nodiscard]] const QueueView& own() const { return views_[index(rank_)]; }

  [[nodiscard]] int first_open(const std::vector<Progress>& list) const {
    const auto open = std::ranges::find_if(list, [](const Progress& one) { return one.done != one.total; });
    return open == list.end() ? -1 : static_cast<int>(open - list.begin());
  }

  void publish(std::uint64_t& word, std::int64_t count, ReleaseSite site) const {
    store_release(word, protocol::encode_stamp(turn_, static_cast<std::uint32_t>(count)), site);
  }

  [[nodiscard]] std::byte* entry(int receiver, int sender, std::int64_t number) const {
    return views_[index(receiver)].queue(phase_, sender) + number % num_entries_ * entry_bytes_;
  }

  void announce(std::uint32_t turn) const;
  void tell_released() const;

  SharedQueues& shared_;
  const std::vector<QueueView>& views_;
  std::uint32_t user_;
  int rank_;
  int phase_;

  std::uint32_t epoch_ = 0;  // of the operation that took the last turn
  std::uint32_t turn_ = 0;
  std::int64_t entry_bytes_ = 0;
  std::int64_t num_entries_ = 0;
  std::int64_t batch_ = 1;  // entries after which the other side is told
  std::vector<Progress> to_, from_;
};

}  // namespace tokenyard::engine::host
