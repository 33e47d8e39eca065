// SPDX-License-Identifier: Apache-2.0
// Rounds through queues: headers as in every round, then rows as room allows, draining while waiting.
#include <string>

#include "engine/host/host_engine.h"

namespace tokenyard::engine::host {

Status HostEngine::send_through_queues(const DispatchRequest& request, Round& round) {
  for (int i = 0; i < setup_.num_ranks; ++i)
    fill_header(request, round, visited(i), queued_->turn(kDispatchPhase));
  plan_lanes(request, round);
  queued_->begin_dispatch(request, lanes_, round);
  return drive_dispatch(request, round, [this] { return queued_->unsent(kDispatchPhase); });
}

Status HostEngine::receive_through_queues(const DispatchRequest& request, Round& round) {
  begin(Phase::kDispatch, round.epoch);
  if (!queued_->holds_turn(kDispatchPhase, round.epoch)) {  // another communication was reset meanwhile
    return give_up_dispatch(round.epoch, watch_.make_status(StatusCode::kAborted, setup_.rank));
  }
  const Status status = drive_dispatch(request, round, [this] { return queued_->unreceived(kDispatchPhase); });
  if (!status.ok()) return status;
  std::erase(unread_epochs_, round.epoch);
  queued_->end_dispatch(round.epoch);
  return {};
}

// Until `open` names no rank any more that keeps the half from ending.
template <class Open>
Status HostEngine::drive_dispatch(const DispatchRequest& request, Round& round, Open&& open) {
  for (int peer = open(); peer >= 0; peer = open()) {
    const Status status = watch_.wait(
        peer, [&] { return queued_->out_of_turn() >= 0 || queued_->disagreeing() >= 0 || queued_->advance(); },
        [&] {
          queued_->look_for_strangers(kDispatchPhase);
          return find_abort(round.epoch);
        });
    if (!status.ok()) return give_up_dispatch(round.epoch, status);
    if (queued_->out_of_turn() >= 0) {
      (void)give_up_dispatch(round.epoch, {});
      end_out_of_turn(kDispatchPhase);
    }
    if (queued_->disagreeing() < 0) continue;
    const int source = queued_->disagreeing();
    (void)give_up_dispatch(round.epoch, {});
    check_agreement(request, own().header(kDispatchPhase, round.epoch, source), source);
  }
  return {};
}

// The same for a combine, which an owner that gives up ends only for itself.
template <class Open>
Status HostEngine::drive_combine(std::uint32_t epoch, Open&& open) {
  for (int peer = open(); peer >= 0; peer = open()) {
    const Status status = watch_.wait(
        peer, [this] { return queued_->out_of_turn() >= 0 || queued_->advance(); },
        [this] {
          queued_->look_for_strangers(kCombinePhase);
          return Status{};
        });
    if (!status.ok()) return status;
    if (queued_->out_of_turn() >= 0) {
      finish_combine(epoch);
      end_out_of_turn(kCombinePhase);
    }
  }
  return {};
}

// Ranks use their communications in different orders, which only a reset brings together again: a fault, and an error
// here. The peers see it for themselves, so each can tell its caller what it found.
void HostEngine::end_out_of_turn(int phase) {
  const int peer = queued_->out_of_turn();
  watch_.fail(watch_.make_status(StatusCode::kAborted, peer));
  throw Error(ErrorCode::kMismatch, queued_->describe_order(phase), setup_.rank, peer);
}

Status HostEngine::combine_through_queues(const CombineRequest& request, const Round& round) {
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int source = visited(i);
    if (round.rows_received[static_cast<std::size_t>(source)] > 0) write_combine_header(request, round, source);
  }
  queued_->begin_combine(request, wire_dtype(), round);
  return drive_combine(round.combine_epoch, [this] { return queued_->unsent(kCombinePhase); });
}

Status HostEngine::await_owners_through_queues(const Round& round) {
  if (!queued_->holds_turn(kCombinePhase, round.combine_epoch)) {  // another communication was reset meanwhile
    return watch_.make_status(StatusCode::kAborted, setup_.rank);
  }
  const Status status = drive_combine(round.combine_epoch, [this] { return queued_->unreceived(kCombinePhase); });
  const int aborted = queued_->aborted_owner();
  return !status.ok() || aborted < 0 ? status : watch_.make_status(StatusCode::kAborted, aborted);
}

}  // namespace tokenyard::engine::host
