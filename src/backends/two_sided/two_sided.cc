// SPDX-License-Identifier: Apache-2.0
// Rank-major rows through bounded queues, so that the window does not grow with the tokens (the seed's
// FlashInferNVLinkTwoSidedManager and NVLinkTwoSidedAlltoAll).
#include <algorithm>
#include <array>

#include "tokenyard/error.h"

#include "communication/backend.h"
#include "protocol/queue_entry.h"

namespace tokenyard::registry {
namespace {

constexpr int kExpertsMultiple = 4;
constexpr std::int64_t kDefaultQueueBytes = 256 << 10;
// An entry of a GPU's queue takes microseconds from its row to the room that it gives back, so a queue's size bounds
// the rate; that of the host would use a twentieth of the link (docs/design/0005-cuda-engine.md).
constexpr std::int64_t kDefaultGpuQueueBytes = 4 << 20;
constexpr std::int64_t kDefaultEntries = 4;  // of rows so large that the default bytes hold fewer

std::int64_t queue_bytes(const protocol::WindowShape& shape, std::int64_t wanted, std::int64_t by_default) {
  const std::int64_t row = std::max(shape.row_capacity, shape.combine_row_bytes);
  const std::int64_t entry = protocol::queue_entry_bytes(protocol::kQueueEntryHeader + row);
  if (wanted == 0) return std::max(by_default, kDefaultEntries * entry);
  if (wanted >= 2 * entry) return wanted;
  throw Error(ErrorCode::kInvalidArgument, "TwoSidedConfig::queue_bytes_per_peer is " + std::to_string(wanted) +
                                               "; it must be 0 for the default, or at least " +
                                               std::to_string(2 * entry) + ", two rows of these params");
}

communication::Plan plan(const MoeParams& params, const BackendConfig& config, int num_ranks) {
  if (params.num_experts % kExpertsMultiple != 0) {
    throw Error(ErrorCode::kInvalidArgument, "MoeParams::num_experts is " + std::to_string(params.num_experts) +
                                                 "; `two_sided` needs a multiple of " +
                                                 std::to_string(kExpertsMultiple));
  }
  communication::Plan plan;
  plan.spec = {.placement = protocol::Placement::kRankMajor,
               .ids = protocol::IdView::kGlobal,
               .transport = protocol::Transport::kQueue};
  plan.shape = communication::base_shape(params, plan.spec.placement, num_ranks);
  plan.shape.stats_entries = params.num_experts;
  plan.stats_cover_all = true;
  const std::int64_t wanted = std::get<TwoSidedConfig>(config).queue_bytes_per_peer;
  plan.shape.queue_bytes = queue_bytes(plan.shape, wanted, kDefaultQueueBytes);
  plan.gpu_queue_bytes = queue_bytes(plan.shape, wanted, kDefaultGpuQueueBytes);
  return plan;
}

communication::Fields fields(const BackendConfig& config) {
  return {
      {"TwoSidedConfig::queue_bytes_per_peer", std::to_string(std::get<TwoSidedConfig>(config).queue_bytes_per_peer)}};
}

constexpr std::array<std::string_view, 3> kAliases{"flashinfer_nvlink_two_sided", "flashinfer_all2allv",
                                                   "NVLinkTwoSidedAlltoAll"};

}  // namespace

const communication::Backend& two_sided();

const communication::Backend& two_sided() {
  static const communication::Backend backend{
      .info = {.name = "two_sided",
               .seed_class = "FlashInferNVLinkTwoSidedManager",
               .aliases = kAliases,
               .use_when = "windows must stay small: rank-major rows through queues whose size no token count changes",
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
                            .num_experts_multiple_of = kExpertsMultiple,
                            .takes_topk_ids = true,
                            .topk_ids_required = true,
                            .takes_eplb_stats = true,
                            .takes_runtime_max_tokens = true,
                            .takes_turns = true},
               .default_config = TwoSidedConfig{},
               .unusable_reason = {}},
      .plan = plan,
      .fields = fields,
  };
  return backend;
}

}  // namespace tokenyard::registry
