// SPDX-License-Identifier: Apache-2.0
#include "cli/contract_table.h"

namespace tokenyard::cli {

nlohmann::ordered_json contract_fields(const Contract& contract) {
  // A structured binding, so that a field added to Contract and forgotten here does not compile.
  const auto& [output_layout, id_space, invalid_id_configurable, weights_applied_by, combine_reduces, counts_on,
               handle_use, output_ownership, max_in_flight, capturable, num_experts_multiple_of, takes_topk_ids,
               topk_ids_required, takes_router_logits, takes_extra_payloads, takes_eplb_stats, takes_runtime_max_tokens,
               takes_num_worst_tokens, takes_num_tokens_per_rank, takes_expert_alignment, takes_bias, returns_weights,
               gives_combine_input, takes_cast, takes_receive_statistics, grows, takes_turns] = contract;
  return {{"output_layout", tokenyard::name(output_layout)},
          {"id_space", tokenyard::name(id_space)},
          {"invalid_id_configurable", invalid_id_configurable},
          {"weights_applied_by", tokenyard::name(weights_applied_by)},
          {"combine_reduces", tokenyard::name(combine_reduces)},
          {"counts_on", tokenyard::name(counts_on)},
          {"handle_use", tokenyard::name(handle_use)},
          {"output_ownership", tokenyard::name(output_ownership)},
          {"max_in_flight", max_in_flight},
          {"capturable", capturable},
          {"num_experts_multiple_of", num_experts_multiple_of},
          {"takes_topk_ids", takes_topk_ids},
          {"topk_ids_required", topk_ids_required},
          {"takes_router_logits", takes_router_logits},
          {"takes_extra_payloads", takes_extra_payloads},
          {"takes_eplb_stats", takes_eplb_stats},
          {"takes_runtime_max_tokens", takes_runtime_max_tokens},
          {"takes_num_worst_tokens", takes_num_worst_tokens},
          {"takes_num_tokens_per_rank", takes_num_tokens_per_rank},
          {"takes_expert_alignment", takes_expert_alignment},
          {"takes_bias", takes_bias},
          {"returns_weights", returns_weights},
          {"gives_combine_input", gives_combine_input},
          {"takes_cast", takes_cast},
          {"takes_receive_statistics", takes_receive_statistics},
          {"grows", grows},
          {"takes_turns", takes_turns}};
}

std::string table_cell(const nlohmann::ordered_json& value) {
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string_view name(Support::State state) {
  switch (state) {
    case Support::State::kUsable:
      return "usable";
    case Support::State::kUnusable:
      return "unusable";
    case Support::State::kUndetermined:
      break;
  }
  return "undetermined";
}

}  // namespace tokenyard::cli
