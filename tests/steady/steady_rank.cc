// SPDX-License-Identifier: Apache-2.0
#include "steady/steady_rank.h"

#include <array>
#include <utility>
#include <vector>

#include "support/backends.h"
#include "support/round.h"

namespace tokenyard::steady_tests {
namespace {

constexpr int kTopK = 4;

support::WorldSpec spec_of(const SteadyCase& value) {
  support::WorldSpec spec;
  spec.params = {
      .num_experts = 16, .top_k = kTopK, .hidden_size = 512, .max_tokens_per_rank = static_cast<int>(value.max_tokens)};
  spec.num_ranks = value.num_ranks;
  spec.num_tokens.assign(static_cast<std::size_t>(value.num_ranks), value.max_tokens);
  spec.seed = 3;
  const Contract& contract = find_backend(value.backend).contract;
  if (contract.takes_extra_payloads) spec.extra_row_bytes = {24, 5};
  if (contract.takes_eplb_stats) spec.eplb_entries = 16;
  return spec;
}

CommunicationOptions options_of(const SteadyCase& value) {
  CommunicationOptions options = support::test_options();
  options.num_threads = value.num_threads;
  return options;
}

Communication communication_of(const Group& group, const SteadyCase& value, const support::WorldSpec& spec) {
  if (value.budget_bytes == 0) return support::communication_for(group, value.backend, spec, options_of(value));
  return create_communication(group, {}, HighThroughputConfig{.buffer_bytes = value.budget_bytes}, options_of(value));
}

}  // namespace

std::string name(const SteadyCase& value) {
  static constexpr std::array<std::string_view, 6> kNames{"views", "zero_copy", "split", "replay", "into", "turns"};
  return std::string(value.backend) + "_" + std::string(kNames[static_cast<std::size_t>(value.variant)]) + "_" +
         std::to_string(value.num_threads) + "_threads" +
         (value.budget_bytes > 0 ? "_budget" + std::to_string(value.budget_bytes) : "");
}

std::ostream& operator<<(std::ostream& out, const SteadyCase& value) {
  return out << name(value);
}

bool possible(const SteadyCase& value) {
  const Contract& contract = find_backend(value.backend).contract;
  const bool cut = value.budget_bytes == kCutBudget;
  if (cut && (value.variant == Variant::kSplit || value.variant == Variant::kZeroCopy)) return false;
  if (value.variant == Variant::kZeroCopy) return contract.gives_combine_input;
  if (value.variant == Variant::kTurns) return contract.takes_turns;
  return value.variant != Variant::kReplay || contract.handle_use == HandleUse::kReplay;
}

SteadyRank::SteadyRank(const Group& group, const SteadyCase& steady_case)
    : case_(steady_case),
      world_(support::make_world(spec_of(steady_case))),
      tensors_(world_, group.rank(), false),
      communication_(communication_of(group, steady_case, world_.spec)),
      input_(tensors_.input()),
      replay_input_(tensors_.input(false)) {
  if (case_.variant == Variant::kTurns) {
    next_.emplace(support::communication_for(group, case_.backend, world_.spec, options_of(case_)));
  }
  const MoeParams& params = world_.spec.params;
  const bool by_expert = communication_.contract().output_layout == OutputLayout::kExpertMajor;
  const std::int64_t blocks = by_expert ? num_local_experts(params, group.rank(), case_.num_ranks) : 1;
  const std::int64_t rows = blocks * case_.max_tokens * case_.num_ranks;
  const std::int64_t hidden = params.hidden_size;
  expert_output_ = support::Tensor(Dtype::kBf16, {rows, hidden}, {.poison = std::byte{1}});
  output_ = support::Tensor(Dtype::kBf16, {case_.max_tokens, hidden});
  replay_input_.topk_weights = {};
  options_.num_experts = params.num_experts;
  if (case_.variant == Variant::kInto) {
    hidden_into_ = support::Tensor(Dtype::kBf16, {rows, hidden});
    ids_into_ = support::Tensor(Dtype::kI32, {rows, kTopK});
    weights_into_ = support::Tensor(Dtype::kF32, {rows, kTopK});
    into_.hidden_states = hidden_into_.view();
    options_.into = &into_;
    if (by_expert) return;
    into_.topk_ids = ids_into_.view();
    into_.topk_weights = weights_into_.view();
  }
}

bool SteadyRank::play() {
  if (next_) std::swap(communication_, *next_);
  return dispatch() && combine();
}

void SteadyRank::destroy() {
  support::check_ok(communication_.destroy(), "destroy");
  if (next_) support::check_ok(next_->destroy(), "destroy of the next");
}

bool SteadyRank::dispatch() {
  if (case_.variant == Variant::kSplit) {
    auto* split = communication_.get<SplitPhases>();
    return split->dispatch_send(input_, options_, result_).ok() && split->dispatch_receive(options_, result_).ok();
  }
  if (case_.variant != Variant::kReplay) return communication_.dispatch(input_, options_, result_).ok();
  if (!std::exchange(routed_, true)) {
    if (!communication_.dispatch(input_, options_, first_).ok()) return false;
    TensorView output = output_.view();
    const CombineInput rows{.expert_output = expert_output_.view().rows(0, first_.hidden_states.num_rows())};
    if (!communication_.combine(first_.handle, rows, {}, output).ok()) return false;
    options_.replay = &first_.handle;
  }
  return communication_.dispatch(replay_input_, options_, result_).ok();
}

bool SteadyRank::combine() {
  TensorView rows = expert_output_.view();  // all that a result in blocks has
  if (result_.hidden_states.num_dims == 2) rows = rows.rows(0, result_.hidden_states.num_rows());
  if (case_.variant == Variant::kZeroCopy) {
    rows = communication_.combine_input(result_.handle, Dtype::kBf16);
    if (!rows.defined()) return false;
  }
  const CombineInput input{.expert_output = rows};
  TensorView output = output_.view();
  if (case_.variant == Variant::kSplit) {
    auto* split = communication_.get<SplitPhases>();
    return split->combine_send(result_.handle, input, {}).ok() && split->combine_receive(result_.handle, output).ok();
  }
  return communication_.combine(result_.handle, input, {}, output).ok();
}

}  // namespace tokenyard::steady_tests
