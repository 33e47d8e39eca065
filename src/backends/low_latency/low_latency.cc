// SPDX-License-Identifier: Apache-2.0
// Expert-major rows, cast on the way, weighted by combine; two rounds in flight (the seed's DeepEPLLAll2AllManager).
#include <algorithm>
#include <array>

#include "tokenyard/error.h"

#include "communication/backend.h"
#include "protocol/log_wire.h"

namespace tokenyard::registry {
namespace {

communication::Plan plan(const MoeParams& params, const BackendConfig& config, int num_ranks) {
  const auto& own = std::get<LowLatencyConfig>(config);
  communication::Plan plan;
  plan.spec = {.placement = protocol::Placement::kExpertMajor,
               .ids = protocol::IdView::kLocal,
               .depth = 2,
               .combine_wire = own.use_logarithmic_combine ? protocol::CombineWire::kLogarithmic
                                                           : protocol::CombineWire::kParamsDtype};
  plan.shape = communication::base_shape(params, plan.spec.placement, num_ranks);
  plan.shape.depth = plan.spec.depth;
  plan.shape.given_weights_row_bytes = std::int64_t{params.top_k} * 4;
  if (own.use_logarithmic_combine) plan.shape.combine_row_bytes = protocol::log_row_bytes(params.hidden_size);
  return plan;
}

communication::Fields fields(const BackendConfig& config) {
  const auto& own = std::get<LowLatencyConfig>(config);
  return {{"LowLatencyConfig::use_logarithmic_combine", own.use_logarithmic_combine ? "true" : "false"}};
}

constexpr std::array<std::string_view, 1> kAliases{"deepep_low_latency"};

}  // namespace

const communication::Backend& low_latency();

const communication::Backend& low_latency() {
  static const communication::Backend backend{
      .info = {.name = "low_latency",
               .seed_class = "DeepEPLLAll2AllManager",
               .aliases = kAliases,
               .use_when = "decoding: rows by expert, cast to fp8 on the way, weighted by combine, halves that overlap",
               .contract = {.output_layout = OutputLayout::kExpertMajor,
                            .id_space = IdSpace::kLocal,
                            .weights_applied_by = WeightRule::kCombine,
                            .combine_reduces = Reduction::kSumOverRanks,
                            .counts_on = CountsOn::kHost,
                            .handle_use = HandleUse::kOnce,
                            .output_ownership = Ownership::kViewOrOwned,
                            .max_in_flight = 2,
                            .capturable = true,
                            .takes_topk_ids = true,
                            .topk_ids_required = true,
                            .gives_combine_input = true,
                            .takes_cast = true,
                            .takes_receive_statistics = true},
               .default_config = LowLatencyConfig{},
               .unusable_reason = {}},
      .plan = plan,
      .fields = fields,
  };
  return backend;
}

}  // namespace tokenyard::registry
