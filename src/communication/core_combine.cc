// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "communication/core.h"
#include "communication/misuse.h"

namespace tokenyard::communication {

bool Core::in_received_rows(const TensorView& tensor) const {
  const auto* data = static_cast<const std::byte*>(tensor.data);
  const std::byte* begin = window_->own() + layout_.rows();
  return data != nullptr && data >= begin && data < window_->own() + layout_.combine_row(0);
}

bool Core::holds_combine_section(const Route& route) const {
  return combine_section_of_ == nullptr || combine_section_of_ == &route;
}

Route* Core::oldest_uncombined() const {
  Route* oldest = nullptr;
  for (const auto& route : pool_->routes) {
    if (route->state != RouteState::kReceived || route->combined) continue;
    if (oldest == nullptr || protocol::reached(oldest->round.epoch, route->round.epoch)) oldest = route.get();
  }
  return oldest;
}

// Peers that wait in this combine wait for the round whose handle was given, or else, when a wrong handle was, for the
// oldest round that has yet to combine. A handle whose round was already given up has told them before.
void Core::abort_combine(const Handle& handle) {
  Route* given = held_by(handle);
  if (given != nullptr && given->state == RouteState::kAborted) return;
  const bool right = given != nullptr && given->state == RouteState::kReceived;
  Route* aborted = right ? given : oldest_uncombined();
  if (aborted == nullptr) return;  // nobody can be waiting for a combine of this rank
  SubRounds::abort_combine(*engine_, *aborted);
  end_round(*aborted, RouteState::kAborted);
}

// Ranks go from one sub-round to the next together, so the send half alone has no end. All ranks have as many of them,
// so all are refused.
void Core::refuse_halves(const Handle& handle) const {
  const Route* route = held_by(handle);
  if (route == nullptr || route->num_parts == 0) return;
  throw Error(ErrorCode::kUnsupported,
              "this round went through the window in " + std::to_string(route->num_parts) +
                  " sub-rounds; such a round is combined in one call, by Communication::combine",
              limits_.rank);
}

// The peers release the rows of the combine before only in its receive half, for which they may wait for this rank. So
// nothing is announced: the handle stays as it is, and the call may be repeated.
void Core::require_combine_room() const {
  if (uses_queues()) return;  // a turn is announced
  try {
    engine_->check_combine();
  } catch (const Error& error) {
    throw with_rank(error);
  }
}

engine::CombineRequest Core::prepare_combine_half(const Handle& handle,
                                                  const CombineInput& input,
                                                  const CombineOptions& options,
                                                  const TensorView* output) {
  Route& route = route_of(handle);
  if (route.state == RouteState::kAborted) {
    throw Error(ErrorCode::kInvalidState, "the round of this handle was aborted; go on with the next dispatch");
  }
  if (route.state != RouteState::kReceived) {
    throw Error(ErrorCode::kInvalidState, "this handle's dispatch is not complete, or its combine is under way");
  }
  if (!holds_combine_section(route)) {
    throw Error(ErrorCode::kInvalidState,
                "another handle's combine_input() is being written; combine that handle first");
  }
  if (options.num_sms < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "num_sms is " + std::to_string(options.num_sms) + "; it must not be negative");
  }
  enter(route.limits);
  if (uses_queues()) engine_->check_combine();
  engine::CombineRequest request = prepare_combine(limits_, input, route);
  route.combine_width = request.expert_output.shape[static_cast<std::size_t>(request.expert_output.num_dims - 1)];
  route.target = prepare_target(limits_, input, options, route);
  route.target.in_one_call = output != nullptr;
  route.target.num_sms = num_sms_of(options.num_sms);
  route.target.stream = options.stream;
  if (output != nullptr) {
    check_output(limits_, *output, route);
    route.target.output = *output;
    check_bias_dtypes(route.target);
  }
  return request;
}

Status Core::combine_send(Handle& handle,
                          const CombineInput& input,
                          const CombineOptions& options,
                          const TensorView* output) {
  require_usable();
  const auto visit = visit_queues();
  if (const Status fault = engine_->fault(); !fault.ok()) return fault;
  if (output == nullptr) refuse_halves(handle);
  require_combine_room();
  engine::CombineRequest request;
  announcing_misuse(
      options.stream, [&] { request = prepare_combine_half(handle, input, options, output); },
      [&] { abort_combine(handle); });
  Route& route = *handle.route_;
  // Views end here; but when the expert output is such a view, it is read first.
  const bool reads_views = in_received_rows(request.expert_output) || in_received_rows(request.topk_weights);
  request.reads_views = reads_views && route.views_open;
  request.ends_views = !reads_views && std::exchange(route.views_open, false);
  request.in_one_call = output != nullptr && route.num_parts == 0;
  request.num_sms = num_sms_of(options.num_sms);
  request.stream = options.stream;
  Status status;
  if (route.num_parts == 0) {
    try {
      status = engine_->combine_send(request, route.round);
    } catch (const Error& error) {
      end_round(route, RouteState::kAborted);
      throw with_rank(error);
    }
  } else {
    route.expert_output = request;
  }
  release_views(route);
  combine_section_of_ = nullptr;
  route.state = status.ok() ? RouteState::kCombining : RouteState::kAborted;
  return status;
}

