// SPDX-License-Identifier: Apache-2.0
#include "fuzz/dispatch_call.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace tokenyard::fuzz {
namespace {

// Draws a member, and notes when it is wrong.
class MemberDraw {
 public:
  MemberDraw(Input& input, bool& wrong) : input_(input), wrong_(wrong) {}

  void operator()(Drawn& drawn, TensorView& member, const Wanted& wanted) {
    drawn = draw_tensor(input_, wanted);
    take(drawn, member);
  }

  void list(Drawn& drawn, TensorView& member, Dtype dtype, std::int64_t entries) {
    drawn = draw_list(input_, dtype, entries);
    take(drawn, member);
  }

 private:
  void take(const Drawn& drawn, TensorView& member) {
    member = drawn.view;
    wrong_ = wrong_ || drawn.wrong;
  }

  Input& input_;
  bool& wrong_;
};

// Ids that are experts or -1, so that the other arguments are looked at; one now and then is not.
void put_ids(Input& input, const MoeParams& params, Drawn& ids) {
  const TensorView& view = ids.view;
  const bool takes_ids = view.dtype == Dtype::kI32 || view.dtype == Dtype::kI64;
  if (ids.wrong || !takes_ids || view.num_dims != 2 || ids.memory.empty()) return;
  const auto element = static_cast<std::size_t>(size_of(view.dtype));
  for (std::int64_t row = 0; row < view.shape[0]; ++row) {
    for (std::int64_t slot = 0; slot < view.shape[1]; ++slot) {
      std::int64_t id = input.below(params.num_experts + 1) - 1;
      if (input.below(64) == 1) id = input.hostile<std::int64_t>();
      const auto at = static_cast<std::size_t>(row * view.strides[0] + slot * view.strides[1]) * element;
      if (at + element <= ids.memory.size()) std::memcpy(ids.memory.data() + at, &id, element);
    }
  }
}

// Whether a member is given: what the contract has no use for is rare, because it hides everything else.
bool is_given(Input& input, bool taken) {
  return taken ? input.below(3) == 1 : input.below(64) == 63;
}

// In [0, most], or a hostile number now and then.
std::int64_t draw_number(Input& input, std::int64_t most) {
  return input.below(4) == 3 ? input.hostile<std::int64_t>() : input.below(most + 1);
}

void draw_options(Input& input, const Contract& contract, Call& call, std::int64_t tokens) {
  DispatchOptions& options = call.options;
  if (is_given(input, contract.takes_runtime_max_tokens)) {
    options.runtime_max_tokens_per_rank = draw_number(input, kMaxTokens);
  }
  if (is_given(input, contract.takes_num_worst_tokens)) options.num_worst_tokens = draw_number(input, kMaxTokens);
  if (is_given(input, contract.takes_expert_alignment)) {
    options.expert_alignment = input.flip() ? static_cast<int>(1 + input.below(128)) : input.hostile<int>();
  }
  if (is_given(input, contract.takes_num_tokens_per_rank)) {
    call.numbers.assign(input.below(8) == 7 ? 2 : 1, input.below(4) == 3 ? input.hostile<std::int64_t>() : tokens);
    options.num_tokens_per_rank = call.numbers;
  }
  if (input.below(16) == 15) options.num_sms = input.hostile<int>();
  if (input.below(64) == 63) {
    options.replay = &call.dead;  // of no dispatch
    call.wrong = true;
  }
  if (is_given(input, contract.takes_cast)) {
    options.cast = static_cast<DispatchCast>(input.below(5));
    call.wrong = call.wrong || options.cast > DispatchCast::kFp8Block128Ue8m0;
  }
}

void draw_extras(Input& input, Call& call, std::int64_t tokens) {
  call.extras.resize(static_cast<std::size_t>(input.below(4) == 3 ? input.below(20) : 1));
  for (Drawn& extra : call.extras) {
    extra = draw_tensor(input, {static_cast<Dtype>(input.below(9)), tokens, input.below(5)});
    call.wrong = call.wrong || extra.wrong;
    call.extra_views.push_back(extra.view);
  }
  call.input.extra_payloads = call.extra_views;
}

// Blocks of the result, 0 when it has none, and the rows that they have together at most.
std::int64_t blocks_of(const Communication& communication) {
  const OutputLayout layout = communication.contract().output_layout;
  if (layout == OutputLayout::kExpertMajor) return communication.params().num_experts;
  return layout == OutputLayout::kRankMajor ? 1 : 0;
}

void draw_into(Input& input, const Communication& communication, Call& call) {
  const std::int64_t blocks = blocks_of(communication);
  Wanted wanted{call.input.hidden_states.dtype, 0, communication.params().hidden_size};
  if (call.options.cast != DispatchCast::kNone) wanted.dtype = Dtype::kF8e4m3;
  wanted.rows = std::max<std::int64_t>(blocks, 1) * kMaxTokens + 1 - input.below(3);
  if (blocks > 0 && input.flip()) {
    wanted.blocks = blocks;
    wanted.rows = kMaxTokens + input.below(2);
  }
  MemberDraw(input, call.wrong)(call.into_hidden, call.into.hidden_states, wanted);
  call.options.into = &call.into;
}

}  // namespace

