// SPDX-License-Identifier: Apache-2.0
// Every rank gets every rank's rows; combine sums over all ranks (the seed's AgRsAll2AllManager).
#include <array>

#include "tokenyard/error.h"

#include "communication/backend.h"

namespace tokenyard::registry {
namespace {

communication::Plan plan(const MoeParams& params, const BackendConfig& config, int num_ranks) {
  const auto& own = std::get<AllGatherConfig>(config);
  if (own.extra_payload_bytes_per_token < 0) {
    throw Error(ErrorCode::kInvalidArgument, "AllGatherConfig::extra_payload_bytes_per_token is " +
                                                 std::to_string(own.extra_payload_bytes_per_token) +
                                                 "; it must not be negative");
  }
  communication::Plan plan;
  plan.spec = {.placement = protocol::Placement::kEveryRank, .ids = protocol::IdView::kCargo};
  plan.shape = communication::base_shape(params, plan.spec.placement, num_ranks);
  plan.shape.row_capacity += protocol::align_up(std::int64_t{params.num_experts} * 4, protocol::kRowAlignment);
  plan.shape.extra_capacity = own.extra_payload_bytes_per_token;
  return plan;
}

communication::Fields fields(const BackendConfig& config) {
  return {{"AllGatherConfig::extra_payload_bytes_per_token",
           std::to_string(std::get<AllGatherConfig>(config).extra_payload_bytes_per_token)}};
}

constexpr std::array<std::string_view, 2> kAliases{"allgather_reducescatter", "naive"};

}  // namespace

const communication::Backend& all_gather();

const communication::Backend& all_gather() {
  static const communication::Backend backend{
      .info = {.name = "all_gather",
               .seed_class = "AgRsAll2AllManager",
               .aliases = kAliases,
               .use_when = "few tokens, or experts that want every rank's rows; any routing, any extra tensors",
               .contract = {.output_layout = OutputLayout::kEveryRank,
                            .id_space = IdSpace::kCargo,
                            .weights_applied_by = WeightRule::kCaller,
                            .combine_reduces = Reduction::kSumOverRanks,
                            .counts_on = CountsOn::kHost,
                            .handle_use = HandleUse::kOnce,
                            .output_ownership = Ownership::kViewOrOwned,
                            .max_in_flight = 1,
                            .takes_topk_ids = true,
                            .takes_router_logits = true,
                            .takes_extra_payloads = true,
                            .takes_num_tokens_per_rank = true,
                            .gives_combine_input = true},
               .default_config = AllGatherConfig{},
               .unusable_reason = {}},
      .plan = plan,
      .fields = fields,
  };
  return backend;
}

}  // namespace tokenyard::registry
