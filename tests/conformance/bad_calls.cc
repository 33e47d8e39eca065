// SPDX-License-Identifier: Apache-2.0
#include "conformance/bad_calls.h"

#include <cstring>

#include "support/backends.h"

namespace tokenyard::support {
namespace {

// The rank's own ids with the one of token 1, slot 2 replaced.
void set_one_id(BadDispatch& call, std::int64_t id) {
  const WorldSpec& spec = call.world->spec;
  std::vector<std::int64_t> ids = call.world->rank(call.rank).ids;
  ids[static_cast<std::size_t>(spec.params.top_k) + 2] = id;
  const TensorView view = call.add(Dtype::kI64, {call.num_tokens(), spec.params.top_k});
  call.storage.back().fill(id_bytes(ids, Dtype::kI64));
  call.input.topk_ids = view;
}

std::vector<BadDispatchCase> make_shape_cases() {
  return {
      {.name = "rows_of_another_dtype",
       .message_parts = {"f32", "bf16"},
       .spoil =
           [](BadDispatch& call) {
             call.input.hidden_states = call.add(Dtype::kF32, {call.num_tokens(), 24});
           }},
      {.name = "rows_too_wide",
       .message_parts = {"25", "24"},
       .spoil =
           [](BadDispatch& call) {
             call.input.hidden_states = call.add(Dtype::kBf16, {call.num_tokens(), 25});
           }},
      {.name = "rows_with_one_dimension",
       .message_parts = {"bf16[6]"},
       .spoil =
           [](BadDispatch& call) {
             void* data = call.input.hidden_states.data;
             call.input.hidden_states = TensorView(data, Dtype::kBf16, {call.num_tokens()});
           }},
      {.name = "last_dimension_strided",
       .message_parts = {"2"},
       .spoil =
           [](BadDispatch& call) {
             TensorView wide = call.add(Dtype::kBf16, {call.num_tokens(), 48});
             wide.shape[1] = 24;
             wide.strides[1] = 2;
             call.input.hidden_states = wide;
           }},
      {.name = "more_tokens_than_capacity",
       .code = ErrorCode::kCapacity,
       .message_parts = {"7", "6"},
       .spoil =
           [](BadDispatch& call) {
             call.input.hidden_states = call.add(Dtype::kBf16, {7, 24});
             call.input.topk_weights = call.add(Dtype::kF32, {7, 4});
             call.input.topk_ids = call.add(Dtype::kI32, {7, 4});
             call.storage.back().fill(id_bytes(std::vector<std::int64_t>(28, 0), Dtype::kI32));
           }},
      {.name = "rows_without_memory",
       .message_parts = {"hidden_states"},
       .spoil = [](BadDispatch& call) { call.input.hidden_states.data = nullptr; }},
      {.name = "rows_on_a_gpu",
       .message_parts = {"hidden_states"},
       .spoil = [](BadDispatch& call) { call.input.hidden_states.device.kind = DeviceKind::kCuda; }},
      {.name = "weights_of_fewer_tokens",
       .message_parts = {"5", "6"},
       .spoil =
           [](BadDispatch& call) {
             call.input.topk_weights = call.add(Dtype::kF32, {5, 4});
           }},
      {.name = "weights_of_integers",
       .message_parts = {"i32"},
       .spoil =
           [](BadDispatch& call) {
             call.input.topk_weights = call.add(Dtype::kI32, {6, 4});
           }},
  };
}

std::vector<BadDispatchCase> make_id_cases() {
  std::vector<BadDispatchCase> cases{
      {.name = "ids_of_floats",
       .message_parts = {"f32", "i32"},
       .spoil =
           [](BadDispatch& call) {
             call.input.topk_ids = call.add(Dtype::kF32, {6, 4});
           }},
      {.name = "ids_of_another_top_k",
       .message_parts = {"2", "4"},
       .spoil =
           [](BadDispatch& call) {
             call.input.topk_ids = call.add(Dtype::kI32, {6, 2});
             call.storage.back().fill(id_bytes(std::vector<std::int64_t>(12, 0), Dtype::kI32));
           }},
      {.name = "ids_of_fewer_tokens",
       .message_parts = {"5", "6"},
       .spoil =
           [](BadDispatch& call) {
             call.input.topk_ids = call.add(Dtype::kI32, {5, 4});
             call.storage.back().fill(id_bytes(std::vector<std::int64_t>(20, 0), Dtype::kI32));
           }},
      {.name = "ids_missing",
       .message_parts = {"topk_ids"},
       .spoil = [](BadDispatch& call) { call.input.topk_ids = {}; },
       .applies = [](const Contract& contract) { return contract.topk_ids_required; }},
  };
  for (const std::int64_t id : {std::int64_t{4}, std::int64_t{-2}, (std::int64_t{1} << 31) - 1,
                                -(std::int64_t{1} << 31), std::int64_t{1} << 32}) {
    cases.push_back(
        {.name = "id_out_of_range_" + std::string(id < 0 ? "minus_" : "") + std::to_string(id < 0 ? -id : id),
         .message_parts = {std::to_string(id), "1", "2"},
         .spoil = [id](BadDispatch& call) { set_one_id(call, id); },
         .applies = routes});
  }
  return cases;
}

// Members and options that only some contracts use.
std::vector<BadDispatchCase> make_member_cases() {
  return {
      {.name = "unused_router_logits",
       .message_parts = {"router_logits"},
       .spoil =
           [](BadDispatch& call) {
             call.input.router_logits = call.add(Dtype::kF32, {6, 3});
           },
       .applies = [](const Contract& contract) { return !contract.takes_router_logits; }},
      {.name = "unused_statistics",
       .message_parts = {"eplb_local_stats"},
       .spoil =
           [](BadDispatch& call) {
             call.input.eplb_local_stats = TensorView(call.add(Dtype::kI32, {1, 3}).data, Dtype::kI32, {3});
           },
       .applies = [](const Contract& contract) { return !contract.takes_eplb_stats; }},
      {.name = "unused_extra_payload",
       .message_parts = {"extra_payloads"},
       .spoil =
           [](BadDispatch& call) {
             call.extras = {call.add(Dtype::kU8, {6, 4})};
             call.input.extra_payloads = call.extras;
           },
       .applies = [](const Contract& contract) { return !contract.takes_extra_payloads; }},
      {.name = "extra_payload_beyond_its_room",
       .code = ErrorCode::kCapacity,
       .message_parts = {"5000"},
       .spoil =
           [](BadDispatch& call) {
             call.extras = {call.add(Dtype::kU8, {6, 5000})};
             call.input.extra_payloads = call.extras;
           },
       .applies = [](const Contract& contract) { return contract.takes_extra_payloads; }},
      {.name = "unused_runtime_max_tokens",
       .message_parts = {"runtime_max_tokens_per_rank"},
       .spoil = [](BadDispatch& call) { call.options.runtime_max_tokens_per_rank = 6; },
       .applies = [](const Contract& contract) { return !contract.takes_runtime_max_tokens; }},
      {.name = "unused_worst_tokens",
       .message_parts = {"num_worst_tokens"},
       .spoil = [](BadDispatch& call) { call.options.num_worst_tokens = 6; },
       .applies = [](const Contract& contract) { return !contract.takes_num_worst_tokens; }},
      {.name = "unused_tokens_per_rank",
       .message_parts = {"num_tokens_per_rank"},
       .spoil =
           [](BadDispatch& call) {
             call.numbers = {6, 6, 6};
             call.options.num_tokens_per_rank = call.numbers;
           },
       .applies = [](const Contract& contract) { return !contract.takes_num_tokens_per_rank; }},
      {.name = "unused_expert_alignment",
       .message_parts = {"expert_alignment"},
       .spoil = [](BadDispatch& call) { call.options.expert_alignment = 4; },
       .applies = [](const Contract& contract) { return !contract.takes_expert_alignment; }},
      {.name = "alignment_of_zero",
       .message_parts = {"expert_alignment", "0"},
       .spoil = [](BadDispatch& call) { call.options.expert_alignment = 0; },
       .applies = [](const Contract& contract) { return contract.takes_expert_alignment; }},
      {.name = "runtime_max_below_own_tokens",
       .message_parts = {"5", "6"},
       .spoil = [](BadDispatch& call) { call.options.runtime_max_tokens_per_rank = 5; },
       .applies = [](const Contract& contract) { return contract.takes_runtime_max_tokens; }},
      {.name = "own_entry_of_tokens_per_rank",
       .message_parts = {"5", "6"},
       .spoil =
           [](BadDispatch& call) {
             call.numbers = {6, 5, 6};
             call.options.num_tokens_per_rank = call.numbers;
           },
       .applies = [](const Contract& contract) { return contract.takes_num_tokens_per_rank; }},
      {.name = "tokens_per_rank_of_fewer_ranks",
       .message_parts = {"2", "3"},
       .spoil =
           [](BadDispatch& call) {
             call.numbers = {6, 6};
             call.options.num_tokens_per_rank = call.numbers;
           },
       .applies = [](const Contract& contract) { return contract.takes_num_tokens_per_rank; }},
      {.name = "tokens_per_rank_beyond_the_most",
       .message_parts = {"1048576", "rank 2"},
       .spoil =
           [](BadDispatch& call) {
             call.numbers = {6, 6, 1 << 20};
             call.options.num_tokens_per_rank = call.numbers;
           },
       .applies = [](const Contract& contract) { return contract.takes_num_tokens_per_rank; }},
      {.name = "unused_cast",
       .message_parts = {"cast"},
       .spoil = [](BadDispatch& call) { call.options.cast = DispatchCast::kFp8Block128; },
       .applies = [](const Contract& contract) { return !contract.takes_cast; }},
      {.name = "cast_of_rows_with_scales",
       .message_parts = {"cast", "hidden_states_scale"},
       .spoil =
           [](BadDispatch& call) {
             call.options.cast = DispatchCast::kFp8Block128;
             call.input.hidden_states_scale = call.add(Dtype::kF32, {6, 1});
           },
       .applies = [](const Contract& contract) { return contract.takes_cast; }},
      {.name = "unused_receive_statistics",
       .message_parts = {"wait_per_source"},
       .spoil =
           [](BadDispatch& call) {
             call.options.wait_per_source = TensorView(call.add(Dtype::kI64, {1, 3}).data, Dtype::kI64, {3});
           },
       .applies = [](const Contract& contract) { return !contract.takes_receive_statistics; }},
      {.name = "receive_statistics_of_other_ranks",
       .message_parts = {"wait_per_source", "3"},
       .spoil =
           [](BadDispatch& call) {
             call.options.wait_per_source = TensorView(call.add(Dtype::kI64, {1, 4}).data, Dtype::kI64, {4});
           },
       .applies = [](const Contract& contract) { return contract.takes_receive_statistics; }},
      {.name = "negative_num_sms",
       .message_parts = {"-1"},
       .spoil = [](BadDispatch& call) { call.options.num_sms = -1; }},
  };
}

}  // namespace

TensorView BadDispatch::add(Dtype dtype, std::vector<std::int64_t> shape) {
  return storage.emplace_back(dtype, std::move(shape)).view();
}

const std::vector<BadDispatchCase>& bad_dispatches() {
  static const std::vector<BadDispatchCase> kCases = [] {
    std::vector<BadDispatchCase> all = make_shape_cases();
    for (const auto& part : {make_id_cases(), make_member_cases()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return kCases;
}

}  // namespace tokenyard::support
