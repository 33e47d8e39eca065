// SPDX-License-Identifier: Apache-2.0
#include "support/round.h"

#include <array>
#include <cstring>
#include <utility>
#include <variant>

#include "support/casts.h"
#include "support/check.h"

namespace tokenyard::support {
namespace {

bool uses_low_precision(const Communication& communication) {
  const auto* config = std::get_if<OneSidedConfig>(&communication.config());
  return config != nullptr && config->use_low_precision_combine;
}

// Tensors for every member of a result, larger than needed where the layout has a free number of rows.
class CallerTensors {
 public:
  CallerTensors(const Communication& communication, const World& world, const ExpectedDispatch& expected) {
    rows_ = blocks_of(communication, expected);
    if (rows_.empty()) rows_ = {expected.total_rows + 3};
    const RankData& data = world.rank(communication.rank());
    members_.hidden_states = add(data.hidden.dtype, data.hidden.columns);
    members_.hidden_states_scale = add(data.scale.dtype, data.scale.columns);
    if (communication.contract().output_layout == OutputLayout::kExpertMajor) return;
    members_.topk_ids = add(world.spec.id_dtype, world.spec.params.top_k);
    members_.topk_weights = add(data.weights.dtype, data.weights.columns);
    members_.router_logits = add(data.router_logits.dtype, data.router_logits.columns);
    for (const Rows& extra : data.extras)
      members_.extra_payloads.push_back(add(extra.dtype, extra.columns));
  }

  [[nodiscard]] const DispatchResult* members() const { return &members_; }

  void check_used(const DispatchResult& result) const {
    check_eq(result.hidden_states.data, members_.hidden_states.data, "address of the caller's hidden states");
    check_eq(result.topk_ids.data, members_.topk_ids.data, "address of the caller's ids");
    for (const Tensor& tensor : tensors_)
      tensor.check_guards("a caller's output of dispatch");
  }

  [[nodiscard]] std::vector<Tensor> take() { return std::move(tensors_); }

  // Of a result whose tensors these were.
  static void forget(DispatchResult& result) {
    result.hidden_states = TensorView();
    result.hidden_states_scale = TensorView();
    result.topk_ids = TensorView();
    result.topk_weights = TensorView();
    result.router_logits = TensorView();
    result.extra_payloads.clear();
  }

 private:
  TensorView add(Dtype dtype, std::int64_t columns) {
    if (columns == 0) return {};
    std::vector<std::int64_t> shape = rows_;
    shape.push_back(columns);
    tensors_.emplace_back(dtype, shape);
    return tensors_.back().view();
  }

  std::vector<std::int64_t> rows_;
  std::vector<Tensor> tensors_;
  DispatchResult members_;
};

void fill_expert_output(
    const TensorView& view, const World& world, const ExpectedDispatch& expected, const RoundPlan& plan, int rank) {
  const std::int64_t row_bytes = last_dim_bytes(view);
  // Unused rows must not be read: NaN would show.
  for (std::int64_t row = 0; row < num_flat_rows(view); ++row) {
    std::memset(row_of(view, row), 0xFF, static_cast<std::size_t>(row_bytes));
  }
  const ExpertData data{.seed = plan.seed, .dtype = plan.expert_dtype, .specials = plan.special_values};
  for (const ExpectedRow& row : expected.rows) {
    const std::vector<std::byte> bytes = expert_row(data, row, rank, world.spec.params.hidden_size);
    std::memcpy(row_of(view, row.position), bytes.data(), bytes.size());
  }
}

// The tensors that one combine takes and gives.
struct CombineTensors {
  Tensor expert_output, weights, weights_output, output;
  std::array<Tensor, 2> biases;
  bool in_window = false;
  CombineInput input;
  CombineOptions options;

