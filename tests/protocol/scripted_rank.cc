// SPDX-License-Identifier: Apache-2.0
#include "protocol/scripted_rank.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "tokenyard/error.h"

#include "support/check.h"
#include "support/rng.h"
#include "support/tensor.h"

namespace tokenyard::protocol_tests {
namespace {

using support::check;
using support::check_eq;
using support::CheckFailure;

constexpr std::uint64_t kNumbersPerOperation = 4;
constexpr float kGarbage = -1e30F;

std::size_t size(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

void check_ok(const Status& status, const std::string& what) {
  check(status.ok(), what + ": " + status.message());
}

void check_aborted(const Status& status, int culprit) {
  check(status.code == StatusCode::kAborted, "expected aborted by rank " + std::to_string(culprit) + ", got " +
                                                 std::string(name(status.code)) + ": " + status.message());
  check_eq(status.fault.peer, culprit, "the rank that gave up");
}

template <class Function>
void check_throws(ErrorCode code, Function&& call) {
  try {
    call();
  } catch (const Error& error) {
    check(error.code() == code, "expected Error " + std::string(name(code)) + ", got " +
                                    std::string(name(error.code())) + ": " + error.what());
    return;
  }
  throw CheckFailure("expected Error " + std::string(name(code)) + ", nothing was thrown");
}

}  // namespace

std::string_view name(Act act) {
  static constexpr std::array<std::string_view, 13> kNames{
      "plain",     "zero copy", "dropped", "split",        "into",       "dispatch misuse", "combine misuse",
      "held view", "mismatch",  "replay",  "worst tokens", "statistics", "two in flight"};
  return kNames[static_cast<std::size_t>(act)];
}

std::vector<Act> acts_of(const Formula& formula) {
  std::vector<Act> acts{Act::kPlain,          Act::kDropped,       Act::kSplit,   Act::kInto,
                        Act::kDispatchMisuse, Act::kCombineMisuse, Act::kMismatch};
  if (find_backend(formula.backend).contract.gives_combine_input) acts.push_back(Act::kZeroCopy);
  acts.push_back(formula.expert_major() ? Act::kTwoInFlight : Act::kHeldView);
  if (formula.rank_major()) acts.push_back(Act::kStatistics);
  if (formula.layout() == OutputLayout::kCompact) {
    acts.push_back(Act::kReplay);
    acts.push_back(Act::kWorstTokens);
  }
  return acts;
}

std::vector<Operation> draw_script(const Formula& formula, int length) {
  const std::vector<Act> acts = acts_of(formula);
  support::Rng rng(formula.seed);
  std::vector<Operation> script;
  script.reserve(size(length));
  for (int i = 0; i < length; ++i) {
    script.push_back({.act = acts[size(rng.below(static_cast<std::int64_t>(acts.size())))],
                      .culprit = static_cast<int>(rng.below(formula.num_ranks)),
                      .number = static_cast<std::uint64_t>(i) * kNumbersPerOperation});
  }
  return script;
}

ScriptedRank::ScriptedRank(const Group& group,
                           const Formula& formula,
                           const CommunicationOptions& options,
                           std::function<void()> pause)
    : formula_(formula),
      rank_(group.rank()),
      pause_(std::move(pause)),
      communication_(create_communication(group, formula.params, formula_config(formula), options)) {
  const std::int64_t tokens = formula.params.max_tokens_per_rank;
  const std::int64_t hidden = formula.params.hidden_size;
  const std::int64_t blocks =
      formula.expert_major() ? num_local_experts(formula.params, rank_, formula.num_ranks) : std::int64_t{1};
  const std::int64_t rows = blocks * tokens * formula.num_ranks;
  hidden_.resize(size(tokens * hidden));
  hidden_into_.resize(size(rows * hidden));
  ids_.resize(size(tokens * formula.params.top_k));
  ids_into_.resize(size(rows * formula.params.top_k));
  weights_.resize(ids_.size());
  expert_output_.resize(hidden_into_.size());
  output_.resize(hidden_.size());
  statistics_.resize(size(formula.num_statistics()));
}

void ScriptedRank::destroy() {
  check_ok(communication_.destroy(), "destroy");
}

void ScriptedRank::play(const Operation& operation) {
  try {
    switch (operation.act) {
      case Act::kDispatchMisuse:
        return play_dispatch_misuse(operation);
      case Act::kCombineMisuse:
        return play_combine_misuse(operation);
      case Act::kHeldView:
        return play_held_view(operation);
      case Act::kMismatch:
        return play_mismatch(operation);
      case Act::kReplay:
        return play_replay(operation);
      case Act::kTwoInFlight:
        return play_two_in_flight(operation);
      default:
        return play_round(operation);
    }
  } catch (const std::exception& failure) {
    throw CheckFailure("operation " + std::to_string(operation.number / kNumbersPerOperation) + " (" +
                       std::string(name(operation.act)) + "): " + failure.what());
  }
}

void ScriptedRank::play_round(const Operation& operation) {
  const Numbers numbers{operation.number, operation.number};
  dispatch(numbers, operation.act, nullptr, result_);
  if (operation.act == Act::kDropped) {
    result_.handle = Handle();
  } else {
    combine(numbers, operation.act, result_);
  }
  worst_tokens_ = -1;
}

void ScriptedRank::play_replay(const Operation& operation) {
  const Numbers first{operation.number, operation.number};
  dispatch(first, Act::kPlain, nullptr, result_);
  combine(first, Act::kPlain, result_);
  // The same handle again: no dispatch lies between the two writes of the combine section.
  combine({operation.number, operation.number + 1}, Act::kPlain, result_);
  for (std::uint64_t i = 1; i <= 2; ++i) {
    const Numbers again{operation.number, operation.number + i};
    dispatch(again, Act::kPlain, &result_.handle, replayed_);
    combine(again, i == 1 ? Act::kZeroCopy : Act::kPlain, replayed_);
  }
}

void ScriptedRank::play_dispatch_misuse(const Operation& operation) {
  fill_input({operation.number, operation.number});
  if (rank_ == operation.culprit) {
    DispatchInput bad = input_;
    bad.hidden_states = TensorView(hidden_.data(), Dtype::kF32, {0, formula_.params.hidden_size + 1});
    check_throws(ErrorCode::kInvalidArgument, [&] { (void)communication_.dispatch(bad, {}, result_); });
  } else {
    check_aborted(communication_.dispatch(input_, {}, result_), operation.culprit);
  }
  play_round({.act = Act::kPlain, .culprit = 0, .number = operation.number});
}

// The others have no views, so nothing is wrong with their second dispatch but the rank that cannot take part.
void ScriptedRank::play_held_view(const Operation& operation) {
  const Numbers numbers{operation.number, operation.number};
  dispatch(numbers, rank_ == operation.culprit ? Act::kPlain : Act::kInto, nullptr, result_);
  fill_input({operation.number + 1, operation.number + 1});
  if (rank_ == operation.culprit) {
    check_throws(ErrorCode::kInvalidState, [&] { (void)communication_.dispatch(input_, {}, replayed_); });
    pause_();
    check_result(numbers, true, result_);
  } else {
    check_aborted(communication_.dispatch(input_, {}, replayed_), operation.culprit);
  }
  combine(numbers, Act::kPlain, result_);
}

void ScriptedRank::play_mismatch(const Operation& operation) {
  fill_input({operation.number, operation.number});
  DispatchInput input = input_;
  if (rank_ == operation.culprit) {
    const std::int64_t tokens = formula_.num_tokens(operation.number, rank_);
    const bool given = input.topk_weights.defined();
    input.topk_weights =
        given ? TensorView() : TensorView(weights_.data(), Dtype::kF32, {tokens, formula_.params.top_k});
  }
  check_throws(ErrorCode::kMismatch, [&] { (void)communication_.dispatch(input, {}, result_); });
  play_round({.act = Act::kPlain, .culprit = 0, .number = operation.number + 1});
}

void ScriptedRank::play_combine_misuse(const Operation& operation) {
  const Numbers numbers{operation.number, operation.number};
  dispatch(numbers, Act::kPlain, nullptr, result_);
  TensorView output = output_view(operation.number);
  CombineInput input = combine_input(numbers, false, result_.handle);
  if (rank_ == operation.culprit) {
    input.expert_output.dtype = Dtype::kI32;
    check_throws(ErrorCode::kInvalidArgument, [&] { (void)communication_.combine(result_.handle, input, {}, output); });
    input.expert_output.dtype = Dtype::kF32;
    // The round is over; trying it again is refused and disturbs nobody.
    check_throws(ErrorCode::kInvalidState, [&] { (void)communication_.combine(result_.handle, input, {}, output); });
  } else {
    const Status status = communication_.combine(result_.handle, input, {}, output);
    if (formula_.num_rows(operation.number, rank_, operation.culprit) > 0) {
      check_aborted(status, operation.culprit);
    } else {
      check_ok(status, "combine without rows at the rank that gave up");
      check_output(numbers);
    }
  }
  play_round({.act = Act::kPlain, .culprit = 0, .number = operation.number + 1});
}

// Two micro-batches whose halves overlap in both phases.
void ScriptedRank::play_two_in_flight(const Operation& operation) {
  const Numbers first{operation.number, operation.number};
  const Numbers second{operation.number + 1, operation.number + 1};
  auto* split = communication_.get<SplitPhases>();
  fill_input(first);
  check_ok(split->dispatch_send(input_, {}, result_), "the first dispatch_send");
  fill_input(second);
  check_ok(split->dispatch_send(input_, {}, replayed_), "the second dispatch_send");
  scribble_input();
  pause_();
  check_ok(split->dispatch_receive({}, result_), "the first dispatch_receive");
  check_ok(split->dispatch_receive({}, replayed_), "the second dispatch_receive");
  DispatchResult third;
  fill_input(first);
  check_throws(ErrorCode::kInvalidState, [&] { (void)communication_.dispatch(input_, {}, third); });
  check_result(first, true, result_);
  check_result(second, true, replayed_);
  check_ok(split->combine_send(result_.handle, combine_input(first, true, result_.handle), {}), "combine_send");
  pause_();
  check_ok(split->combine_send(replayed_.handle, combine_input(second, false, replayed_.handle), {}), "combine_send");
  for (const auto& [numbers, result] : {std::pair(first, &result_), std::pair(second, &replayed_)}) {
    TensorView output = output_view(numbers.route);
    check_ok(split->combine_receive(result->handle, output), "combine_receive");
    check_output(numbers);
  }
}

void ScriptedRank::fill_input(const Numbers& numbers) {
  const std::int64_t tokens = formula_.num_tokens(numbers.route, rank_);
  const std::int64_t hidden = formula_.params.hidden_size;
  const int top_k = formula_.params.top_k;
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t column = 0; column < hidden; ++column)
      hidden_[size(token * hidden + column)] = formula_.word(numbers.rows, rank_, token, column);
    for (int slot = 0; slot < top_k; ++slot)
      ids_[size(token * top_k + slot)] = formula_.id(numbers.route, rank_, token, slot);
  }
  input_ = {.hidden_states = TensorView(hidden_.data(), Dtype::kF32, {tokens, hidden}),
            .topk_ids = TensorView(ids_.data(), Dtype::kI32, {tokens, top_k})};
  if (formula_.expert_major() && Formula::weights_at_dispatch(numbers.rows))
    input_.topk_weights = weights_view(numbers);
}

