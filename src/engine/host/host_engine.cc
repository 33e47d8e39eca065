// SPDX-License-Identifier: Apache-2.0
#include "engine/host/host_engine.h"

#include <cstring>
#include <string>

#include "engine/host/word.h"
#include "engine/untouched_memory.h"
#include "protocol/block_cast.h"
#include "protocol/owner.h"

namespace tokenyard::engine::host {
namespace {

std::vector<WindowView> view_windows(const Setup& setup, const fabric::Window& window) {
  std::vector<WindowView> views;
  views.reserve(static_cast<std::size_t>(setup.num_ranks));
  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    std::byte* base = window.peer(rank);
    if (base == nullptr) {
      throw Error(
          ErrorCode::kUnsupported,
          "the host engine needs load/store reach to every rank's window, and has none to rank " + std::to_string(rank),
          setup.rank, rank);
    }
    views.emplace_back(base, setup.layout);
  }
  return views;
}

std::vector<std::byte*> life_lines(const Setup& setup, const std::vector<WindowView>& windows) {
  std::vector<std::byte*> lines;
  lines.reserve(windows.size());
  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    lines.push_back(setup.queues == nullptr ? windows[static_cast<std::size_t>(rank)].life_lines()
                                            : setup.queues->window().peer(rank) + setup.queues->layout().life(0));
  }
  return lines;
}

}  // namespace

std::unique_ptr<Engine> make_host_engine(const Setup& setup, fabric::Window& window) {
  return std::make_unique<HostEngine>(setup, window);
}

HostEngine::HostEngine(const Setup& setup, fabric::Window& window)
    : setup_(setup),
      first_expert_(protocol::first_local_expert(setup.params.num_experts, setup.num_ranks, setup.rank)),
      num_experts_(protocol::num_local_experts(setup.params.num_experts, setup.num_ranks, setup.rank)),
      windows_(view_windows(setup_, window)),
      watch_(setup_, life_lines(setup_, windows_)),
      team_(setup.num_threads),
      outputs_(setup_, own()),
      dispatch_epoch_(setup.initial_epoch),
      combine_epoch_(setup.initial_epoch) {
  const auto ranks = static_cast<std::size_t>(setup.num_ranks);
  const auto threads = static_cast<std::size_t>(setup.num_threads);
  lanes_.reserve(protocol::kMaxPlanes);
  const auto depth = static_cast<std::size_t>(setup.spec.depth);
  for (auto* epochs : {&unread_epochs_, &open_epochs_, &open_combines_})
    epochs->reserve(depth + 1);
  owed_epoch_.resize(depth * ranks);
  given_epoch_.resize(depth * ranks);
  if (setup.spec.transport == protocol::Transport::kQueue) queued_.emplace(setup_, windows_);
  const auto hidden = static_cast<std::size_t>(setup.params.hidden_size);
  if (setup.spec.combine_wire == protocol::CombineWire::kLogarithmic) decoded_rows_.resize(threads * ranks * hidden);
  if (protocol::by_expert(setup.spec.placement)) {
    const protocol::RowBytes cast = protocol::cast_row_bytes(DispatchCast::kFp8Block128, setup.params.hidden_size);
    cast_stride_ = protocol::align_up(cast.values, protocol::kRowAlignment) +
                   protocol::align_up(cast.scales, protocol::kLineBytes);
    cast_rows_.resize(threads * static_cast<std::size_t>(cast_stride_));
  }
  row_limits_.resize(ranks);
  chunk_masks_.resize(ranks * threads);
  missing_rows_.resize(threads);
  sum_rows_.resize(ranks * threads);
  if (queued_) seen_faults_ = setup.queues->num_faults();
  set_back(setup.initial_epoch);
}

void HostEngine::reserve(Round& round) {
  const bool routed = protocol::routed(setup_.spec.placement);
  round.reserve(setup_.layout.shape(), routed ? setup_.params.top_k : 0, num_experts_);
}

Memory HostEngine::allocate(std::int64_t bytes) {
  UntouchedMemory memory = make_untouched_memory(bytes);
  return {memory.release(), [](std::byte* address) { UntouchedMemory::deleter_type()(address); }};
}

void HostEngine::reshape(const MoeParams& params, const protocol::WindowLayout& layout) {
  setup_.params = params;
  setup_.layout = layout;
  first_expert_ = protocol::first_local_expert(params.num_experts, setup_.num_ranks, setup_.rank);
  num_experts_ = protocol::num_local_experts(params.num_experts, setup_.num_ranks, setup_.rank);
}

