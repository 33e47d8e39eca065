// SPDX-License-Identifier: Apache-2.0
// The public faces of a communication: they hold, and pass on.
#include "tokenyard/communication.h"

#include <utility>

#include "communication/core.h"

namespace tokenyard {

Handle::Handle(std::shared_ptr<communication::HandlePool> pool, communication::Route* route)
    : pool_(std::move(pool)), route_(route), turn_(route->turn) {}

Handle::Handle(Handle&& other) noexcept
    : pool_(std::move(other.pool_)), route_(std::exchange(other.route_, nullptr)), turn_(other.turn_) {}

Handle& Handle::operator=(Handle&& other) noexcept {
  if (this == &other) return *this;
  Handle old(std::move(*this));
  pool_ = std::move(other.pool_);
  route_ = std::exchange(other.route_, nullptr);
  turn_ = other.turn_;
  return *this;
}

Handle::~Handle() {
  if (route_ != nullptr && pool_->core != nullptr && route_->turn == turn_) pool_->core->give_back(*route_);
}

Communication::Communication(std::unique_ptr<communication::Core> core) : core_(std::move(core)) {}

Communication::Communication(Communication&&) noexcept = default;
Communication& Communication::operator=(Communication&&) noexcept = default;
Communication::~Communication() = default;

const BackendInfo& Communication::backend() const {
  return core_->info();
}

const Contract& Communication::contract() const {
  return core_->contract();
}

const MoeParams& Communication::params() const {
  return core_->params();
}

const BackendConfig& Communication::config() const {
  return core_->config();
}

int Communication::rank() const {
  return core_->group().rank();
}

int Communication::num_ranks() const {
  return core_->group().num_ranks();
}

std::int64_t Communication::window_bytes() const {
  return core_->window_bytes();
}

int Communication::max_sms() const {
  return core_->max_sms();
}

bool Communication::captured() const {
  return core_->captured();
}

Status Communication::dispatch(const DispatchInput& input, const DispatchOptions& options, DispatchResult& result) {
  const Status status = core_->dispatch_send(input, options, result, true);
  return status.ok() ? core_->dispatch_receive(options, result) : status;
}

Status Communication::combine(Handle& handle,
                              const CombineInput& input,
                              const CombineOptions& options,
                              TensorView& output) {
  const Status status = core_->combine_send(handle, input, options, &output);
  return status.ok() ? core_->combine_receive(handle, output) : status;
}

TensorView Communication::combine_input(const Handle& handle, Dtype dtype) {
  return core_->combine_input(handle, dtype);
}

TensorView Communication::combine_input(std::int64_t num_rows, Dtype dtype) {
  return core_->combine_input(num_rows, dtype);
}

Status Communication::poll() const {
  return core_->poll();
}

Status Communication::reset() {
  return core_->reset();
}

Status Communication::destroy() {
  return core_->destroy();
}

PeerStatistics Communication::statistics() const {
  return core_->statistics();
}

template <>
SplitPhases* Communication::get<SplitPhases>() {
  return core_->split_phases();
}

template <>
RouteQuery* Communication::get<RouteQuery>() {
  return core_->route_query();
}

template <>
SmBudget* Communication::get<SmBudget>() {
  return core_->sm_budget();
}

template <>
Growth* Communication::get<Growth>() {
  return core_->growth();
}

Status SplitPhases::dispatch_send(const DispatchInput& input, const DispatchOptions& options, DispatchResult& result) {
  return core_->dispatch_send(input, options, result, false);
}

Status SplitPhases::dispatch_receive(const DispatchOptions& options, DispatchResult& result) {
  return core_->dispatch_receive(options, result);
}

Status SplitPhases::combine_send(Handle& handle, const CombineInput& input, const CombineOptions& options) {
  return core_->combine_send(handle, input, options, nullptr);
}

Status SplitPhases::combine_receive(Handle& handle, TensorView& output) {
  return core_->combine_receive(handle, output);
}

Layout RouteQuery::layout(const TensorView& topk_ids, int num_experts) {
  return core_->layout(topk_ids, num_experts);
}

void SmBudget::set_num_sms(int num_sms) {
  if (num_sms < 1) {
    throw Error(ErrorCode::kInvalidArgument, "num_sms is " + std::to_string(num_sms) + "; it must be at least 1");
  }
  num_sms_ = num_sms < cap_ ? num_sms : cap_;
}

void Growth::reserve(const MoeParams& params, std::int64_t extra_payload_bytes_per_token) {
  core_->reserve(params, extra_payload_bytes_per_token);
}

}  // namespace tokenyard
