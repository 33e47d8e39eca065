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

void check_payload(const World& world,
                   const ExpectedDispatch& expected,
                   const TensorView& got,
                   Rows RankData::*payload,
                   const std::string& what) {
  for (const ExpectedRow& row : expected.rows) {
    const Rows& rows = world.rank(row.source).*payload;
    check_eq(last_dim_bytes(got), rows.row_bytes(), what + ", bytes of a row");
    check_bytes(row_of(got, row.position), rows.row(row.token), what + ", row " + std::to_string(row.position));
  }
}

// One payload of a result: given exactly when it was sent, with the right dtype and rows.
void check_member(const World& world,
                  const ExpectedDispatch& expected,
                  const TensorView& got,
                  Rows RankData::*payload,
                  const std::string& what) {
  const Rows& sent = world.rank(0).*payload;
  check_eq(got.defined(), sent.columns > 0, what + " is given");
  if (sent.columns == 0) return;
  check_eq(name(got.dtype), name(sent.dtype), what + ", dtype");
  check_eq(num_flat_rows(got), expected.total_rows, what + ", rows");
  check_payload(world, expected, got, payload, what);
}

void check_ids(
    const World& world, const ExpectedDispatch& expected, const TensorView& got, int rank, const Contract& contract) {
  const MoeParams& params = world.spec.params;
  check_eq(name(got.dtype), name(world.spec.id_dtype), "ids, dtype");
  check_eq(num_flat_rows(got), expected.total_rows, "ids, rows");
  const std::int64_t invalid = contract.id_space == IdSpace::kGlobal ? params.invalid_expert_id : -1;
  const std::vector<std::int64_t> unused(static_cast<std::size_t>(params.top_k), invalid);
  std::vector<bool> used(static_cast<std::size_t>(expected.total_rows), false);
  for (const ExpectedRow& row : expected.rows) {
    used[static_cast<std::size_t>(row.position)] = true;
    check_bytes(row_of(got, row.position),
                id_bytes(expect_ids(world, row, rank, contract.id_space), world.spec.id_dtype),
                "ids, row " + std::to_string(row.position));
  }
  for (std::int64_t position = 0; position < expected.total_rows; ++position) {
    if (used[static_cast<std::size_t>(position)]) continue;
    check_bytes(row_of(got, position), id_bytes(unused, world.spec.id_dtype),
                "ids of the unused row " + std::to_string(position));
  }
}

// Weights travel bit for bit; under local ids other ranks' slots and unused rows are zero.
void check_weights(
    const World& world, const ExpectedDispatch& expected, const TensorView& got, int rank, const Contract& contract) {
  if (contract.id_space != IdSpace::kLocal) {
    check_member(world, expected, got, &RankData::weights, "weights");
    return;
  }
  check_eq(got.defined(), world.spec.with_weights, "weights are given");
  if (!got.defined()) return;
  check_eq(name(got.dtype), name(world.spec.weight_dtype), "weights, dtype");
  check_eq(num_flat_rows(got), expected.total_rows, "weights, rows");
  const auto size = static_cast<std::size_t>(size_of(world.spec.weight_dtype));
  std::vector<std::byte> want(size * static_cast<std::size_t>(world.spec.params.top_k));
  for (const ExpectedRow& row : expected.rows) {
    std::memcpy(want.data(), world.rank(row.source).weights.row(row.token).data(), want.size());
    const std::vector<std::int64_t> ids = expect_ids(world, row, rank, contract.id_space);
    for (std::size_t slot = 0; slot < ids.size(); ++slot) {
      if (ids[slot] < 0) std::memset(want.data() + slot * size, 0, size);
    }
    check_bytes(row_of(got, row.position), want, "weights, row " + std::to_string(row.position));
  }
  std::fill(want.begin(), want.end(), std::byte{0});
  for (std::int64_t row = std::ssize(expected.rows); row < expected.total_rows; ++row) {
    check_bytes(row_of(got, row), want, "weights of the tail row " + std::to_string(row));
  }
}

