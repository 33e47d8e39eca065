// SPDX-License-Identifier: Apache-2.0
#include "engine/host/host_engine.h"

#include <cstring>
#include <string>

#include "engine/host/word.h"

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

}  // namespace

std::unique_ptr<Engine> make_host_engine(const Setup& setup, fabric::Window& window) {
  return std::make_unique<HostEngine>(setup, window);
}

HostEngine::HostEngine(const Setup& setup, fabric::Window& window)
    : setup_(setup),
      windows_(view_windows(setup_, window)),
      watch_(setup_, windows_),
      team_(setup.num_threads),
      dispatch_epoch_(setup.initial_epoch),
      combine_epoch_(setup.initial_epoch),
      headers_read_(setup.initial_epoch) {
  const auto ranks = static_cast<std::size_t>(setup.num_ranks);
  const auto threads = static_cast<std::size_t>(setup.num_threads);
  lanes_.reserve(protocol::kMaxPlanes);
  open_epochs_.reserve(static_cast<std::size_t>(setup.spec.depth) + 1);
  owed_epoch_.assign(ranks, setup.initial_epoch);
  row_limits_.resize(ranks);
  chunk_masks_.resize(ranks * threads);
  missing_rows_.resize(threads);
  sum_rows_.resize(ranks * threads);
  reset(setup.initial_epoch);
}

void HostEngine::reset(std::uint32_t epoch) {
  std::memset(own().control(), 0, static_cast<std::size_t>(own().control_bytes()));
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    own().released(kDispatchPhase, peer) = protocol::encode_progress(epoch, epoch);
    own().released(kCombinePhase, peer) = protocol::encode_progress(epoch, epoch);
  }
  open_epochs_.clear();
  headers_read_ = epoch;
  owed_epoch_.assign(owed_epoch_.size(), epoch);
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

void HostEngine::publish_progress(std::uint32_t done) {
  std::erase(open_epochs_, done);
  const std::uint32_t released = open_epochs_.empty() ? headers_read_ : open_epochs_.front() - 1;
  const std::uint64_t progress = protocol::encode_progress(released, headers_read_);
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    store_release(window(peer).released(kDispatchPhase, setup_.rank), progress, ReleaseSite::kReleased);
  }
}

void HostEngine::release(const Round& round) {
  publish_progress(round.epoch);
}

Status HostEngine::give_up_dispatch(const Status& status) {
  headers_read_ = dispatch_epoch_;
  publish_progress(dispatch_epoch_);
  return status;
}

void HostEngine::abort_dispatch() {
  const std::uint32_t epoch = ++dispatch_epoch_;
  begin(Phase::kDispatch, epoch);
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    // A rank that cannot be told within the deadline is at fault itself; the fault is sticky and speaks for this call.
    if (!wait_headers_read(peer, epoch - protocol::kHeaderSlots).ok()) return;
    protocol::HeaderLine& header = window(peer).header(kDispatchPhase, epoch, setup_.rank);
    header.status = protocol::HeaderStatus::kAborted;
    store_release(header.stamp, protocol::encode_stamp(epoch, 0), ReleaseSite::kHeader);
  }
  (void)give_up_dispatch({});
}

void HostEngine::abort_combine(const Round& round) {
  const std::uint32_t epoch = ++combine_epoch_;
  begin(Phase::kCombine, epoch);
  if (!wait_combine_section().ok()) return;
  for (int peer = 0; peer < setup_.num_ranks; ++peer) {
    if (round.rows_received[static_cast<std::size_t>(peer)] > 0) {
      protocol::HeaderLine& header = window(peer).header(kCombinePhase, epoch, setup_.rank);
      header.status = protocol::HeaderStatus::kAborted;
      store_release(header.stamp, protocol::encode_stamp(epoch, 0), ReleaseSite::kCombineHeader);
      owed_epoch_[static_cast<std::size_t>(peer)] = epoch;
    }
  }
  release_owners(round, epoch);
}

}  // namespace tokenyard::engine::host
