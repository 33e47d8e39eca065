// SPDX-License-Identifier: Apache-2.0
#include "engine/host/queued_rows.h"

#include <algorithm>
#include <cstring>

#include "engine/host/expert_output.h"
#include "engine/host/word.h"
#include "protocol/queue_entry.h"

namespace tokenyard::engine::host {

QueuedRows::QueuedRows(const Setup& setup, const std::vector<WindowView>& windows) : setup_(setup), windows_(windows) {
  const protocol::WindowShape& shape = setup.layout.shape();
  views_.reserve(windows.size());
  for (int rank = 0; rank < shape.num_ranks; ++rank)
    views_.emplace_back(setup.queues->window().peer(rank), setup.queues->layout());
  for (int phase = 0; phase < protocol::kNumQueuePhases; ++phase)
    queues_.emplace_back(setup, views_, phase);
  space_stride_ = setup.layout.payload_bytes();
  landing_ = make_untouched_memory(shape.num_ranks * space_stride_);
  const auto ranks = static_cast<std::size_t>(shape.num_ranks);
  const auto copies = static_cast<std::size_t>(shape.max_tokens * std::min(shape.num_ranks, setup.params.top_k));
  combine_landing_ = make_untouched_memory(static_cast<std::int64_t>(copies) * setup.layout.combine_stride());
  for (auto* list : {&outgoing_, &incoming_}) {
    list->begin.resize(ranks + 1);
    list->items.resize(copies);
  }
  to_origin_.begin.resize(ranks + 1);
  to_origin_.items.resize(ranks * static_cast<std::size_t>(shape.max_tokens));
}

QueuedRows::~QueuedRows() {
  for (Queues& each : queues_)
    each.end();
}

// By rank, and in the order of tokens: the same list on both sides of a queue.
void QueuedRows::sort_copies(const Round& round, ByPeer<Copy>& copies) const {
  std::int64_t next = 0;
  for (std::size_t rank = 0; rank < round.rows_sent.size(); ++rank) {
    copies.begin[rank] = next;
    next += round.rows_sent[rank];
  }
  copies.begin.back() = next;
  for (std::int64_t token = 0; token < round.num_tokens; ++token) {
    const auto at = static_cast<std::size_t>(token);
    for (std::int32_t i = round.first_destination[at]; i < round.first_destination[at + 1]; ++i) {
      const auto rank = static_cast<std::size_t>(round.destinations[static_cast<std::size_t>(i)].rank);
      copies.items[static_cast<std::size_t>(copies.begin[rank]++)] = {static_cast<std::int32_t>(token), i};
    }
  }
  for (std::size_t rank = 0; rank < round.rows_sent.size(); ++rank)
    copies.begin[rank] -= round.rows_sent[rank];
}

void QueuedRows::list_received(const Round& round) {
  std::int64_t next = 0;
  for (std::size_t source = 0; source < round.rows_received.size(); ++source) {
    to_origin_.begin[source] = next;
    ReceivedTokens(round, setup_.layout, static_cast<std::int64_t>(source)).visit_all([&](std::int64_t token) {
      to_origin_.items[static_cast<std::size_t>(next++)] = static_cast<std::int32_t>(token);
    });
  }
  to_origin_.begin.back() = next;
}

// `row_of` says where a lane's row is.
template <class RowOf>
void QueuedRows::land(int source, std::int64_t token, RowOf&& row_of) {
  std::byte* space = landing_.get() + source * space_stride_;
  for (const Lane& lane : *lanes_)
    copy_lane_row(space + lane.offset + token * lane.stride, row_of(lane), lane.row_bytes, false);
  const int per_chunk = setup_.layout.shape().tokens_per_chunk;
  const auto line = static_cast<std::size_t>(source * setup_.layout.max_chunks() + token / per_chunk);
  dispatching_->masks[line] |= std::uint64_t{1} << (token % per_chunk);
}

void QueuedRows::begin_dispatch(const DispatchRequest& request, std::vector<Lane>& lanes, Round& round) {
  dispatching_ = &round;
  lanes_ = &lanes;
  digest_ = request.digest;
  agreed_ = request.agreed;
  disagreeing_ = -1;
  round.rows = landing_.get();
  round.space_stride = space_stride_;
  round.num_rows = 0;
  std::ranges::fill(round.masks, 0);
  std::int64_t bytes = protocol::kQueueEntryHeader;
  for (Lane& lane : lanes) {
    lane.entry_offset = bytes;
    bytes += protocol::align_up(lane.row_bytes, protocol::kRowAlignment);
  }
  sort_copies(round, outgoing_);
  queues(kDispatchPhase).begin(protocol::queue_entry_bytes(bytes));
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    const bool own = peer == setup_.rank;
    queues(kDispatchPhase).send_to(peer, own ? 0 : round.rows_sent[static_cast<std::size_t>(peer)]);
  }
  queues(kDispatchPhase).expect_unknown();
  land_own_tokens();
}