void HostEngine::reset(std::uint32_t epoch) {
  if (queued_) {
    queued_->reset();
    seen_faults_ = setup_.queues->num_faults();
  }
  set_back(epoch);
}

Status HostEngine::fault() const {
  const bool shared = queued_ && watch_.fault().ok() && setup_.queues->num_faults() != seen_faults_;
  return shared ? setup_.queues->last_fault() : watch_.fault();
}

void HostEngine::set_back(std::uint32_t epoch) {
  std::memset(own().control(), 0, static_cast<std::size_t>(own().control_bytes()));
  for (int phase = 0; phase < protocol::kNumPhases; ++phase) {
    for (int peer = 0; peer < setup_.num_ranks; ++peer)
      own().released(phase, peer) = protocol::encode_progress(epoch, epoch);
  }
  for (auto* epochs : {&unread_epochs_, &open_epochs_, &open_combines_})
    epochs->clear();
  owed_epoch_.assign(owed_epoch_.size(), epoch);
  given_epoch_.assign(given_epoch_.size(), epoch);
  dispatch_epoch_ = combine_epoch_ = epoch;
  watch_.clear();
}

std::uint32_t HostEngine::latest_epoch() const {
  return protocol::reached(dispatch_epoch_, combine_epoch_) ? dispatch_epoch_ : combine_epoch_;
}

PeerStatistics HostEngine::statistics() const {
  return {.waited = watch_.waited(), .num_dispatches = num_dispatches_, .num_combines = num_combines_};
}

void HostEngine::begin(Phase phase, std::uint32_t epoch) {
  const bool first = epoch == setup_.initial_epoch + 1;
  watch_.begin(phase, epoch, first ? setup_.first_round_deadline : setup_.deadline);
}

Status HostEngine::wait_rows_released(int phase, int peer, std::uint32_t epoch) {
  std::uint64_t& word = own().released(phase, peer);
  return watch_.wait(
      peer, [&] { return protocol::reached(protocol::rows_released(load_acquire(word)), epoch); },
      [&] { return phase == kDispatchPhase ? find_abort(dispatch_epoch_) : Status{}; });
}

// Not cut short by ranks that give up: whoever announces that it gives up must reach every peer.
Status HostEngine::wait_headers_read(int peer, std::uint32_t epoch) {
  std::uint64_t& word = own().released(kDispatchPhase, peer);
  return watch_.wait(
      peer, [&] { return protocol::reached(protocol::headers_read(load_acquire(word)), epoch); },
      [] { return Status{}; });
}

Status HostEngine::wait_header(int phase, int source, std::uint32_t epoch) {
  protocol::HeaderLine& header = own().header(phase, epoch, source);
  const Status status = watch_.wait(
      source, [&] { return protocol::stamp_is(load_acquire(header.stamp), epoch); },
      [&] { return phase == kDispatchPhase ? find_abort(epoch) : Status{}; });
  if (!status.ok()) return status;
  if (header.status == protocol::HeaderStatus::kAborted) return watch_.make_status(StatusCode::kAborted, source);
  return {};
}

// Every rank takes part in a dispatch, so one that gave up ends it for all, whoever is still awaited.
Status HostEngine::find_abort(std::uint32_t epoch) const {
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    protocol::HeaderLine& header = own().header(kDispatchPhase, epoch, peer);
    if (!protocol::stamp_is(load_acquire(header.stamp), epoch)) continue;
    if (header.status == protocol::HeaderStatus::kAborted) return watch_.make_status(StatusCode::kAborted, peer);
  }
  return {};
}

// An aborted dispatch uses up its slot's turn, so that the next one may meet a slot whose rows are still awaited.
void HostEngine::check_dispatch() const {
  if (queued_) setup_.queues->check_turn(kDispatchPhase, setup_.queue_user);
  for (const std::uint32_t open : open_epochs_) {
    if (slot(open) != slot(dispatch_epoch_ + 1)) continue;
    throw Error(ErrorCode::kInvalidState, "dispatch " + std::to_string(open) +
                                              " still needs its place in the window: receive it, or let its handle "
                                              "die, before the next dispatch");
  }
}