TensorView ScriptedRank::weights_view(const Numbers& numbers) {
  const std::int64_t tokens = formula_.num_tokens(numbers.route, rank_);
  const int top_k = formula_.params.top_k;
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (int slot = 0; slot < top_k; ++slot)
      weights_[size(token * top_k + slot)] = formula_.weight(numbers.rows, rank_, token, slot);
  }
  return {weights_.data(), Dtype::kF32, {tokens, top_k}};
}

// The caller's rows are its own again after the send half.
void ScriptedRank::scribble_input() {
  std::ranges::fill(hidden_, 0xDEADBEEFU);
  std::ranges::fill(ids_, -7);
  std::ranges::fill(weights_, kGarbage);
  std::ranges::fill(statistics_, -7);
}

void ScriptedRank::dispatch(const Numbers& numbers, Act act, const Handle* replay, DispatchResult& result) {
  fill_input(numbers);
  DispatchOptions options{.replay = replay};
  if (replay != nullptr) input_.topk_ids = {};
  if (act == Act::kStatistics) {
    for (std::int64_t i = 0; i < formula_.num_statistics(); ++i)
      statistics_[size(i)] = formula_.statistic(numbers.rows, rank_, i);
    input_.eplb_local_stats = TensorView(statistics_.data(), Dtype::kI32, {formula_.num_statistics()});
  }
  if (act == Act::kWorstTokens) options.num_worst_tokens = worst_tokens_ = formula_.params.max_tokens_per_rank / 2;
  if (formula_.rank_major()) options.runtime_max_tokens_per_rank = tokens_per_rank(numbers.route);
  if (act == Act::kInto) {
    const auto rows = static_cast<std::int64_t>(hidden_into_.size()) / formula_.params.hidden_size;
    into_.hidden_states = TensorView(hidden_into_.data(), Dtype::kF32, {rows, formula_.params.hidden_size});
    if (!formula_.expert_major()) {
      into_.topk_ids = TensorView(ids_into_.data(), Dtype::kI32, {rows, formula_.params.top_k});
    }
    options.into = &into_;
  }
  if (act == Act::kSplit) {
    auto* split = communication_.get<SplitPhases>();
    check_ok(split->dispatch_send(input_, options, result), "dispatch_send");
    scribble_input();
    pause_();
    check_ok(split->dispatch_receive(options, result), "dispatch_receive");
  } else {
    check_ok(communication_.dispatch(input_, options, result), "dispatch");
    scribble_input();
  }
  // Twice: while a result is a view, nobody may store to it.
  check_result(numbers, replay == nullptr, result);
  pause_();
  check_result(numbers, replay == nullptr, result);
  if (act == Act::kStatistics) check_statistics(numbers.rows, result.eplb_gathered_stats);
}

