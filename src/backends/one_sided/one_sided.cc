// SPDX-License-Identifier: Apache-2.0
// Rank-major rows for a list of payloads, at addresses that never move (the seed's FlashInferNVLinkOneSidedManager).
#include <array>

#include "tokenyard/error.h"

#include "communication/backend.h"

namespace tokenyard::registry {
namespace {

communication::Plan plan(const MoeParams& params, const BackendConfig& config, int num_ranks) {
  const auto& own = std::get<OneSidedConfig>(config);
  if (own.extra_payload_bytes_per_token < 0) {
    throw Error(ErrorCode::kInvalidArgument, "OneSidedConfig::extra_payload_bytes_per_token is " +
                                                 std::to_string(own.extra_payload_bytes_per_token) +
                                                 "; it must not be negative");
  }
  if (own.eplb_stats_num_experts < 0 || own.eplb_stats_num_experts > params.num_experts) {
    throw Error(ErrorCode::kInvalidArgument, "OneSidedConfig::eplb_stats_num_experts is " +
                                                 std::to_string(own.eplb_stats_num_experts) + "; it must be in [0, " +
                                                 std::to_string(params.num_experts) + "]");
  }
  communication::Plan plan;
  plan.spec = {.placement = protocol::Placement::kRankMajor,
               .ids = protocol::IdView::kGlobal,
               .combine_wire = own.use_low_precision_combine ? protocol::CombineWire::kF8e4m3
                                                             : protocol::CombineWire::kParamsDtype};
  plan.shape = communication::base_shape(params, plan.spec.placement, num_ranks);
  plan.shape.extra_capacity = own.extra_payload_bytes_per_token;
  plan.shape.stats_entries = own.eplb_stats_num_experts;
  return plan;
}

communication::Fields fields(const BackendConfig& config) {
  const auto& own = std::get<OneSidedConfig>(config);
  return {{"OneSidedConfig::extra_payload_bytes_per_token", std::to_string(own.extra_payload_bytes_per_token)},
          {"OneSidedConfig::eplb_stats_num_experts", std::to_string(own.eplb_stats_num_experts)},
          {"OneSidedConfig::use_low_precision_combine", own.use_low_precision_combine ? "true" : "false"}};
}

BackendConfig with_extra_capacity(const BackendConfig& config, std::int64_t extra) {
  OneSidedConfig grown = std::get<OneSidedConfig>(config);
  grown.extra_payload_bytes_per_token = extra;
  return grown;
}

std::int64_t extra_capacity(const BackendConfig& config) {
  return std::get<OneSidedConfig>(config).extra_payload_bytes_per_token;
}

constexpr std::array<std::string_view, 1> kAliases{"flashinfer_nvlink_one_sided"};

}  // namespace

const communication::Backend& one_sided();

const communication::Backend& one_sided() {
  static const communication::Backend backend{
      .info = {.name = "one_sided",
               .seed_class = "FlashInferNVLinkOneSidedManager",
               .aliases = kAliases,
               .use_when = "decoding and captured graphs: fixed shapes and addresses, quantised rows, extra payloads",
               .contract = {.output_layout = OutputLayout::kRankMajor,
                            .id_space = IdSpace::kGlobal,
                            .invalid_id_configurable = true,
                            .weights_applied_by = WeightRule::kCaller,
                            .combine_reduces = Reduction::kSumOverRanks,
                            .counts_on = CountsOn::kHost,
                            .handle_use = HandleUse::kOnce,
                            .output_ownership = Ownership::kView,
                            .max_in_flight = 1,
                            .capturable = true,
                            .takes_topk_ids = true,
                            .topk_ids_required = true,
                            .takes_extra_payloads = true,
                            .takes_eplb_stats = true,
                            .takes_runtime_max_tokens = true,
                            .gives_combine_input = true,
                            .grows = true},
               .default_config = OneSidedConfig{},
               .unusable_reason = {}},
      .plan = plan,
      .fields = fields,
      .with_extra_capacity = with_extra_capacity,
      .extra_capacity = extra_capacity,
  };
  return backend;
}

}  // namespace tokenyard::registry