void QueuedRows::begin_combine(const CombineRequest& request, Dtype wire, const Round& round) {
  combining_ = &round;
  combine_request_ = &request;
  wire_ = wire;
  aborted_owner_ = -1;
  const std::int64_t bytes = hidden_of(request.expert_output) * size_of(wire);
  sort_copies(round, incoming_);
  list_received(round);
  queues(kCombinePhase).begin(protocol::queue_entry_bytes(protocol::kQueueEntryHeader + bytes));
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    const auto at = static_cast<std::size_t>(peer);
    queues(kCombinePhase).send_to(peer, peer == setup_.rank ? 0 : round.rows_received[at]);
    const bool awaits = peer != setup_.rank && round.rows_sent[at] > 0;
    queues(kCombinePhase).expect_from(peer, awaits ? Queues::kUnknown : 0);
  }
  if (round.rows_sent[static_cast<std::size_t>(setup_.rank)] > 0) land_own_expert_rows();
}

void QueuedRows::end_dispatch(std::uint32_t epoch) {
  if (holds_turn(kDispatchPhase, epoch)) queues(kDispatchPhase).end();
  if (dispatching_ != nullptr && dispatching_->epoch == epoch) dispatching_ = nullptr;
}

void QueuedRows::end_combine(std::uint32_t epoch) {
  if (holds_turn(kCombinePhase, epoch)) queues(kCombinePhase).end();
  if (combining_ != nullptr && combining_->combine_epoch == epoch) combining_ = nullptr;
}

void QueuedRows::reset() {
  dispatching_ = nullptr;
  combining_ = nullptr;
  out_of_turn_ = -1;
  const QueueView& own = views_[static_cast<std::size_t>(setup_.rank)];
  std::memset(own.words(), 0, static_cast<std::size_t>(own.words_bytes()));
}

void QueuedRows::look_for_strangers(int phase) {
  const int stranger = queues(phase).stranger();
  if (stranger >= 0) out_of_turn_ = stranger;
}

// A turn that a reset took away moves nothing more: the ring may be another's by now.
bool QueuedRows::advance() {
  const bool dispatches = dispatching_ != nullptr && holds_turn(kDispatchPhase, dispatching_->epoch);
  const bool combines = combining_ != nullptr && holds_turn(kCombinePhase, combining_->combine_epoch);
  const bool dispatched = dispatches && disagreeing_ < 0 && advance_dispatch();
  const bool combined = combines && advance_combine();
  return dispatched || combined;
}

bool QueuedRows::advance_dispatch() {
  Queues& dispatch = queues(kDispatchPhase);
  bool moved = false;
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int peer = (setup_.rank + 1 + i) % setup_.num_ranks;
    moved |= dispatch.send_some(
        peer, [this](int to, std::int64_t number, std::byte* entry) { write_token(to, number, entry); });
    if (!dispatch.expects_known(peer)) moved |= take_dispatch_header(peer);
    moved |= dispatch.receive_some(
        peer, [this](int source, std::int64_t /*number*/, const std::byte* entry) { land_token(source, entry); });
  }
  return moved;
}

// An announced abort is left to those who wait: it ends the dispatch, not just this source's part.
bool QueuedRows::take_dispatch_header(int source) {
  Round& round = *dispatching_;
  protocol::HeaderLine& header =
      windows_[static_cast<std::size_t>(setup_.rank)].header(kDispatchPhase, round.epoch, source);
  const std::uint64_t stamp = load_acquire(header.stamp);
  if (!protocol::stamp_is(stamp, round.epoch) || header.status == protocol::HeaderStatus::kAborted) return false;
  if (header.mask != turn(kDispatchPhase)) {
    out_of_turn_ = source;
    return true;
  }
  if (header.digest != digest_ || header.agreed != agreed_) {
    disagreeing_ = source;
    return true;
  }
  const auto rows = static_cast<std::int32_t>(protocol::stamp_rows(stamp));
  round.tokens_of[static_cast<std::size_t>(source)] = header.num_tokens;
  round.rows_received[static_cast<std::size_t>(source)] = rows;
  round.num_rows += rows;
  queues(kDispatchPhase).expect_from(source, source == setup_.rank ? 0 : rows);
  return true;
}