TensorView ScriptedRank::expert_output(const Numbers& numbers, bool zero_copy, const Handle& handle) {
  const std::int64_t hidden = formula_.params.hidden_size;
  TensorView rows(expert_output_.data(), Dtype::kF32, {result_rows(numbers.route), hidden});
  if (zero_copy) {
    const TensorView window = communication_.combine_input(handle, Dtype::kF32);
    check(window.defined() || formula_.every_rank(), "combine_input() gave no memory");
    if (window.defined()) rows = window;
  }
  for (const Row& row : received_rows(numbers.route)) {
    if (row.index % 8 == 0) pause_();
    auto* to = reinterpret_cast<float*>(support::row_of(rows, row.index));
    for (std::int64_t column = 0; column < hidden; ++column)
      to[column] = formula_.expert_value(numbers.rows, row.expert < 0 ? rank_ : kExpertOwner + row.expert, row.source,
                                         row.token, column);
  }
  return rows;
}

CombineInput ScriptedRank::combine_input(const Numbers& numbers, bool zero_copy, const Handle& handle) {
  CombineInput input{.expert_output = expert_output(numbers, zero_copy, handle)};
  if (formula_.expert_major() && !Formula::weights_at_dispatch(numbers.rows))
    input.topk_weights = weights_view(numbers);
  return input;
}

