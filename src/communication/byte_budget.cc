// SPDX-License-Identifier: Apache-2.0
#include "communication/byte_budget.h"

#include <algorithm>
#include <limits>
#include <string>

#include "tokenyard/error.h"

#include "communication/handle.h"

namespace tokenyard::communication {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// Rows are counted in 32 bits.
int most_tokens(int num_ranks) {
  return std::numeric_limits<std::int32_t>::max() / num_ranks;
}

int experts_of_call(const MoeParams& made_with, int given, const Route* replay) {
  const int known = replay != nullptr ? replay->limits.params.num_experts : made_with.num_experts;
  if (given < 0) refuse("num_experts is " + std::to_string(given) + "; it must be positive");
  if (given == 0 && known == 0) {
    refuse("num_experts is not given; this communication was made from a byte budget, so each call must say it");
  }
  if (replay != nullptr && given != 0 && given != known) {
    refuse("num_experts is " + std::to_string(given) + " and the replayed handle's route is of " +
           std::to_string(known));
  }
  return given != 0 ? given : known;
}

int top_k_of(const TensorView& ids) {
  if (!ids.defined()) refuse("topk_ids is not given");
  if (ids.num_dims != 2) refuse("topk_ids is " + ids.describe() + "; it must be [num_tokens, top_k]");
  if (ids.shape[1] >= 1 && ids.shape[1] <= kMaxTopK) return static_cast<int>(ids.shape[1]);
  refuse("topk_ids is " + ids.describe() + "; its top_k must be in [1, " + std::to_string(kMaxTopK) + "]");
}

// Elements of the widest row that combine may have for rows dispatched like this.
int hidden_of(const TensorView& rows) {
  if (!rows.defined()) return 1;  // refused with the other members
  if (rows.num_dims != 2) refuse("hidden_states is " + rows.describe() + "; it must be [num_tokens, row]");
  const std::int64_t values = rows.dtype == Dtype::kU8 ? 2 * rows.shape[1] : rows.shape[1];
  if (values >= 1 && values <= std::numeric_limits<std::int32_t>::max()) return static_cast<int>(values);
  refuse("hidden_states is " + rows.describe() + "; its rows must have at least 1 element and fit 32 bits");
}

void check_invalid_id(const MoeParams& params) {
  if (params.invalid_expert_id < 0 || params.invalid_expert_id >= params.num_experts) return;
  refuse("num_experts is " + std::to_string(params.num_experts) + "; MoeParams::invalid_expert_id = " +
         std::to_string(params.invalid_expert_id) + " must lie outside [0, num_experts)");
}

// Exactly what the call's planes take.
std::int64_t row_capacity(const DispatchInput& input, int top_k, std::int64_t budget) {
  const std::int64_t ids = input.topk_ids.defined() ? top_k * std::int64_t{sizeof(std::int32_t)} : 0;
  std::int64_t bytes = protocol::align_up(ids, protocol::kRowAlignment);
  for (const TensorView* tensor : {&input.hidden_states, &input.hidden_states_scale, &input.topk_weights}) {
    if (!tensor->defined()) continue;
    if (tensor->row_bytes() > budget) {
      throw Error(ErrorCode::kCapacity,
                  "buffer_bytes is " + std::to_string(budget) + " and one row of " + tensor->describe() + " is larger");
    }
    bytes += protocol::align_up(tensor->row_bytes(), protocol::kRowAlignment);
  }
  return bytes;
}

// All ranks know how many tokens each of them has in a route, so a replay may be cut otherwise than its dispatch was
// as long as that is one sub-round.
std::int64_t tokens_per_part(std::int64_t most, const Route* replay) {
  if (replay == nullptr) return most;
  const bool whole = replay->num_parts == 0;
  const std::int64_t needed =
      whole ? *std::ranges::max_element(replay->round.tokens_of) : replay->limits.plan.shape.max_tokens;
  if (needed > most) {
    throw Error(ErrorCode::kCapacity, "the replayed handle's route has sub-rounds of " + std::to_string(needed) +
                                          " tokens and the window has room for " + std::to_string(most) +
                                          " of these rows; dispatch them with ids");
  }
  return whole ? most : needed;
}

}  // namespace