Status Core::combine_receive(Handle& handle, const TensorView& output) {
  require_usable();
  const auto visit = visit_queues();
  if (const Status fault = engine_->fault(); !fault.ok()) return fault;
  Route& route = route_of(handle);
  if (route.state != RouteState::kCombining) {
    throw Error(ErrorCode::kInvalidState, "no combine was sent for this handle", limits_.rank);
  }
  Status status;
  enter(route.limits);
  try {
    check_output(limits_, output, route);
    route.target.output = output;
    check_bias_dtypes(route.target);
  } catch (const Error& error) {
    throw with_rank(error);  // the peers have what they need; the call may be repeated
  }
  try {
    status = route.num_parts == 0 ? engine_->combine_receive(route.target, route.round)
                                  : SubRounds::combine(*engine_, route);
  } catch (const Error& error) {
    end_round(route, RouteState::kAborted);
    throw with_rank(error);
  }
  if (!status.ok()) {
    end_round(route, RouteState::kAborted);
  } else if (info().contract.handle_use == HandleUse::kReplay) {
    route.state = RouteState::kReceived;
    route.combined = true;
  } else {
    free_route(route);
  }
  return status;
}

bool Core::fits_combine_rows(Dtype dtype) const {
  return size_of(dtype) == size_of(limits_.params.dtype) && protocol::is_wide_float(dtype);
}

// Between the halves of a combine this rank's own rows are among those that it has yet to read.
bool Core::between_combine_halves() const {
  return std::ranges::any_of(pool_->routes, [](const auto& route) { return route->state == RouteState::kCombining; });
}

TensorView Core::combine_input(const Handle& handle, Dtype dtype) {
  require_usable();
  Route& route = route_of(handle);
  enter(route.limits);
  // Rows of several sub-rounds are more than the window holds; rows of u8 do not say how wide combine's are.
  if (route.num_parts > 0 || (sub_rounds_ && limits_.narrower_rows)) return {};
  if (route.state != RouteState::kReceived || !fits_combine_rows(dtype)) return {};
  if (protocol::by_expert(limits_.plan.spec.placement)) return received_->combine_buffer(route, dtype);
  if (limits_.plan.spec.transport == protocol::Transport::kQueue || !holds_combine_section(route)) return {};
  const auto& tokens = route.round.tokens_of;
  const bool equal = std::ranges::adjacent_find(tokens, std::ranges::not_equal_to{}) == tokens.end();
  if (info().contract.output_layout == OutputLayout::kEveryRank && !equal) return {};
  if (between_combine_halves()) return {};
  if (!engine_->fault().ok() || !engine_->acquire_combine_section().ok()) return {};
  combine_section_of_ = &route;
  TensorView view;
  view.data = window_->own() + layout_.combine_row(0);
  view.dtype = dtype;
  view.device = limits_.device;
  const auto add = [&view](std::int64_t extent, std::int64_t stride) {
    const auto at = static_cast<std::size_t>(view.num_dims++);
    view.shape[at] = extent;
    view.strides[at] = stride;
  };
  const std::int64_t row_stride = layout_.combine_stride() / size_of(dtype);
  if (limits_.plan.spec.placement == protocol::Placement::kRankMajor) {
    add(route.num_blocks, row_stride * limits_.params.max_tokens_per_rank);
    add(route.rows_per_block, row_stride);
  } else {
    add(std::min(route.round.num_rows, route.round.row_limit), row_stride);
  }
  // A layer narrower than the communication was made for combines rows of its own width.
  const PayloadKind& dispatched = route.kinds[protocol::kHiddenPlane];
  add(dispatched.dtype == limits_.params.dtype ? dispatched.inner[0] : limits_.params.hidden_size, 1);
  return view;
}

// Where rows lie depends on nothing but their number, so no dispatch is needed to give their memory.
TensorView Core::combine_input(std::int64_t num_rows, Dtype dtype) {
  require_usable();
  const bool there = info().contract.output_layout == OutputLayout::kEveryRank && fits_combine_rows(dtype) &&
                     num_rows >= 0 && num_rows <= layout_.combine_rows() && combine_section_of_ == nullptr &&
                     !between_combine_halves();
  if (!there || !engine_->fault().ok() || !engine_->acquire_combine_section().ok()) return {};
  TensorView view(window_->own() + layout_.combine_row(0), dtype, {num_rows, params().hidden_size});
  view.device = limits_.device;
  view.strides[0] = layout_.combine_stride() / size_of(dtype);
  return view;
}

}  // namespace tokenyard::communication