  void check_intact() const {
    if (!in_window) expert_output.check_unchanged("expert_output");
    if (weights.view().defined()) weights.check_unchanged("the weights given to combine");
    for (const Tensor& bias : biases) {
      if (bias.view().defined()) bias.check_unchanged("a bias");
    }
    output.check_guards("the output of combine");
    if (weights_output.view().defined()) weights_output.check_guards("the weights brought back");
  }
};

void give_late_weights(int rank, const World& world, const RoundPlan& plan, CombineTensors& tensors) {
  const std::int64_t num_tokens = world.rank(rank).num_tokens;
  tensors.weights = Tensor(Dtype::kF32, {num_tokens, world.spec.params.top_k}, {.poison = kNanPoison});
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (int slot = 0; slot < world.spec.params.top_k; ++slot)
      store(Dtype::kF32, tensors.weights.row(token), slot, late_weight(plan.seed, rank, token, slot));
  }
  tensors.weights.remember();
  tensors.input.topk_weights = tensors.weights.view();
}

void prepare_expert_output(Communication& communication,
                           const World& world,
                           const RoundPlan& plan,
                           const Handle& handle,
                           CombineTensors& tensors) {
  const ExpectedDispatch expected = expect_dispatch(world, communication.rank(), layout_rule(communication, plan));
  const std::int64_t hidden = world.spec.params.hidden_size;
  TensorView view;
  if (plan.zero_copy) view = communication.combine_input(handle, plan.expert_dtype);
  tensors.in_window = view.defined();
  if (!tensors.in_window) {
    std::vector<std::int64_t> shape{expected.total_rows, hidden};
    const std::vector<std::int64_t> blocks = blocks_of(communication, expected);
    if (!blocks.empty() && !plan.flat_expert_output) shape = {blocks[0], blocks[1], hidden};
    tensors.expert_output =
        Tensor(plan.expert_dtype, shape, {.padding_elements = plan.strided ? 5 : 0, .poison = kNanPoison});
    view = tensors.expert_output.view();
  }
  check_eq(num_flat_rows(view), expected.total_rows, "rows of combine's input");
  fill_expert_output(view, world, expected, plan, communication.rank());
  tensors.expert_output.remember();
  tensors.input.expert_output = view;
  if (communication.contract().weights_applied_by == WeightRule::kCombine && !world.spec.with_weights) {
    give_late_weights(communication.rank(), world, plan, tensors);
  }
  if (!plan.weights_back) return;
  const int top_k = world.spec.params.top_k;
  tensors.weights = Tensor(Dtype::kF32, {expected.total_rows, top_k}, {.poison = kNanPoison});
  for (const ExpectedRow& row : expected.rows) {
    for (int slot = 0; slot < top_k; ++slot) {
      store(Dtype::kF32, tensors.weights.row(row.position), slot,
            returned_weight(plan.seed, row, communication.rank(), slot));
    }
  }
  tensors.weights.remember();
  tensors.input.topk_weights = tensors.weights.view();
}

void prepare_output(const Communication& communication,
                    const World& world,
                    const RoundPlan& plan,
                    CombineTensors& tensors) {
  const std::int64_t num_tokens = world.rank(communication.rank()).num_tokens;
  const std::int64_t hidden = world.spec.params.hidden_size;
  const TensorOptions strided{.padding_elements = plan.strided ? 2 : 0};
  tensors.output = Tensor(plan.output_dtype, {num_tokens, hidden}, strided);
  for (int which = 0; which < plan.num_biases; ++which) {
    Tensor& bias = tensors.biases[static_cast<std::size_t>(which)];
    bias = Tensor(plan.output_dtype, {num_tokens, hidden}, strided);
    bias.fill(bias_bytes(plan.seed + static_cast<std::uint64_t>(communication.rank()) * 64, which, plan.output_dtype,
                         num_tokens * hidden));
    tensors.input.bias[static_cast<std::size_t>(which)] = bias.view();
  }
  if (!plan.weights_back) return;
  tensors.weights_output = Tensor(Dtype::kF32, {num_tokens, world.spec.params.top_k});
  tensors.options.topk_weights_output = tensors.weights_output.view();
}

bool uses_logarithms(const Communication& communication) {
  const auto* config = std::get_if<LowLatencyConfig>(&communication.config());
  return config != nullptr && config->use_logarithmic_combine;
}

CombineRule combine_rule(const Communication& communication, const RoundPlan& plan) {
  return {.layout = layout_rule(communication, plan),
          .experts = {.seed = plan.seed, .dtype = plan.expert_dtype, .specials = plan.special_values},
          .output_dtype = plan.output_dtype,
          .low_precision = uses_low_precision(communication),
          .logarithmic = uses_logarithms(communication),
          .num_biases = plan.num_biases,
          .bias_rank = communication.rank()};
}

Status dispatch(Communication& communication,
                const DispatchInput& input,
                const DispatchOptions& options,
                const RoundPlan& plan,
                DispatchResult& result) {
  if (plan.dispatch_with) return plan.dispatch_with(communication, input, options, result);
  if (!plan.between_halves) return communication.dispatch(input, options, result);
  auto* split = communication.get<SplitPhases>();
  if (const Status sent = split->dispatch_send(input, options, result); !sent.ok()) return sent;
  plan.between_halves();
  return split->dispatch_receive(options, result);
}

Status combine(Communication& communication,
               Handle& handle,
               const CombineTensors& tensors,
               const RoundPlan& plan,
               TensorView& output) {
  if (plan.combine_with) return plan.combine_with(communication, handle, tensors.input, tensors.options, output);
  if (!plan.between_halves) return communication.combine(handle, tensors.input, tensors.options, output);
  auto* split = communication.get<SplitPhases>();
  if (const Status sent = split->combine_send(handle, tensors.input, tensors.options); !sent.ok()) return sent;
  plan.between_halves();
  return split->combine_receive(handle, output);
}

}  // namespace