TensorView ScriptedRank::output_view(std::uint64_t route) {
  std::ranges::fill(output_, kGarbage);
  return {output_.data(), Dtype::kF32, {formula_.num_tokens(route, rank_), formula_.params.hidden_size}};
}

void ScriptedRank::combine(const Numbers& numbers, Act act, DispatchResult& result) {
  TensorView output = output_view(numbers.route);
  const CombineInput input = combine_input(numbers, act == Act::kZeroCopy, result.handle);
  Status status;
  if (act == Act::kSplit) {
    auto* split = communication_.get<SplitPhases>();
    check_ok(split->combine_send(result.handle, input, {}), "combine_send");
    std::ranges::fill(expert_output_, kGarbage);
    std::ranges::fill(weights_, kGarbage);
    pause_();
    status = split->combine_receive(result.handle, output);
  } else {
    status = communication_.combine(result.handle, input, {}, output);
    std::ranges::fill(expert_output_, kGarbage);
  }
  check_ok(status, "combine");
  std::int64_t missing = 0;
  for (std::int64_t token = 0; token < formula_.num_tokens(numbers.route, rank_) && worst_tokens_ >= 0; ++token) {
    for (int owner = 0; owner < formula_.num_ranks; ++owner) {
      const bool sent = formula_.travels(numbers.route, rank_, token, owner);
      if (sent && row_at(numbers.route, rank_, token, owner) >= worst_tokens_) ++missing;
    }
  }
  check_eq(status.missing_rows, missing, "rows that receivers dropped");
  check_output(numbers);
}

}  // namespace tokenyard::protocol_tests