void QueuedRows::write_token(int peer, std::int64_t number, std::byte* entry) const {
  const auto at = static_cast<std::size_t>(outgoing_.begin[static_cast<std::size_t>(peer)] + number);
  const std::int64_t token = outgoing_.items[at].token;
  std::memcpy(entry, &token, sizeof(token));
  for (const Lane& lane : *lanes_)
    copy_lane_row(entry + lane.entry_offset, lane.from + token * lane.from_stride, lane.row_bytes, false);
}

void QueuedRows::land_token(int source, const std::byte* entry) {
  std::int64_t token = 0;
  std::memcpy(&token, entry, sizeof(token));
  land(source, token, [entry](const Lane& lane) { return entry + lane.entry_offset; });
}

void QueuedRows::land_own_tokens() {
  const auto own = static_cast<std::size_t>(setup_.rank);
  for (std::int64_t i = outgoing_.begin[own]; i < outgoing_.begin[own + 1]; ++i) {
    const std::int64_t token = outgoing_.items[static_cast<std::size_t>(i)].token;
    land(setup_.rank, token, [token](const Lane& lane) { return lane.from + token * lane.from_stride; });
  }
}

bool QueuedRows::advance_combine() {
  Queues& combine = queues(kCombinePhase);
  bool moved = false;
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int peer = (setup_.rank + 1 + i) % setup_.num_ranks;
    moved |= combine.send_some(
        peer, [this](int to, std::int64_t number, std::byte* entry) { write_expert_row(to, number, entry); });
    if (!combine.expects_known(peer)) moved |= take_combine_header(peer);
    moved |= combine.receive_some(peer, [this](int owner, std::int64_t number, const std::byte* entry) {
      const auto at = static_cast<std::size_t>(incoming_.begin[static_cast<std::size_t>(owner)] + number);
      std::byte* to = combine_landing_.get() + incoming_.items[at].index * setup_.layout.combine_stride();
      copy_row(to, entry + protocol::kQueueEntryHeader, setup_.layout.shape().combine_row_bytes, false);
    });
  }
  return moved;
}

bool QueuedRows::take_combine_header(int owner) {
  const std::uint32_t epoch = combining_->combine_epoch;
  protocol::HeaderLine& header = windows_[static_cast<std::size_t>(setup_.rank)].header(kCombinePhase, epoch, owner);
  if (!protocol::stamp_is(load_acquire(header.stamp), epoch)) return false;
  const bool aborted = header.status == protocol::HeaderStatus::kAborted;
  if (!aborted && header.mask != turn(kCombinePhase)) {
    out_of_turn_ = owner;
    return true;
  }
  if (aborted) aborted_owner_ = owner;
  queues(kCombinePhase).expect_from(owner, aborted ? 0 : combining_->rows_sent[static_cast<std::size_t>(owner)]);
  return true;
}

void QueuedRows::write_expert_row(int origin, std::int64_t number, std::byte* entry) const {
  const auto at = static_cast<std::size_t>(to_origin_.begin[static_cast<std::size_t>(origin)] + number);
  const std::int64_t row = origin * combining_->tokens_per_rank + to_origin_.items[at];
  stage_row(combine_request_->expert_output, row, wire_, entry + protocol::kQueueEntryHeader, false);
}

void QueuedRows::land_own_expert_rows() {
  const auto own = static_cast<std::size_t>(setup_.rank);
  for (std::int64_t i = incoming_.begin[own]; i < incoming_.begin[own + 1]; ++i) {
    const Copy copy = incoming_.items[static_cast<std::size_t>(i)];
    const std::int64_t row = setup_.rank * combining_->tokens_per_rank + copy.token;
    std::byte* to = combine_landing_.get() + copy.index * setup_.layout.combine_stride();
    stage_row(combine_request_->expert_output, row, wire_, to, false);
  }
}

}  // namespace tokenyard::engine::host
