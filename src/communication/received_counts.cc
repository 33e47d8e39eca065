// SPDX-License-Identifier: Apache-2.0
// Counts and gathered statistics of a dispatch as the receiver sees them.
#include <algorithm>
#include <string>

#include "tokenyard/error.h"

#include "communication/received.h"
#include "protocol/formats.h"

namespace tokenyard::communication {

TensorView Received::on_device(std::int32_t* counts, std::int64_t entries) const {
  TensorView view(counts, Dtype::kI32, {entries});
  view.device = limits_.device;
  return view;
}

void Received::tell_device_counts(const engine::Round& round, RowCounts& counts) const {
  counts.num_rows = -1;
  counts.dropped_rows = 0;
  counts.rows_per_source.clear();
  counts.tokens_per_source.clear();
  counts.rows_per_source_on_device = on_device(round.rows_on_device, limits_.num_ranks);
  counts.tokens_per_source_on_device = on_device(round.tokens_on_device, limits_.num_ranks);
  if (round.experts.rows_on_device == nullptr) return;
  counts.rows_per_expert_on_device =
      on_device(round.experts.rows_on_device, num_local_experts(limits_.params, limits_.rank, limits_.num_ranks));
}

void Received::fill_counts(const Route& route, RowCounts& counts) const {
  const engine::Round& round = route.round;
  const std::int64_t kept = blocked() ? round.num_rows : std::min(round.num_rows, round.row_limit);
  counts.num_rows = kept;
  counts.dropped_rows = round.num_rows - kept;
  counts.tokens_per_rank = round.tokens_per_rank;
  counts.rows_per_source.assign(round.rows_received.begin(), round.rows_received.end());
  counts.tokens_per_source.assign(round.tokens_of.begin(), round.tokens_of.end());
  counts.rows_per_expert.clear();
  counts.aligned_rows_per_expert.clear();
  counts.rows_per_source_on_device = counts.tokens_per_source_on_device = counts.rows_per_expert_on_device = {};
  if (round.rows_on_device != nullptr) return tell_device_counts(round, counts);
  if (round.tokens_on_device != nullptr)
    counts.tokens_per_source_on_device = on_device(round.tokens_on_device, limits_.num_ranks);
  if (!route.request.outputs.count_experts) return;
  counts.rows_per_expert.assign(round.rows_per_expert.begin(), round.rows_per_expert.end());
  for (const std::int64_t rows : counts.rows_per_expert) {
    counts.aligned_rows_per_expert.push_back(protocol::align_up(rows, route.expert_alignment));
  }
}

void Received::check_stats_into(const Route& route, const TensorView& stats) const {
  check_tensor(stats, "into->eplb_gathered_stats");
  if (!stats.defined()) return;
  const bool shaped = stats.dtype == Dtype::kI32 && stats.num_dims == 2 && stats.shape[0] == limits_.num_ranks &&
                      stats.shape[1] == route.num_stats && stats.contiguous();
  if (shaped && route.num_stats > 0) return check_rows(limits_, stats, "into->eplb_gathered_stats", limits_.num_ranks);
  throw Error(ErrorCode::kInvalidArgument, "into->eplb_gathered_stats is " + stats.describe() +
                                               "; it must be a contiguous i32[" + std::to_string(limits_.num_ranks) +
                                               ", " + std::to_string(route.num_stats) +
                                               "], and eplb_local_stats be given");
}

TensorView Received::place_stats(Route& route, const DispatchOptions& options) {
  route.request.outputs.stats = nullptr;
  if (route.num_stats == 0) return {};
  auto* to = reinterpret_cast<std::int32_t*>(stats_.get());
  if (options.into != nullptr && options.into->eplb_gathered_stats.defined()) {
    to = options.into->eplb_gathered_stats.as<std::int32_t>();
  } else {
    has_views_ = true;
  }
  route.request.outputs.stats = to;
  route.request.outputs.num_stats = route.num_stats;
  TensorView stats(to, Dtype::kI32, {limits_.num_ranks, route.num_stats});
  stats.device = limits_.device;
  return stats;
}

}  // namespace tokenyard::communication
