// SPDX-License-Identifier: Apache-2.0
// The public faces of a manager: they hold, and pass on.
#include "tokenyard/manager.h"

#include <array>
#include <utility>

#include "manager/state.h"

namespace tokenyard {

Communication& All2AllHandle::get_communication() const {
  if (entry_ != nullptr) return entry_->communication;
  if (state_ != nullptr) return state_->get_communication();
  throw Error(ErrorCode::kInvalidState, "this handle is empty: no get_handle gave it");
}

Communication& All2AllHandle::get_communication(const CommunicationSizes& sizes) const {
  if (state_ != nullptr) return state_->get_communication(sizes);
  throw Error(entry_ != nullptr ? ErrorCode::kUnsupported : ErrorCode::kInvalidState,
              entry_ != nullptr ? "this handle has one communication; call get_communication() without sizes"
                                : "this handle is empty: no get_handle gave it");
}

Status GatherCalls::dispatch(const TensorView& hidden_states,
                             const TensorView& topk_weights,
                             const TensorView& topk_ids,
                             const GatherOptions& options,
                             GatherResult& result) {
  const std::array with{manager::Named{"topk_weights", &topk_weights}, manager::Named{"topk_ids", &topk_ids}};
  const std::array<TensorView*, 2> results{&result.topk_weights, &result.topk_ids};
  result.router_logits = {};
  return state_->gathering(
      [&](manager::GatherState& gather) { return gather.dispatch(hidden_states, with, options, results, result); });
}

Status GatherCalls::dispatch_router_logits(const TensorView& hidden_states,
                                           const TensorView& router_logits,
                                           const GatherOptions& options,
                                           GatherResult& result) {
  const std::array with{manager::Named{"router_logits", &router_logits}};
  const std::array<TensorView*, 1> results{&result.router_logits};
  result.topk_weights = {};
  result.topk_ids = {};
  return state_->gathering(
      [&](manager::GatherState& gather) { return gather.dispatch(hidden_states, with, options, results, result); });
}

Status GatherCalls::combine(const TensorView& hidden_states,
                            TensorView& output,
                            bool sequence_parallel,
                            const Stream& stream) {
  const manager::CombineChoice choice{.sequence_parallel = sequence_parallel, .stream = stream};
  return state_->gathering([&](manager::GatherState& gather) { return gather.combine(hidden_states, output, choice); });
}

Status GatherCalls::combine_into_output(const TensorView& hidden_states,
                                        TensorView& output,
                                        bool sequence_parallel,
                                        const Stream& stream) {
  const manager::CombineChoice choice{.sequence_parallel = sequence_parallel, .into = true, .stream = stream};
  return state_->gathering([&](manager::GatherState& gather) { return gather.combine(hidden_states, output, choice); });
}

TensorView GatherCalls::allocate_combine_input(std::int64_t num_rows,
                                               std::int64_t hidden_size,
                                               Dtype dtype,
                                               bool sequence_parallel) {
  return state_->gathering([&](manager::GatherState& gather) {
    return gather.allocate_combine_input(num_rows, {hidden_size, dtype}, sequence_parallel);
  });
}

All2AllManager::All2AllManager(std::shared_ptr<manager::State> state) : state_(std::move(state)) {}

All2AllManager::All2AllManager(All2AllManager&&) noexcept = default;

All2AllManager& All2AllManager::operator=(All2AllManager&& other) noexcept {
  if (this == &other) return *this;
  const All2AllManager old(std::move(*this));
  state_ = std::move(other.state_);
  return *this;
}

All2AllManager::~All2AllManager() {
  if (state_ != nullptr) state_->abandon();
}

const BackendInfo& All2AllManager::backend() const {
  return state_->info();
}

const ManagerOptions& All2AllManager::options() const {
  return state_->options();
}

int All2AllManager::rank() const {
  return state_->options().group.rank();
}

int All2AllManager::num_ranks() const {
  return state_->options().group.num_ranks();
}

bool All2AllManager::spans_hosts() const {
  return state_->spans_hosts();
}

bool All2AllManager::initialized() const {
  return state_->initialized();
}

Support All2AllManager::probe() const {
  return tokenyard::probe(state_->info());
}

All2AllHandle All2AllManager::get_handle(const HandleRequest& request) {
  return state_->get_handle(request);
}

void All2AllManager::initialize(const InitializeRequest& request) {
  state_->initialize(request);
}

Communication& All2AllManager::get_communication() {
  return state_->get_communication();
}

Communication& All2AllManager::get_communication(const CommunicationSizes& sizes) {
  return state_->get_communication(sizes);
}

Status All2AllManager::cleanup() {
  return state_->cleanup();
}

void All2AllManager::set_num_sms(int num_sms) {
  state_->set_num_sms(num_sms);
}

std::optional<int> All2AllManager::max_sms_used() const {
  return state_->max_sms_used();
}

void All2AllManager::set_step_num_tokens(std::span<const std::int64_t> num_tokens) {
  state_->set_step_num_tokens(num_tokens);
}

template <>
GatherCalls* All2AllManager::get<GatherCalls>() {
  return state_->gather_calls();
}

GatherCalls& All2AllManager::gather_calls() {
  if (GatherCalls* calls = state_->gather_calls(); calls != nullptr) return *calls;
  throw Error(ErrorCode::kUnsupported,
              "`" + std::string(backend().name) + "` dispatches and combines no tensors itself; use get_handle()",
              rank());
}

Status All2AllManager::destroy() {
  return state_->destroy();
}

All2AllManager create_all2all_manager(std::string_view name_or_alias, const ManagerOptions& options) {
  const manager::Strategy* strategy = nullptr;
  std::optional<Error> failure;
  try {
    strategy = &manager::strategy_of(find_backend(name_or_alias));
  } catch (const Error& error) {
    failure = error;
  }
  return manager::State::create(strategy, options, failure);
}

}  // namespace tokenyard