void check_num_experts(const Limits& limits, int given) {
  if (given == 0 || given == limits.params.num_experts) return;
  refuse("num_experts is " + std::to_string(given) + " and this communication was made for " +
         std::to_string(limits.params.num_experts) + "; leave it out");
}

Plan plan_of_budget(const Backend& backend, const Budget& budget, int num_ranks) {
  MoeParams least = budget.made_with;
  if (least.num_experts < 0) {
    refuse("MoeParams::num_experts is " + std::to_string(least.num_experts) + "; it must not be negative");
  }
  least.num_experts = std::max(1, least.num_experts);
  least.top_k = least.hidden_size = least.max_tokens_per_rank = 1;
  least.dispatch_format = DispatchFormat::kNone;
  Plan plan = plan_checked(backend, least, budget.config, num_ranks);
  const std::int64_t needed = protocol::least_budget(plan.shape);
  if (plan.shape.budget_bytes >= needed) return plan;
  refuse("a byte budget of " + std::to_string(plan.shape.budget_bytes) + " is too small for " +
         std::to_string(num_ranks) + " ranks; their control words and one token of each with the smallest row take " +
         std::to_string(needed));
}

Limits limits_of_call(const Limits& now,
                      const Budget& budget,
                      const DispatchInput& input,
                      const DispatchOptions& options,
                      const Route* replay) {
  const TensorView& rows = input.hidden_states;
  const bool wide = protocol::is_wide_float(rows.dtype);
  if (rows.defined() && !wide && !protocol::is_quantised(rows.dtype)) {
    refuse("hidden_states is " + rows.describe() +
           "; its dtype must be bf16, f16 or f32, or f8e4m3, f8e5m2 or u8 for quantised rows");
  }
  Limits call = now;
  call.params = budget.made_with;
  call.params.num_experts = experts_of_call(budget.made_with, options.num_experts, replay);
  call.params.top_k = replay != nullptr ? replay->limits.params.top_k : top_k_of(input.topk_ids);
  call.params.hidden_size = hidden_of(rows);
  if (wide) call.params.dtype = rows.dtype;
  call.params.dispatch_format = DispatchFormat::kNone;
  call.params.max_tokens_per_rank = 1;
  call.narrower_rows = rows.dtype == Dtype::kU8;
  check_invalid_id(call.params);

  call.plan = now.backend->plan(call.params, budget.config, now.num_ranks);
  call.params.max_tokens_per_rank = most_tokens(now.num_ranks);
  protocol::WindowShape& shape = call.plan.shape;
  shape.row_capacity = row_capacity(input, call.params.top_k, shape.budget_bytes);
  shape.tokens_per_chunk = protocol::chunk_tokens(shape.row_capacity);
  const std::int64_t most = protocol::most_tokens_within_budget(shape, most_tokens(now.num_ranks));
  if (most == 0) {
    throw Error(ErrorCode::kCapacity, "buffer_bytes is " + std::to_string(shape.budget_bytes) +
                                          "; with one token of each rank these rows take " +
                                          std::to_string(protocol::least_budget(shape)));
  }
  shape.max_tokens = tokens_per_part(most, replay);
  return call;
}

Limits limits_of_query(const Limits& now, const Budget& budget, const TensorView& topk_ids, int num_experts) {
  Limits query = now;
  query.params.num_experts = experts_of_call(budget.made_with, num_experts, nullptr);
  query.params.top_k = top_k_of(topk_ids);
  query.params.max_tokens_per_rank = most_tokens(now.num_ranks);
  check_invalid_id(query.params);
  return query;
}

}  // namespace tokenyard::communication
