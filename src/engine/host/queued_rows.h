// SPDX-License-Identifier: Apache-2.0
// Rounds whose rows cross in queues (protocol::Transport::kQueue): what is being sent, what is being received, and the
// ordinary memory where received rows land. The queues are those of all communications of the group, in turns.
//
// Whoever waits calls `advance`, whatever it waits for: it fills and drains the queues of both phases. So a rank that
// waits for room always makes room for others, and no skew can close a circle of full queues.
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/host/lane.h"
#include "engine/host/queue_view.h"
#include "engine/host/queues.h"
#include "engine/host/window_view.h"
#include "engine/untouched_memory.h"

namespace tokenyard::engine::host {

class QueuedRows {
 public:
  QueuedRows(const Setup& setup, const std::vector<WindowView>& windows);
  // Lets go of the turns that it still holds, so that other communications can go on.
  ~QueuedRows();
  QueuedRows(const QueuedRows&) = delete;
  QueuedRows& operator=(const QueuedRows&) = delete;
  QueuedRows(QueuedRows&&) = delete;
  QueuedRows& operator=(QueuedRows&&) = delete;

  // An operation takes a turn before it tells its peers anything, and ends it with end_dispatch or end_combine; one
  // that is given up at once skips its turn.
  void take_turn(int phase, std::uint32_t epoch) { queues(phase).take_turn(epoch); }

  void skip_turn(int phase) { queues(phase).skip_turn(); }

  // Whether the operation has its turn still; a reset of any communication on the queues takes it away.
  [[nodiscard]] bool holds_turn(int phase, std::uint32_t epoch) const { return queues(phase).holds(epoch); }

  [[nodiscard]] std::uint32_t turn(int phase) const { return queues(phase).turn(); }

  // Starts a dispatch whose headers this rank has written; `lanes` say what a row is made of. The round's received
  // part is filled as headers and rows come. `request` is not kept; the round is, until the operation ends.
  void begin_dispatch(const DispatchRequest& request, std::vector<Lane>& lanes, Round& round);
  // The same for a combine; `request` must live until everything is sent.
  void begin_combine(const CombineRequest& request, Dtype wire, const Round& round);
  void end_dispatch(std::uint32_t epoch);
  void end_combine(std::uint32_t epoch);
  // Forgets both, and sets this rank's words of the queues back to zero.
  void reset();

  // Moves what can be moved now, in both phases; true when anything moved.
  bool advance();

  // A rank that still has to take, or to give, rows of the phase's operation; -1: none.
  [[nodiscard]] int unsent(int phase) const { return queues_[static_cast<std::size_t>(phase)].unsent(); }

  [[nodiscard]] int unreceived(int phase) const { return queues_[static_cast<std::size_t>(phase)].unreceived(); }

  // Looks whether a rank came to this operation's turn with another communication.
  void look_for_strangers(int phase);

  // A rank that did, or whose header names another turn, which stops the operation; -1: none.
  [[nodiscard]] int out_of_turn() const { return out_of_turn_; }

  [[nodiscard]] std::string describe_order(int phase) const { return queues(phase).describe(out_of_turn_); }

  // A source whose header disagrees with this rank's arguments, which stops the dispatch; -1: none.
  [[nodiscard]] int disagreeing() const { return disagreeing_; }

  // An owner that gave its combine up; -1: none.
  [[nodiscard]] int aborted_owner() const { return aborted_owner_; }

  // The row that came back for a copy of a token (an index of Round::destinations).
  [[nodiscard]] const std::byte* combined_row(std::int64_t copy) const {
    return combine_landing_.get() + copy * setup_.layout.combine_stride();
  }

 private:
  struct Copy {
    std::int32_t token = 0;
    std::int32_t index = 0;  // of Round::destinations
  };

  // Entries by peer: those of peer p are [begin[p], begin[p + 1]).
  template <class Item>
  struct ByPeer {
    std::vector<std::int64_t> begin;
    std::vector<Item> items;
  };

  Queues& queues(int phase) { return queues_[static_cast<std::size_t>(phase)]; }

  [[nodiscard]] const Queues& queues(int phase) const { return queues_[static_cast<std::size_t>(phase)]; }

  void sort_copies(const Round& round, ByPeer<Copy>& copies) const;
  void list_received(const Round& round);
  bool advance_dispatch();
  bool advance_combine();
  bool take_dispatch_header(int source);
  bool take_combine_header(int owner);
  void write_token(int peer, std::int64_t number, std::byte* entry) const;
  template <class RowOf>
  void land(int source, std::int64_t token, RowOf&& row_of);
  void land_token(int source, const std::byte* entry);
  void land_own_tokens();
  void write_expert_row(int origin, std::int64_t number, std::byte* entry) const;
  void land_own_expert_rows();

  const Setup& setup_;
  const std::vector<WindowView>& windows_;
  std::vector<QueueView> views_;  // [num_ranks]
  std::vector<Queues> queues_;    // by phase
  UntouchedMemory landing_;
  UntouchedMemory combine_landing_;
  std::int64_t space_stride_ = 0;

  Round* dispatching_ = nullptr;
  std::vector<Lane>* lanes_ = nullptr;
  std::uint64_t digest_ = 0;
  std::int64_t agreed_ = kNotGiven;
  int disagreeing_ = -1;
  int out_of_turn_ = -1;  // in either phase; the first one ends all
  ByPeer<Copy> outgoing_;

  const Round* combining_ = nullptr;
  const CombineRequest* combine_request_ = nullptr;
  Dtype wire_ = Dtype::kBf16;
  int aborted_owner_ = -1;
  ByPeer<Copy> incoming_;           // copies that come back, by owner
  ByPeer<std::int32_t> to_origin_;  // received tokens to send back, by origin
};

}  // namespace tokenyard::engine::host
