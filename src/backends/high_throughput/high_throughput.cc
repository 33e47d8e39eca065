// SPDX-License-Identifier: Apache-2.0
// Compact rows ordered by (source rank, token), local ids, cached handles (the seed's DeepEPHTAll2AllManager).
#include <array>

#include "tokenyard/error.h"

#include "communication/backend.h"

namespace tokenyard::registry {
namespace {

communication::Plan plan(const MoeParams& params, const BackendConfig& config, int num_ranks) {
  const auto& own = std::get<HighThroughputConfig>(config);
  if (own.max_num_sms < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "HighThroughputConfig::max_num_sms is " + std::to_string(own.max_num_sms) + "; it must be at least 1");
  }
  if (own.buffer_bytes < 0) {
    throw Error(ErrorCode::kInvalidArgument, "HighThroughputConfig::buffer_bytes is " +
                                                 std::to_string(own.buffer_bytes) + "; it must not be negative");
  }
  communication::Plan plan;
  plan.one_host = own.intra_host_only;
  plan.max_num_sms = own.max_num_sms;
  plan.spec = {.placement = protocol::Placement::kCompact, .ids = protocol::IdView::kLocal, .weights_back = true};
  plan.shape = communication::base_shape(params, plan.spec.placement, num_ranks);
  plan.shape.weights_row_bytes = std::int64_t{params.top_k} * 4;
  plan.shape.budget_bytes = own.buffer_bytes;
  return plan;
}

communication::Fields fields(const BackendConfig& config) {
  const auto& own = std::get<HighThroughputConfig>(config);
  return {{"HighThroughputConfig::max_num_sms", std::to_string(own.max_num_sms)},
          {"HighThroughputConfig::buffer_bytes", std::to_string(own.buffer_bytes)},
          {"HighThroughputConfig::intra_host_only", own.intra_host_only ? "true" : "false"}};
}

std::int64_t byte_budget(const BackendConfig& config) {
  return std::get<HighThroughputConfig>(config).buffer_bytes;
}

constexpr std::array<std::string_view, 1> kAliases{"deepep_high_throughput"};

}  // namespace

const communication::Backend& high_throughput();

const communication::Backend& high_throughput() {
  static const communication::Backend backend{
      .info = {.name = "high_throughput",
               .seed_class = "DeepEPHTAll2AllManager",
               .aliases = kAliases,
               .use_when = "many tokens (prefill, training): no padding, counts on the host, handles that replay",
               .contract = {.output_layout = OutputLayout::kCompact,
                            .id_space = IdSpace::kLocal,
                            .weights_applied_by = WeightRule::kCaller,
                            .combine_reduces = Reduction::kSumOverRanks,
                            .counts_on = CountsOn::kHost,
                            .handle_use = HandleUse::kReplay,
                            .output_ownership = Ownership::kViewOrOwned,
                            .max_in_flight = 1,
                            .takes_topk_ids = true,
                            .topk_ids_required = true,
                            .takes_num_worst_tokens = true,
                            .takes_expert_alignment = true,
                            .takes_bias = true,
                            .returns_weights = true,
                            .gives_combine_input = true},
               .default_config = HighThroughputConfig{},
               .unusable_reason = {}},
      .plan = plan,
      .fields = fields,
      .byte_budget = byte_budget,
  };
  return backend;
}

}  // namespace tokenyard::registry