void HostEngine::check_combine() const {
  if (queued_) return setup_.queues->check_turn(kCombinePhase, setup_.queue_user);
  for (const std::uint32_t open : open_combines_) {
    if (slot(open) != slot(combine_epoch_ + 1)) continue;
    throw Error(ErrorCode::kInvalidState, "combine " + std::to_string(open) +
                                              " was sent and not received, and its rows lie where those of the next "
                                              "would: receive it, or let its handle die, before the next is sent");
  }
}

void HostEngine::publish_progress() {
  const std::uint32_t read = unread_epochs_.empty() ? dispatch_epoch_ : unread_epochs_.front() - 1;
  const std::uint32_t released = open_epochs_.empty() ? read : open_epochs_.front() - 1;
  const std::uint64_t progress = protocol::encode_progress(released, read);
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    store_release(window(peer).released(kDispatchPhase, setup_.rank), progress, ReleaseSite::kReleased);
  }
}

// A handle that died between the halves has not even read the headers.
void HostEngine::release(const Round& round) {
  if (queued_) queued_->end_dispatch(round.epoch);
  std::erase(unread_epochs_, round.epoch);
  std::erase(open_epochs_, round.epoch);
  publish_progress();
}

void HostEngine::release_combine(const Round& round) {
  finish_combine(round.combine_epoch);
}

Status HostEngine::give_up_dispatch(std::uint32_t epoch, const Status& status) {
  if (queued_) queued_->end_dispatch(epoch);
  std::erase(unread_epochs_, epoch);
  std::erase(open_epochs_, epoch);
  publish_progress();
  return status;
}

// Tells the ranks that may owe this rank rows what it needs no more. One word serves all, so that a combine that ends
// before an older one is told of together with it.
void HostEngine::finish_combine(std::uint32_t epoch) {
  if (queued_) queued_->end_combine(epoch);
  std::erase(open_combines_, epoch);
  const std::uint32_t done = open_combines_.empty() ? combine_epoch_ : open_combines_.front() - 1;
  for (const WindowView& owner : windows_) {
    store_release(owner.released(kCombinePhase, setup_.rank), protocol::encode_progress(done, done),
                  ReleaseSite::kCombineReleased);
  }
}

void HostEngine::abort_dispatch() {
  const std::uint32_t epoch = ++dispatch_epoch_;
  if (queued_) queued_->skip_turn(kDispatchPhase);
  begin(Phase::kDispatch, epoch);
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    // Its own header in that place may be of a round whose receive half is yet to come.
    if (peer == setup_.rank) continue;
    // A rank that cannot be told within the deadline is at fault itself; the fault is sticky and speaks for this call.
    if (!wait_headers_read(peer, epoch - protocol::kHeaderSlots).ok()) return;
    protocol::HeaderLine& header = window(peer).header(kDispatchPhase, epoch, setup_.rank);
    header.status = protocol::HeaderStatus::kAborted;
    store_release(header.stamp, protocol::encode_stamp(epoch, 0), ReleaseSite::kHeader);
  }
  publish_progress();
}

void HostEngine::abort_combine(const Round& round) {
  const std::uint32_t epoch = ++combine_epoch_;
  if (queued_) queued_->skip_turn(kCombinePhase);
  begin(Phase::kCombine, epoch);
  if (!wait_combine_section(epoch).ok()) return;
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    if (round.rows_received[static_cast<std::size_t>(peer)] > 0) {
      protocol::HeaderLine& header = window(peer).header(kCombinePhase, epoch, setup_.rank);
      header.status = protocol::HeaderStatus::kAborted;
      store_release(header.stamp, protocol::encode_stamp(epoch, 0), ReleaseSite::kCombineHeader);
      per_slot(owed_epoch_, epoch, peer) = epoch;
    }
  }
  if (protocol::by_expert(setup_.spec.placement)) abort_weights(round, epoch);
  finish_combine(epoch);
}

// Owners of this rank's tokens may wait for their weights, and origins for a word that theirs were read.
void HostEngine::abort_weights(const Round& round, std::uint32_t epoch) {
  if (round.experts.has_weights) return;
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    const auto at = static_cast<std::size_t>(peer);
    if (round.rows_received[at] > 0) release_weights(peer, epoch);
    if (round.rows_sent[at] == 0) continue;
    if (!wait_rows_released(kWeightsPhase, peer, per_slot(given_epoch_, epoch, peer)).ok()) return;
    stamp_weights(peer, epoch, protocol::HeaderStatus::kAborted);
  }
}

}  // namespace tokenyard::engine::host
