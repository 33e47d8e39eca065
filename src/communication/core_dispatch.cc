// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <exception>

#include "communication/core.h"
#include "communication/misuse.h"

namespace tokenyard::communication {

void Core::check_room() const {
  const auto open = std::ranges::count_if(pool_->routes, [this](const auto& other) { return in_flight(*other); });
  if (open >= info().contract.max_in_flight) {
    throw Error(ErrorCode::kInvalidState, std::to_string(open) + " rounds are in flight and `" +
                                              std::string(info().name) + "` allows " +
                                              std::to_string(info().contract.max_in_flight) +
                                              ": combine one, or let its handle die, before the next dispatch");
  }
  engine_->check_dispatch();
}

// Where rounds count, a rank that comes too early has one to end, for which the peers wait: they come to the next
// dispatch only then. So nothing is announced, and the call may be repeated. Where views count, peers may have none,
// and wait in that dispatch: they are told.
void Core::require_dispatch_room() const {
  if (!counts_rounds()) return;
  try {
    check_room();
  } catch (const Error& error) {
    throw with_rank(error);
  }
}

void Core::prepare(const DispatchInput& input, const DispatchOptions& options, Route& route) {
  if (!counts_rounds()) check_room();
  check_tensors(input);
  const Route* replay = nullptr;
  if (options.replay != nullptr) {
    const Route& from = route_of(*options.replay);
    if (from.state == RouteState::kAborted) {
      throw Error(ErrorCode::kInvalidState, "the round of the handle to replay was aborted");
    }
    if (input.hidden_states.num_rows() != from.round.num_tokens) {
      throw Error(ErrorCode::kInvalidArgument, "hidden_states has " + std::to_string(input.hidden_states.num_rows()) +
                                                   " tokens and the replayed handle's route " +
                                                   std::to_string(from.round.num_tokens));
    }
    replay = &from;
  }
  if (sub_rounds_) {
    route.limits = limits_of_call(limits_, sub_rounds_->budget(), input, options, replay);
    enter(route.limits);
  }
  prepare_dispatch(limits_, input, options, replay == nullptr ? nullptr : &replay->round, route);
  received_->check_into(route, options);
  route.buffer = free_buffer();
  if (sub_rounds_) {
    SubRounds::plan(*engine_, replay, route);
  } else {
    engine_->plan(route.request, route.round);
  }
}

// Results that outlive the window's rows have memory of their own; there is some for every round in flight.
int Core::free_buffer() const {
  for (int buffer = 0; buffer < info().contract.max_in_flight; ++buffer) {
    const auto uses = [&](const auto& route) { return in_flight(*route) && route->buffer == buffer; };
    if (std::ranges::none_of(pool_->routes, uses)) return buffer;
  }
  return 0;
}

Status Core::dispatch_send(const DispatchInput& input,
                           const DispatchOptions& options,
                           DispatchResult& result,
                           bool in_one_call) {
  require_usable();
  const auto visit = visit_queues();
  if (const Status fault = engine_->fault(); !fault.ok()) return fault;
  // The handle that an earlier round left here dies now, unless it is the one to replay.
  if (&result.handle != options.replay) result.handle = Handle();
  require_dispatch_room();
  Route& route = take_route();
  Handle handle(pool_, &route);
  announcing_misuse(
      options.stream, [&] { prepare(input, options, route); }, [&] { engine_->abort_dispatch(); });
  route.request.in_one_call = in_one_call;
  route.request.num_sms = num_sms_of(options.num_sms);
  route.request.stream = options.stream;
  Status status;
  try {
    status = sub_rounds_ ? sub_rounds_->dispatch(*engine_, options.num_worst_tokens, route)
                         : engine_->dispatch_send(route.request, route.round);
  } catch (const Error& error) {
    throw with_rank(error);
  }
  if (!in_one_call) {
    route.request.stats = {};
    route.request.topk_ids = {};
    route.request.num_tokens_per_rank = {};
  }
  if (!status.ok()) return status;
  route.state = RouteState::kSent;
  route.combined = false;
  route.views_open = true;
  result.handle = std::move(handle);
  return status;
}

Status Core::dispatch_receive(const DispatchOptions& options, DispatchResult& result) {
  require_usable();
  const auto visit = visit_queues();
  if (const Status fault = engine_->fault(); !fault.ok()) return fault;
  Route& route = route_of(result.handle);
  enter(route.limits);
  // After a receive that overflowed, the rows still lie in the window.
  const bool repeated = route.state == RouteState::kReceived && route.views_open;
  if (route.state != RouteState::kSent && !repeated) {
    throw Error(ErrorCode::kInvalidState, "there is nothing to receive for this handle", limits_.rank);
  }
  try {
    check_statistics(limits_, options);
  } catch (const Error& error) {
    throw with_rank(error);  // nothing was received; the call may be repeated
  }
  route.round.row_limit = route.request.row_limit;
  route.round.tokens_per_rank = route.request.tokens_per_rank;
  Received::Outcome outcome;
  std::exception_ptr refused;  // thrown when the rows are here, so that the handle can be received again or combined
  try {
    received_->check_into(route, options);
    outcome = received_->place(route, options, options_.allocate_output, result);
  } catch (...) {
    refused = std::current_exception();
    route.request.outputs = {};
  }
  route.request.stream = options.stream;
  const Status status = receive(route);
  if (!status.ok()) return status;
  if (refused != nullptr) std::rethrow_exception(refused);
  if (outcome.needed_rows > 0) {
    return {.code = StatusCode::kOverflow,
            .fault = {.rank = limits_.rank, .phase = Phase::kDispatch, .epoch = route.round.epoch},
            .needed_rows = outcome.needed_rows};
  }
  received_->finish(route, options, result);
  if (!outcome.has_views) {
    release_views(route);
  } else if (limits_.plan.spec.transport == protocol::Transport::kQueue) {
    engine_->release(route.round);  // the views are of this rank's own memory
  }
  return status;
}

// Waits for the rows unless they are here, and has the outputs written that were placed. After an overflow, or where
// the caller's tensors or memory were refused, there are none: the rows then wait in the window.
Status Core::receive(Route& route) {
  Status status;
  try {
    if (route.state == RouteState::kReceived || route.landed) {
      engine_->fill(route.request, route.round);
      if (limits_.device.kind == DeviceKind::kCuda) status.code = StatusCode::kEnqueued;
    } else {
      status = engine_->dispatch_receive(route.request, route.round);
    }
  } catch (const Error& error) {
    end_round(route, RouteState::kAborted);
    throw with_rank(error);
  }
  if (status.ok()) {
    route.state = RouteState::kReceived;
  } else {
    end_round(route, RouteState::kAborted);
  }
  return status;
}

Layout Core::layout(const TensorView& topk_ids, int num_experts) {
  require_usable();
  check_tensor(topk_ids, "topk_ids");
  if (sub_rounds_) enter(limits_of_query(limits_, sub_rounds_->budget(), topk_ids, num_experts));
  const MoeParams& params = limits_.params;
  check_num_experts(limits_, num_experts);
  if (!topk_ids.defined() || topk_ids.num_dims != 2 || topk_ids.shape[1] != params.top_k ||
      (topk_ids.dtype != Dtype::kI32 && topk_ids.dtype != Dtype::kI64)) {
    throw Error(ErrorCode::kInvalidArgument, "topk_ids is " + topk_ids.describe() +
                                                 "; it must be [num_tokens, top_k = " + std::to_string(params.top_k) +
                                                 "] of i32 or i64");
  }
  if (topk_ids.shape[0] > params.max_tokens_per_rank) {
    throw Error(ErrorCode::kCapacity, "topk_ids has " + std::to_string(topk_ids.shape[0]) +
                                          " tokens and max_tokens_per_rank is " +
                                          std::to_string(params.max_tokens_per_rank));
  }
  check_rows(limits_, topk_ids, "topk_ids", topk_ids.shape[0]);
  Route& route = take_route();
  const Handle keeper(pool_, &route);  // gives the route back at the end
  if (sub_rounds_ || limits_.device.kind == DeviceKind::kCuda) {
    protocol::WindowShape shape = limits_.plan.shape;
    shape.max_tokens = topk_ids.shape[0];
    route.round.reserve(shape, params.top_k, num_local_experts(params, limits_.rank, limits_.num_ranks));
  }
  route.request = {};
  route.request.num_tokens = topk_ids.shape[0];
  route.request.topk_ids = topk_ids;
  engine_->query(route.request, route.round);

  const auto ranks = static_cast<std::size_t>(limits_.num_ranks);
  const auto tokens = static_cast<std::size_t>(topk_ids.shape[0]);
  const auto top_k = static_cast<std::size_t>(params.top_k);
  tokens_per_rank_query_.assign(route.round.rows_sent.begin(), route.round.rows_sent.end());
  tokens_per_expert_query_.assign(static_cast<std::size_t>(params.num_experts), 0);
  is_token_in_rank_query_.assign(tokens * ranks, 0);
  for (std::size_t token = 0; token < tokens; ++token) {
    const auto ids = std::span(route.round.wire_ids).subspan(token * top_k, top_k);
    for (std::size_t slot = 0; slot < top_k; ++slot) {
      const bool repeated = std::ranges::find(ids.first(slot), ids[slot]) != ids.first(slot).end();
      if (ids[slot] >= 0 && !repeated) ++tokens_per_expert_query_[static_cast<std::size_t>(ids[slot])];
    }
    for (std::int32_t i = route.round.first_destination[token]; i < route.round.first_destination[token + 1]; ++i) {
      const auto rank = static_cast<std::size_t>(route.round.destinations[static_cast<std::size_t>(i)].rank);
      is_token_in_rank_query_[token * ranks + rank] = 1;
    }
  }
  return {.num_tokens_per_rank = tokens_per_rank_query_,
          .num_tokens_per_expert = tokens_per_expert_query_,
          .is_token_in_rank =
              TensorView(is_token_in_rank_query_.data(), Dtype::kU8, {topk_ids.shape[0], limits_.num_ranks})};
}

}  // namespace tokenyard::communication
