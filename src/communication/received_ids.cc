// SPDX-License-Identifier: Apache-2.0
// Ids, weights, counts and statistics of a dispatch as the receiver sees them.
#include <algorithm>
#include <cstring>
#include <string>

#include "tokenyard/error.h"

#include "communication/received.h"
#include "communication/received_rows.h"
#include "protocol/formats.h"

namespace tokenyard::communication {
namespace {

void store_id(std::byte* row, std::size_t slot, Dtype dtype, std::int64_t id) {
  if (dtype == Dtype::kI64) {
    std::memcpy(row + slot * sizeof(id), &id, sizeof(id));
  } else {
    const auto narrow = static_cast<std::int32_t>(id);
    std::memcpy(row + slot * sizeof(narrow), &narrow, sizeof(narrow));
  }
}

void fill_row(std::byte* row, std::int64_t top_k, Dtype dtype, std::int64_t id) {
  for (std::int64_t slot = 0; slot < top_k; ++slot)
    store_id(row, static_cast<std::size_t>(slot), dtype, id);
}

}  // namespace

std::int64_t Received::shown_id(std::int32_t wire_id) const {
  if (limits_.plan.spec.ids == protocol::IdView::kGlobal) {
    return wire_id < 0 ? limits_.params.invalid_expert_id : wire_id;
  }
  const std::int32_t local = wire_id - first_expert_;
  return wire_id >= 0 && local >= 0 && local < num_experts_ ? local : -1;
}

void Received::fill_ids(const Route& route, const TensorView& ids, std::int64_t rows) {
  clear_ids(route, ids, rows);
  const auto top_k = static_cast<std::size_t>(limits_.params.top_k);
  const RowPlaces places = places_of(ids, route.kinds[protocol::kIdsPlane], route.rows_per_block);
  for_each_received_row(route, layout_, [&](std::int64_t source, std::int64_t row) {
    const auto* wire = reinterpret_cast<const std::int32_t*>(window_row(route, protocol::kIdsPlane, source, row));
    std::byte* to = places.at(source, row);
    for (std::size_t slot = 0; slot < top_k; ++slot)
      store_id(to, slot, ids.dtype, shown_id(wire[slot]));
  });
}

// Rows without a token carry invalid ids in every slot. This rank's own rank-major copy is cleared only as far as the
// rounds before can have filled it, so a small round in a large window costs little.
void Received::clear_ids(const Route& route, const TensorView& ids, std::int64_t rows) {
  const std::int64_t top_k = limits_.params.top_k;
  const RowPlaces places = places_of(ids, route.kinds[protocol::kIdsPlane], route.rows_per_block);
  if (!blocked()) {
    const std::int64_t kept = std::min(route.round.num_rows, route.round.row_limit);
    for (std::int64_t row = kept; row < rows; ++row)
      fill_row(places.at(0, row), top_k, ids.dtype, -1);
    return;
  }
  const bool own = ids.data == ids_.data();
  if (own && filled_dtype_ != ids.dtype) {
    filled_dtype_ = ids.dtype;
    std::ranges::fill(filled_, layout_.shape().max_tokens);
  }
  for (std::size_t source = 0; source < filled_.size(); ++source) {
    const std::int64_t until = own ? filled_[source] : route.rows_per_block;
    for (std::int64_t row = 0; row < until; ++row) {
      fill_row(places.at(static_cast<std::int64_t>(source), row), top_k, ids.dtype, limits_.params.invalid_expert_id);
    }
    if (own) filled_[source] = route.round.tokens_of[source];
  }
}

void Received::fill_weights(const Route& route, const TensorView& weights, std::int64_t rows) const {
  const PayloadKind& kind = route.kinds[protocol::kWeightsPlane];
  const auto element = static_cast<std::size_t>(size_of(kind.dtype));
  const auto top_k = static_cast<std::size_t>(limits_.params.top_k);
  const bool local_only = limits_.plan.spec.ids == protocol::IdView::kLocal && route.has_ids;
  const RowPlaces places = places_of(weights, kind, route.rows_per_block);
  for_each_received_row(route, layout_, [&](std::int64_t source, std::int64_t row) {
    std::byte* to = places.at(source, row);
    std::memcpy(to, window_row(route, protocol::kWeightsPlane, source, row), element * top_k);
    if (!local_only) return;
    const auto* wire = reinterpret_cast<const std::int32_t*>(window_row(route, protocol::kIdsPlane, source, row));
    for (std::size_t slot = 0; slot < top_k; ++slot) {
      if (shown_id(wire[slot]) < 0) std::memset(to + slot * element, 0, element);
    }
  });
  if (blocked()) return;
  for (std::int64_t row = std::min(route.round.num_rows, route.round.row_limit); row < rows; ++row) {
    std::memset(places.at(0, row), 0, element * top_k);
  }
}

void Received::fill_counts(const Route& route, RowCounts& counts) {
  const engine::Round& round = route.round;
  const std::int64_t kept = blocked() ? round.num_rows : std::min(round.num_rows, round.row_limit);
  counts.num_rows = kept;
  counts.dropped_rows = round.num_rows - kept;
  counts.tokens_per_rank = round.tokens_per_rank;
  counts.rows_per_source.assign(round.rows_received.begin(), round.rows_received.end());
  counts.tokens_per_source.assign(round.tokens_of.begin(), round.tokens_of.end());
  counts.rows_per_expert.clear();
  counts.aligned_rows_per_expert.clear();
  if (!route.has_ids || !protocol::routed(limits_.plan.spec.placement)) return;
  if (protocol::by_expert(limits_.plan.spec.placement)) {
    counts.rows_per_expert.assign(round.experts.rows_per_expert.begin(), round.experts.rows_per_expert.end());
  } else {
    count_experts(route, counts);
  }
  for (const std::int64_t rows : counts.rows_per_expert) {
    counts.aligned_rows_per_expert.push_back(protocol::align_up(rows, route.expert_alignment));
  }
}

void Received::count_experts(const Route& route, RowCounts& counts) {
  counts.rows_per_expert.assign(static_cast<std::size_t>(num_experts_), 0);
  std::ranges::fill(last_row_, -1);
  std::int64_t index = 0;
  for_each_received_row(route, layout_, [&](std::int64_t source, std::int64_t row) {
    const auto* wire = reinterpret_cast<const std::int32_t*>(window_row(route, protocol::kIdsPlane, source, row));
    for (int slot = 0; slot < limits_.params.top_k; ++slot) {
      const std::int32_t local = wire[slot] - first_expert_;
      if (wire[slot] < 0 || local < 0 || local >= num_experts_) continue;
      const auto expert = static_cast<std::size_t>(local);
      if (last_row_[expert] == index) continue;  // the same expert twice in one token is one row
      last_row_[expert] = index;
      ++counts.rows_per_expert[expert];
    }
    ++index;
  });
}

void Received::check_stats_into(const Route& route, const TensorView& stats) const {
  check_tensor(stats, "into->eplb_gathered_stats");
  if (!stats.defined()) return;
  const bool shaped = stats.dtype == Dtype::kI32 && stats.num_dims == 2 && stats.shape[0] == limits_.num_ranks &&
                      stats.shape[1] == route.num_stats && stats.contiguous();
  if (shaped && route.num_stats > 0) return check_rows(stats, "into->eplb_gathered_stats", limits_.num_ranks);
  throw Error(ErrorCode::kInvalidArgument, "into->eplb_gathered_stats is " + stats.describe() +
                                               "; it must be a contiguous i32[" + std::to_string(limits_.num_ranks) +
                                               ", " + std::to_string(route.num_stats) +
                                               "], and eplb_local_stats be given");
}

void Received::fill_stats(const Route& route, const DispatchOptions& options, TensorView& stats) {
  stats = {};
  if (route.num_stats == 0) return;
  const auto entries = static_cast<std::size_t>(route.num_stats);
  std::int32_t* to = stats_.data();
  if (options.into != nullptr && options.into->eplb_gathered_stats.defined()) {
    to = options.into->eplb_gathered_stats.as<std::int32_t>();
  } else {
    has_views_ = true;
  }
  for (int source = 0; source < limits_.num_ranks; ++source) {
    std::memcpy(to + static_cast<std::size_t>(source) * entries, window_ + layout_.stats(source),
                entries * sizeof(std::int32_t));
  }
  stats = TensorView(to, Dtype::kI32, {limits_.num_ranks, route.num_stats});
}

}  // namespace tokenyard::communication
