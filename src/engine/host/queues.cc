// SPDX-License-Identifier: Apache-2.0
#include "engine/host/queues.h"

namespace tokenyard::engine::host {

Queues::Queues(const Setup& setup, const std::vector<QueueView>& views, int phase)
    : shared_(*setup.queues), views_(views), user_(setup.queue_user), rank_(setup.rank), phase_(phase) {
  to_.resize(views.size());
  from_.resize(views.size());
}

void Queues::take_turn(std::uint32_t epoch) {
  epoch_ = epoch;
  turn_ = shared_.begin(phase_, user_);
  announce(turn_);
}

void Queues::skip_turn() {
  announce(shared_.skip(phase_));
  if (!shared_.is_open(phase_)) tell_released();  // else with the turn that is open
}

// Of whoever waits in another operation of this turn: the word guards nothing.
void Queues::announce(std::uint32_t turn) const {
  for (const QueueView& view : views_)
    store_relaxed(view.begun(phase_, rank_), protocol::encode_begun(turn, user_));
}

void Queues::begin(std::int64_t entry_bytes) {
  entry_bytes_ = entry_bytes;
  num_entries_ = shared_.layout().queue_bytes() / entry_bytes;
  // The two sides work at once when a part of the ring is told of while the rest is being filled.
  batch_ = std::max<std::int64_t>(1, num_entries_ / 4);
  std::ranges::fill(to_, Progress{});
  std::ranges::fill(from_, Progress{});
}

void Queues::end() {
  if (!shared_.holds(phase_, turn_, user_)) return;
  shared_.end(phase_);
  tell_released();
}

// Also of turns that were skipped while this one was open.
void Queues::tell_released() const {
  const std::uint64_t word = protocol::encode_stamp(shared_.turn(phase_), protocol::kNeedsNoMore);
  for (const QueueView& view : views_)
    store_release(view.drained(phase_, rank_), word, ReleaseSite::kQueueDrained);
}

int Queues::stranger() const {
  for (std::size_t peer = 0; peer < views_.size(); ++peer) {
    const std::uint64_t word = load_relaxed(own().begun(phase_, static_cast<int>(peer)));
    const std::uint32_t user = protocol::begun_user(word);
    if (protocol::begun_turn(word) == turn_ && user != 0 && user != user_) return static_cast<int>(peer);
  }
  return -1;
}

std::string Queues::describe(int peer) const {
  const std::uint64_t word = load_relaxed(own().begun(phase_, peer));
  const std::string turn = std::to_string(turn_);
  return "the communications of this group are used in different orders: at turn " + turn + " rank " +
         std::to_string(rank_) + " is in " + shared_.label_of(user_) + ", and rank " + std::to_string(peer) +
         " came at turn " + std::to_string(protocol::begun_turn(word)) + " with " +
         shared_.label_of(protocol::begun_user(word)) +
         "; reset() all communications of the group that have queues, on every rank";
}

}  // namespace tokenyard::engine::host
