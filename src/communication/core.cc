// SPDX-License-Identifier: Apache-2.0
#include "communication/core.h"

#include <utility>

#include "communication/agreement.h"

namespace tokenyard::communication {

Error Core::with_rank(const Error& error) const {
  return named(error, limits_.rank);
}

void Core::require_usable() const {
  if (destroyed_) throw Error(ErrorCode::kDestroyed, "this communication was destroyed", limits_.rank);
  if (engine_ == nullptr) {
    throw Error(ErrorCode::kInvalidState, "this communication failed to grow and has no window; destroy it",
                limits_.rank);
  }
}

void Core::require_no_capture(const char* call) const {
  if (engine_ == nullptr || !engine_->recording()) return;
  throw Error(ErrorCode::kInvalidState,
              std::string(call) +
                  " waits for the device, and the stream that this communication last used is being "
                  "captured; end the capture first",
              limits_.rank);
}

engine::SharedQueues::Visit Core::visit_queues() const {
  try {
    return engine::SharedQueues::Visit(queues_.get());
  } catch (const Error& error) {
    throw with_rank(error);
  }
}

Route& Core::take_route() {
  if (pool_->free.empty()) {
    pool_->routes.push_back(std::make_unique<Route>());
    pool_->free.reserve(pool_->routes.size());
    if (sub_rounds_) return *pool_->routes.back();  // sized by each call
    engine_->reserve(pool_->routes.back()->round);
    return *pool_->routes.back();
  }
  Route& route = *pool_->free.back();
  pool_->free.pop_back();
  return route;
}

Route& Core::route_of(const Handle& handle) const {
  if (handle.route_ == nullptr) {
    throw Error(ErrorCode::kInvalidState, "this handle is empty: no dispatch filled it, or it was moved from",
                limits_.rank);
  }
  if (handle.pool_->core == nullptr) {
    throw Error(handle.pool_->gone,
                handle.pool_->gone == ErrorCode::kReplaced
                    ? "growth replaced the window that this handle belongs to"
                    : "the communication that this handle belongs to was destroyed",
                limits_.rank);
  }
  if (handle.pool_ != pool_) {
    throw Error(ErrorCode::kInvalidArgument, "this handle belongs to another communication", limits_.rank);
  }
  if (held_by(handle) == nullptr) {
    throw Error(ErrorCode::kInvalidState, "this handle was used: a handle combines once", limits_.rank);
  }
  return *handle.route_;
}

Route* Core::held_by(const Handle& handle) const {
  const bool own = handle.route_ != nullptr && handle.pool_ == pool_;
  return own && handle.route_->turn == handle.turn_ ? handle.route_ : nullptr;
}

void Core::free_route(Route& route) {
  ++route.turn;
  route.state = RouteState::kFree;
  pool_->free.push_back(&route);
}

void Core::release_views(Route& route) {
  if (!std::exchange(route.views_open, false)) return;
  engine_->release(route.round);
}

// A round whose result outlives the window's rows lasts until its combine is complete. On a GPU so does any whose route
// is used again by the next; compact rows' belongs to the handle.
bool Core::counts_rounds() const {
  const protocol::Placement placement = limits_.plan.spec.placement;
  const bool on_device = limits_.device.kind == DeviceKind::kCuda && placement != protocol::Placement::kCompact;
  return protocol::by_expert(placement) || on_device;
}

bool Core::in_flight(const Route& route) const {
  if (route.views_open) return true;
  return counts_rounds() && (route.state == RouteState::kSent || route.state == RouteState::kReceived ||
                             route.state == RouteState::kCombining);
}

void Core::end_round(Route& route, RouteState state) {
  release_views(route);
  if (route.state == RouteState::kCombining) engine_->release_combine(route.round);
  if (combine_section_of_ == &route) combine_section_of_ = nullptr;
  route.state = state;
}

// A handle's end, which nobody can be told of when it goes wrong: the device is lost, or a capture has failed.
void Core::give_back(Route& route) {
  try {
    end_round(route, RouteState::kFree);
    engine_->discard(route.round);
  } catch (const Error&) {
    if (combine_section_of_ == &route) combine_section_of_ = nullptr;
  }
  free_route(route);
}

void Core::enter(const Limits& limits) {
  if (!sub_rounds_) return;
  limits_ = limits;
  layout_ = protocol::WindowLayout::of(limits_.plan.shape);
  engine_->reshape(limits_.params, layout_);
}

Status Core::poll() const {
  require_usable();
  return engine_->poll();
}

PeerStatistics Core::statistics() const {
  require_usable();
  return engine_->statistics();
}

RouteQuery* Core::route_query() {
  // On a GPU, where ids are looked at by kernels, only for backends whose callers size their results by it.
  const bool told = limits_.device.kind == DeviceKind::kCpu || contract_.counts_on == CountsOn::kHost;
  return info().contract.topk_ids_required && told ? &route_query_ : nullptr;
}

SmBudget* Core::sm_budget() {
  return sm_budget_ ? &*sm_budget_ : nullptr;
}

Growth* Core::growth() {
  return info().contract.grows ? &growth_ : nullptr;
}

}  // namespace tokenyard::communication