void draw_call(Input& input, const Communication& communication, Call& call) {
  const MoeParams& params = communication.params();
  const Contract& contract = communication.contract();
  const bool quantised = params.dispatch_format != DispatchFormat::kNone && input.flip();
  const std::int64_t tokens = input.below(16) == 15 ? kMaxTokens + 1 : input.below(kMaxTokens + 1);
  MemberDraw draw(input, call.wrong);
  draw(call.hidden, call.input.hidden_states, {quantised ? Dtype::kF8e4m3 : params.dtype, tokens, params.hidden_size});
  if (input.below(16) != 15) {
    draw(call.ids, call.input.topk_ids, {input.flip() ? Dtype::kI64 : Dtype::kI32, tokens, params.top_k});
    put_ids(input, params, call.ids);
  }
  if (is_given(input, true)) draw(call.weights, call.input.topk_weights, {Dtype::kF32, tokens, params.top_k});
  if (quantised) draw(call.scale, call.input.hidden_states_scale, {Dtype::kF32, tokens, 1});
  if (is_given(input, contract.takes_router_logits)) {
    draw(call.logits, call.input.router_logits, {Dtype::kF32, tokens, params.num_experts});
  }
  if (is_given(input, contract.takes_eplb_stats)) {
    draw.list(call.stats, call.input.eplb_local_stats, Dtype::kI32, params.num_experts);
  }
  if (is_given(input, contract.takes_extra_payloads)) draw_extras(input, call, tokens);
  draw_options(input, contract, call, tokens);
  if (is_given(input, contract.takes_receive_statistics)) {
    draw.list(call.routes, call.options.routes_per_expert, Dtype::kI32, params.num_experts);
    draw.list(call.waits, call.options.wait_per_source, Dtype::kI64, 1);
  }
  if (is_given(input, true)) draw_into(input, communication, call);
}

void draw_combine(Input& input,
                  const Communication& communication,
                  const Call& call,
                  const DispatchResult& result,
                  CombineCall& combine) {
  const MoeParams& params = communication.params();
  const std::int64_t tokens = call.input.hidden_states.shape[0];
  constexpr std::array kDtypes{Dtype::kBf16, Dtype::kF16, Dtype::kF32};
  Wanted wanted{input.pick(kDtypes), 0, params.hidden_size};
  wanted.blocks = input.below(4) == 3 ? 0 : blocks_of(communication);
  const std::int64_t of_block = result.counts.tokens_per_rank > 0 ? result.counts.tokens_per_rank : kMaxTokens;
  wanted.rows = wanted.blocks > 0              ? of_block
                : blocks_of(communication) > 0 ? of_block * blocks_of(communication)
                                               : result.hidden_states.shape[0];
  MemberDraw draw(input, combine.wrong);
  draw(combine.rows, combine.input.expert_output, wanted);
  const bool late = communication.contract().weights_applied_by == WeightRule::kCombine && !call.weights.view.defined();
  if (late != (input.below(16) == 15)) {
    draw(combine.weights, combine.input.topk_weights, {Dtype::kF32, tokens, params.top_k});
  }
  TensorView output;
  draw(combine.output, output, {input.pick(kDtypes), tokens, params.hidden_size});
}

}  // namespace tokenyard::fuzz