void check_counts(const ExpectedDispatch& expected,
                  const RowCounts& counts,
                  const Contract& contract,
                  const RoundPlan& plan,
                  bool with_ids) {
  check_eq(counts.num_rows, std::ssize(expected.rows), "counts.num_rows");
  check_eq(counts.dropped_rows, expected.dropped_rows, "counts.dropped_rows");
  check_lists_eq(counts.tokens_per_source, expected.tokens_per_source, "counts.tokens_per_source");
  if (expected.dropped_rows > 0) return;  // the contract does not say whether these count dropped rows
  check_lists_eq(counts.rows_per_source, expected.rows_per_source, "counts.rows_per_source");
  // Without ids the contract does not promise counts per expert.
  if (contract.id_space == IdSpace::kCargo || !with_ids) return;
  check_lists_eq(counts.rows_per_expert, expected.rows_per_expert, "counts.rows_per_expert");
  if (!contract.takes_expert_alignment) return;
  std::vector<std::int64_t> aligned = expected.rows_per_expert;
  for (std::int64_t& rows : aligned) {
    rows = (rows + plan.expert_alignment - 1) / plan.expert_alignment * plan.expert_alignment;
  }
  check_lists_eq(counts.aligned_rows_per_expert, aligned, "counts.aligned_rows_per_expert");
}

void check_extras(const World& world, const ExpectedDispatch& expected, const DispatchResult& result) {
  check_eq(result.extra_payloads.size(), world.spec.extra_row_bytes.size(), "number of extra payloads");
  for (std::size_t i = 0; i < result.extra_payloads.size(); ++i) {
    const std::string what = "extra payload " + std::to_string(i);
    const TensorView& got = result.extra_payloads[i];
    check_eq(name(got.dtype), name(world.rank(0).extras[i].dtype), what + ", dtype");
    check_eq(num_flat_rows(got), expected.total_rows, what + ", rows");
    for (const ExpectedRow& row : expected.rows) {
      check_bytes(row_of(got, row.position), world.rank(row.source).extras[i].row(row.token),
                  what + ", row " + std::to_string(row.position));
    }
  }
}

void check_eplb(const World& world, const TensorView& got) {
  check_eq(got.defined(), world.spec.eplb_entries > 0, "eplb statistics are given");
  if (!got.defined()) return;
  check_eq(num_flat_rows(got), std::int64_t{world.spec.num_ranks}, "eplb statistics, rows");
  for (int rank = 0; rank < world.spec.num_ranks; ++rank) {
    check_bytes(row_of(got, rank), std::as_bytes(std::span(world.rank(rank).eplb)),
                "eplb statistics of rank " + std::to_string(rank));
  }
}

