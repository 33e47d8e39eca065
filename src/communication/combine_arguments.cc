// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "tokenyard/error.h"

#include "communication/arguments.h"
#include "protocol/formats.h"

namespace tokenyard::communication {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void check_hidden(const Limits& limits, const TensorView& rows, std::string_view what) {
  if (!protocol::is_wide_float(rows.dtype)) {
    refuse(std::string(what) + " is " + rows.describe() + "; its dtype must be bf16, f16 or f32");
  }
  const std::int64_t hidden = rows.shape[static_cast<std::size_t>(rows.num_dims - 1)];
  const bool narrower = limits.narrower_rows && hidden > 0 && hidden < limits.params.hidden_size;
  if (hidden == limits.params.hidden_size || narrower) return;
  refuse(std::string(what) + " is " + rows.describe() + "; rows of hidden_size " +
         std::to_string(limits.params.hidden_size) + (limits.narrower_rows ? " or less" : "") + " are expected");
}

void check_shape_in_blocks(const TensorView& rows, const Route& route) {
  if (rows.shape[0] == route.num_blocks && rows.shape[1] == route.rows_per_block) return;
  refuse("expert_output is " + rows.describe() + "; it must be [" + std::to_string(route.num_blocks) + ", " +
         std::to_string(route.rows_per_block) + ", hidden] or the same rows in two dimensions");
}

void check_expert_output(const Limits& limits, const TensorView& rows, const Route& route) {
  if (!rows.defined()) refuse("expert_output is not given");
  const bool blocks = protocol::space_per_source(limits.plan.spec.placement);
  if (rows.num_dims == 3 && blocks) {
    check_shape_in_blocks(rows, route);
    check_blocks(limits, rows, "expert_output");
  } else {
    if (rows.num_dims != 2) refuse("expert_output is " + rows.describe() + "; it must be [rows, hidden]");
    std::int64_t right = std::min(route.round.num_rows, route.round.row_limit);
    if (blocks) right = route.num_blocks * route.rows_per_block;
    // With num_worst_tokens the tail may be handed back as well.
    check_rows(limits, rows, "expert_output", rows.shape[0] == route.rows_shown ? route.rows_shown : right);
  }
  check_hidden(limits, rows, "expert_output");
}

void check_weight_rows(const Limits& limits, const TensorView& weights, std::string_view what, std::int64_t num_rows) {
  if (weights.num_dims != 2 || weights.shape[1] != limits.params.top_k || weights.dtype != Dtype::kF32) {
    refuse(std::string(what) + " is " + weights.describe() +
           "; it must be f32[rows, top_k = " + std::to_string(limits.params.top_k) + "]");
  }
  check_rows(limits, weights, what, num_rows);
}

// Weights to bring back.
void check_weights(const Limits& limits, const TensorView& weights, std::string_view what, std::int64_t num_rows) {
  if (!limits.backend->info.contract.returns_weights) {
    refuse("`" + std::string(limits.backend->info.name) + "` brings no weights back; leave " + std::string(what) +
           " out");
  }
  check_weight_rows(limits, weights, what, num_rows);
}

// Weights to weigh with: once, at dispatch or here.
void check_own_weights(const Limits& limits, const TensorView& weights, const Route& route) {
  if (route.round.experts.has_weights) {
    if (weights.defined()) refuse("topk_weights were given at dispatch; leave CombineInput::topk_weights out");
    return;
  }
  if (!weights.defined()) {
    refuse("topk_weights were given neither at dispatch nor here; `" + std::string(limits.backend->info.name) +
           "` weighs expert output with them");
  }
  check_weight_rows(limits, weights, "CombineInput::topk_weights", route.round.num_tokens);
}

}  // namespace

engine::CombineRequest prepare_combine(const Limits& limits, const CombineInput& input, const Route& route) {
  check_tensor(input.expert_output, "expert_output");
  check_tensor(input.topk_weights, "CombineInput::topk_weights");
  check_expert_output(limits, input.expert_output, route);
  if (protocol::by_expert(limits.plan.spec.placement)) {
    check_own_weights(limits, input.topk_weights, route);
  } else if (input.topk_weights.defined()) {
    check_weights(limits, input.topk_weights, "CombineInput::topk_weights", input.expert_output.shape[0]);
  }
  return {.expert_output = input.expert_output, .topk_weights = input.topk_weights};
}

void check_output(const Limits& limits, const TensorView& output, const Route& route) {
  check_tensor(output, "output");
  if (!output.defined()) refuse("output is not given; it must be [num_tokens, hidden]");
  if (output.num_dims != 2) refuse("output is " + output.describe() + "; it must be [num_tokens, hidden]");
  check_rows(limits, output, "output", route.round.num_tokens);
  check_hidden(limits, output, "output");
  if (output.shape[1] == route.combine_width) return;
  refuse("output is " + output.describe() + " and the rows of expert_output have " +
         std::to_string(route.combine_width) + " elements; their widths must agree");
}

engine::CombineTarget prepare_target(const Limits& limits,
                                     const CombineInput& input,
                                     const CombineOptions& options,
                                     const Route& route) {
  engine::CombineTarget target;
  for (std::size_t i = 0; i < input.bias.size(); ++i) {
    const TensorView& bias = input.bias[i];
    check_tensor(bias, "bias");
    if (!bias.defined()) continue;
    if (!limits.backend->info.contract.takes_bias) {
      refuse("`" + std::string(limits.backend->info.name) + "` takes no bias; leave it out");
    }
    if (bias.num_dims != 2) refuse("bias is " + bias.describe() + "; it must be [num_tokens, hidden]");
    check_rows(limits, bias, "bias", route.round.num_tokens);
    check_hidden(limits, bias, "bias");
    target.bias[i] = bias;
  }
  check_tensor(options.topk_weights_output, "topk_weights_output");
  if (options.topk_weights_output.defined()) {
    if (!input.topk_weights.defined()) refuse("topk_weights_output is given and CombineInput::topk_weights is not");
    check_weights(limits, options.topk_weights_output, "topk_weights_output", route.round.num_tokens);
    target.topk_weights = options.topk_weights_output;
  }
  return target;
}

void check_bias_dtypes(const engine::CombineTarget& target) {
  for (const TensorView& bias : target.bias) {
    if (!bias.defined() || bias.dtype == target.output.dtype) continue;
    refuse("bias is " + bias.describe() + " and output is " + target.output.describe() + "; their dtypes must agree");
  }
}

}  // namespace tokenyard::communication
