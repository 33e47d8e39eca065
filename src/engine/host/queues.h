// SPDX-License-Identifier: Apache-2.0
// Bounded queues between ranks: how rows of one operation cross when the window has no place for all of them.
//
// There is one queue from each rank to each other and phase, in the receiver's window: a ring of entries of one size.
// The sender says how many entries it has filled, the receiver how many it has drained; both words carry the epoch, so
// nothing has to be set back between operations. A ring is used again once the receiver has released the operation
// before; a receiver that releases this one needs the rest of its rows no more.
// Thread rule: one thread at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/engine.h"
#include "engine/host/window_view.h"
#include "engine/host/word.h"
#include "protocol/stamp.h"

namespace tokenyard::engine::host {

class Queues {
 public:
  static constexpr std::int64_t kUnknown = -1;

  Queues(const Setup& setup, const std::vector<WindowView>& windows);

  // Starts an operation. Nothing is to be sent to, or received from, anyone until `send_to` and `expect_from` say so.
  void begin(protocol::PhaseIndex phase, std::uint32_t epoch, std::int64_t entry_bytes);

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
    const std::uint32_t released = protocol::rows_released(load_acquire(own().released(phase_, peer)));
    if (protocol::reached(released, epoch_)) {
      progress.done = progress.total;
      return true;
    }
    if (!protocol::reached(released, epoch_ - 1)) return false;
    const std::int64_t drained = count_of(own().queue_drained(phase_, peer));
    const std::int64_t until = std::min(progress.total, drained + num_entries_);
    if (until <= progress.done) return false;
    while (progress.done < until) {
      const std::int64_t last = std::min(until, progress.done + batch_);
      for (; progress.done < last; ++progress.done)
        write(peer, progress.done, entry(peer, rank_, progress.done));
      publish(windows_[index(peer)].queue_filled(phase_, rank_), progress.done, ReleaseSite::kQueueFilled);
    }
    return true;
  }

  // Calls read(source, index, entry) for the entries that have come; true when there were any.
  template <class Read>
  bool receive_some(int source, Read&& read) {
    Progress& progress = from_[index(source)];
    if (progress.total == kUnknown || progress.done == progress.total) return false;
    const std::int64_t filled = std::min(progress.total, count_of(own().queue_filled(phase_, source)));
    if (filled <= progress.done) return false;
    while (progress.done < filled) {
      const std::int64_t last = std::min(filled, progress.done + batch_);
      for (; progress.done < last; ++progress.done)
        read(source, progress.done, entry(rank_, source, progress.done));
      publish(windows_[index(source)].queue_drained(phase_, rank_), progress.done, ReleaseSite::kQueueDrained);
    }
    return true;
  }

 private:
  struct Progress {
    std::int64_t total = 0;
    std::int64_t done = 0;
  };

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  [[nodiscard]] const WindowView& own() const { return windows_[index(rank_)]; }

  [[nodiscard]] int first_open(const std::vector<Progress>& list) const {
    const auto open = std::ranges::find_if(list, [](const Progress& one) { return one.done != one.total; });
    return open == list.end() ? -1 : static_cast<int>(open - list.begin());
  }

  [[nodiscard]] std::int64_t count_of(std::uint64_t& word) const {
    const std::uint64_t value = load_acquire(word);
    return protocol::stamp_is(value, epoch_) ? std::int64_t{protocol::stamp_rows(value)} : 0;
  }

  void publish(std::uint64_t& word, std::int64_t count, ReleaseSite site) const {
    store_release(word, protocol::encode_stamp(epoch_, static_cast<std::uint32_t>(count)), site);
  }

  [[nodiscard]] std::byte* entry(int receiver, int sender, std::int64_t number) const {
    return windows_[index(receiver)].queue(phase_, sender) + number % num_entries_ * entry_bytes_;
  }

  const std::vector<WindowView>& windows_;
  int rank_;
  std::int64_t queue_bytes_;

  int phase_ = 0;
  std::uint32_t epoch_ = 0;
  std::int64_t entry_bytes_ = 0;
  std::int64_t num_entries_ = 0;
  std::int64_t batch_ = 1;  // entries after which the other side is told
  std::vector<Progress> to_, from_;
};

}  // namespace tokenyard::engine::host