// Tensors for every member of a result, larger than needed where the layout has a free number of rows.
class CallerTensors {
 public:
  CallerTensors(const Communication& communication, const World& world, const ExpectedDispatch& expected) {
    const bool blocks = communication.contract().output_layout == OutputLayout::kRankMajor;
    rows_ = blocks
                ? std::vector<std::int64_t>{communication.num_ranks(), expected.total_rows / communication.num_ranks()}
                : std::vector<std::int64_t>{expected.total_rows + 3};
    const RankData& data = world.rank(communication.rank());
    members_.hidden_states = add(data.hidden.dtype, data.hidden.columns);
    members_.hidden_states_scale = add(data.scale.dtype, data.scale.columns);
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

void prepare_expert_output(Communication& communication,
                           const World& world,
                           const RoundPlan& plan,
                           const Handle& handle,
                           CombineTensors& tensors) {
  const Contract& contract = communication.contract();
  const ExpectedDispatch expected = expect_dispatch(world, communication.rank(), layout_rule(communication, plan));
  const std::int64_t hidden = world.spec.params.hidden_size;
  TensorView view;
  if (plan.zero_copy) view = communication.combine_input(handle, plan.expert_dtype);
  tensors.in_window = view.defined();
  if (!tensors.in_window) {
    std::vector<std::int64_t> shape{expected.total_rows, hidden};
    if (contract.output_layout == OutputLayout::kRankMajor && !plan.flat_expert_output) {
      shape = {communication.num_ranks(), expected.total_rows / communication.num_ranks(), hidden};
    }
    tensors.expert_output =
        Tensor(plan.expert_dtype, shape, {.padding_elements = plan.strided ? 5 : 0, .poison = kNanPoison});
    view = tensors.expert_output.view();
  }
  check_eq(num_flat_rows(view), expected.total_rows, "rows of combine's input");
  fill_expert_output(view, world, expected, plan, communication.rank());
  tensors.expert_output.remember();
  tensors.input.expert_output = view;
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

CombineRule combine_rule(const Communication& communication, const RoundPlan& plan) {
  return {.layout = layout_rule(communication, plan),
          .experts = {.seed = plan.seed, .dtype = plan.expert_dtype, .specials = plan.special_values},
          .output_dtype = plan.output_dtype,
          .low_precision = uses_low_precision(communication),
          .num_biases = plan.num_biases,
          .bias_rank = communication.rank()};
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

void check_result(const Communication& communication,
                  const World& world,
                  const RoundPlan& plan,
                  const DispatchResult& result,
                  bool with_ids) {
  const Contract& contract = communication.contract();
  const ExpectedDispatch expected = expect_dispatch(world, communication.rank(), layout_rule(communication, plan));
  check_member(world, expected, result.hidden_states, &RankData::hidden, "hidden states");
  check_member(world, expected, result.hidden_states_scale, &RankData::scale, "scales");
  check_member(world, expected, result.router_logits, &RankData::router_logits, "router logits");
  check_extras(world, expected, result);
  check_eplb(world, result.eplb_gathered_stats);
  if (with_ids) {
    check_ids(world, expected, result.topk_ids, communication.rank(), contract);
    check_weights(world, expected, result.topk_weights, communication.rank(), contract);
  }
  check_counts(expected, result.counts, contract, plan, with_ids);
  if (contract.output_layout == OutputLayout::kRankMajor) {
    const std::int64_t tokens = layout_rule(communication, plan).tokens_per_rank;
    check_eq(result.counts.tokens_per_rank, tokens, "counts.tokens_per_rank");
    check_eq(result.hidden_states.num_dims, 3, "dimensions of rank-major rows");
    check_eq(result.hidden_states.shape[0], std::int64_t{communication.num_ranks()}, "blocks");
    check_eq(result.hidden_states.shape[1], tokens, "rows of a block");
  }
  check(result.handle.valid() || !with_ids, "dispatch gave no handle");
}

void dispatch_and_check(Communication& communication,
                        const World& world,
                        const RoundPlan& plan,
                        DispatchResult& result) {
  const int rank = communication.rank();
  const RankTensors tensors(world, rank, plan.strided);
  const ExpectedDispatch expected = expect_dispatch(world, rank, layout_rule(communication, plan));
  const CallerTensors caller(communication, world, expected);
  std::vector<std::int64_t> num_tokens;
  for (const RankData& data : world.ranks)
    num_tokens.push_back(data.num_tokens);
  DispatchOptions options;
  if (plan.tell_num_tokens) options.num_tokens_per_rank = num_tokens;
  if (plan.caller_tensors) options.into = caller.members();
  options.runtime_max_tokens_per_rank = plan.runtime_max_tokens;
  options.num_worst_tokens = plan.num_worst_tokens;
  options.expert_alignment = plan.expert_alignment;
  check_ok(communication.dispatch(tensors.input(), options, result), "dispatch");
  check_result(communication, world, plan, result);
  tensors.check_unchanged();
  if (plan.caller_tensors) caller.check_used(result);
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
  const Status status = communication.combine(handle, tensors.input, tensors.options, output);
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