LayoutRule layout_rule(const Communication& communication, const RoundPlan& plan) {
  return {.layout = communication.contract().output_layout,
          .tokens_per_rank = plan.runtime_max_tokens.value_or(communication.params().max_tokens_per_rank),
          .num_worst_tokens = plan.num_worst_tokens.value_or(-1)};
}

void check_ok(const Status& status, const std::string& what) {
  check(status.code == StatusCode::kOk, what + ": " + status.message());
}

void dispatch_and_check(Communication& communication,
                        const World& world,
                        const RoundPlan& plan,
                        DispatchResult& result,
                        std::vector<Tensor>* memory) {
  const int rank = communication.rank();
  const RankTensors tensors(world, rank, plan.strided);
  const ExpectedDispatch expected = expect_dispatch(world, rank, layout_rule(communication, plan));
  const World received = plan.cast == DispatchCast::kNone ? World() : with_cast(world, plan.cast);
  CallerTensors caller(communication, plan.cast == DispatchCast::kNone ? world : received, expected);
  std::vector<std::int64_t> num_tokens;
  for (const RankData& data : world.ranks)
    num_tokens.push_back(data.num_tokens);
  DispatchOptions options;
  if (plan.tell_num_tokens) options.num_tokens_per_rank = num_tokens;
  if (plan.caller_tensors) options.into = caller.members();
  options.runtime_max_tokens_per_rank = plan.runtime_max_tokens;
  options.num_worst_tokens = plan.num_worst_tokens;
  options.expert_alignment = plan.expert_alignment;
  options.cast = plan.cast;
  if (communication.params().num_experts == 0) options.num_experts = world.spec.params.num_experts;
  check_ok(dispatch(communication, tensors.input(), options, plan, result), "dispatch");
  check_result(communication, world, plan, result);
  check(result.handle.valid(), "dispatch gave no handle");
  tensors.check_unchanged();
  if (!plan.caller_tensors) return;
  caller.check_used(result);
  if (memory != nullptr) {
    *memory = caller.take();
  } else {
    CallerTensors::forget(result);
  }
}

std::vector<std::byte> combine_and_check(Communication& communication,
                                         const World& world,
                                         const RoundPlan& plan,
                                         const DispatchResult& result,
                                         Handle& handle) {
  check(result.counts.num_rows >= 0, "counts.num_rows is negative");
  CombineTensors tensors;
  prepare_expert_output(communication, world, plan, handle, tensors);
  prepare_output(communication, world, plan, tensors);
  TensorView output = tensors.output.view();
  const Status status = combine(communication, handle, tensors, plan, output);
  check_ok(status, "combine");
  check_eq(output.data, tensors.output.view().data, "address of combine's output");
  const CombineRule rule = combine_rule(communication, plan);
  check_elements(output, expect_combine(world, communication.rank(), rule), "combined output");
  check_eq(status.missing_rows, expect_missing_rows(world, communication.rank(), rule.layout), "missing_rows");
  if (plan.weights_back) {
    check_elements(tensors.weights_output.view(), expect_returned_weights(world, communication.rank(), rule),
                   "weights brought back");
  }
  tensors.check_intact();
  return tensors.output.bytes();
}

std::vector<std::byte> play_round(Communication& communication,
                                  const World& world,
                                  const RoundPlan& plan,
                                  DispatchResult& result) {
  dispatch_and_check(communication, world, plan, result);
  return combine_and_check(communication, world, plan, result, result.handle);
}

std::vector<std::byte> used_bytes(const Communication& communication,
                                  const World& world,
                                  const RoundPlan& plan,
                                  const DispatchResult& result) {
  const ExpectedDispatch expected = expect_dispatch(world, communication.rank(), layout_rule(communication, plan));
  std::vector<std::byte> all;
  for (const ExpectedRow& row : expected.rows) {
    for (const TensorView* view : {&result.hidden_states, &result.topk_ids, &result.topk_weights}) {
      if (!view->defined()) continue;
      const std::byte* bytes = row_of(*view, row.position);
      all.insert(all.end(), bytes, bytes + last_dim_bytes(*view));
    }
  }
  return all;
}

CommunicationOptions test_options() {
  CommunicationOptions options;
  options.deadline = std::chrono::milliseconds(5'000);
  options.first_round_deadline = std::chrono::milliseconds(10'000);
  return options;
}

}  // namespace tokenyard::support
