// SPDX-License-Identifier: Apache-2.0
#include "engine/host/host_outputs.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "engine/host/lane.h"
#include "protocol/owner.h"

namespace tokenyard::engine::host {
namespace {

// `id_at(slot)` for every slot of a row.
template <class Id, class IdAt>
void store_ids(std::byte* row, std::size_t top_k, IdAt&& id_at) {
  for (std::size_t slot = 0; slot < top_k; ++slot) {
    const auto id = static_cast<Id>(id_at(slot));
    std::memcpy(row + slot * sizeof(id), &id, sizeof(id));
  }
}

template <class IdAt>
void store_ids(std::byte* row, std::size_t top_k, Dtype dtype, IdAt&& id_at) {
  dtype == Dtype::kI64 ? store_ids<std::int64_t>(row, top_k, id_at) : store_ids<std::int32_t>(row, top_k, id_at);
}

void fill_row(std::byte* row, std::size_t top_k, Dtype dtype, std::int64_t id) {
  store_ids(row, top_k, dtype, [id](std::size_t) { return id; });
}

const std::int32_t* wire_ids_of(const Round& round, std::int64_t source, std::int64_t row) {
  return reinterpret_cast<const std::int32_t*>(round.received_row(protocol::kIdsPlane, source, row));
}

std::int64_t rows_kept(const Round& round) {
  return std::min(round.num_rows, round.row_limit);
}

}  // namespace

HostOutputs::HostOutputs(const Setup& setup, const WindowView& own) : setup_(setup), own_(own) {
  last_row_.reserve(
      static_cast<std::size_t>(protocol::num_local_experts(setup.params.num_experts, setup.num_ranks, setup.rank)));
  if (setup.spec.placement != protocol::Placement::kRankMajor) return;
  filled_.assign(static_cast<std::size_t>(setup.num_ranks), setup.layout.shape().max_tokens);
}

void HostOutputs::fill(const DispatchOutputs& outputs, Round& round) {
  const bool routed = protocol::routed(setup_.spec.placement);
  for (int plane = 0; plane < protocol::kMaxPlanes; ++plane) {
    const OutputPlane& to = outputs.planes[static_cast<std::size_t>(plane)];
    if (to.data == nullptr) continue;
    if (routed && plane == protocol::kIdsPlane) {
      fill_ids(outputs, round);
    } else if (routed && plane == protocol::kWeightsPlane) {
      fill_weights(outputs, round);
    } else {
      copy_rows(to, round, plane);
    }
  }
  if (outputs.stats != nullptr) gather_stats(outputs);
  if (outputs.count_experts) count_experts(round);
}

template <class Visit>
void HostOutputs::for_each_row(const Round& round, Visit&& visit) const {
  if (protocol::counts_first(setup_.spec.placement)) {
    const std::int64_t kept = rows_kept(round);
    for (std::int64_t row = 0; row < kept; ++row)
      visit(std::int64_t{0}, row);
    return;
  }
  for (std::int64_t source = 0; source < std::ssize(round.rows_received); ++source) {
    ReceivedTokens(round, setup_.layout, source).visit_all([&](std::int64_t token) { visit(source, token); });
  }
}

void HostOutputs::copy_rows(const OutputPlane& to, const Round& round, int plane) const {
  for_each_row(round, [&](std::int64_t source, std::int64_t row) {
    copy_lane_row(to.at(source, row), round.received_row(plane, source, row), to.row_bytes, false);
  });
}

HostOutputs::LocalExperts HostOutputs::local_experts() const {
  return {protocol::first_local_expert(setup_.params.num_experts, setup_.num_ranks, setup_.rank),
          protocol::num_local_experts(setup_.params.num_experts, setup_.num_ranks, setup_.rank)};
}

void HostOutputs::fill_ids(const DispatchOutputs& outputs, const Round& round) {
  clear_ids(outputs, round);
  const OutputPlane& ids = outputs.planes[protocol::kIdsPlane];
  const auto top_k = static_cast<std::size_t>(setup_.params.top_k);
  const bool global = setup_.spec.ids == protocol::IdView::kGlobal;
  const std::int64_t invalid = setup_.params.invalid_expert_id;
  const LocalExperts experts = local_experts();
  for_each_row(round, [&](std::int64_t source, std::int64_t row) {
    const std::int32_t* wire = wire_ids_of(round, source, row);
    store_ids(ids.at(source, row), top_k, ids.dtype, [=](std::size_t slot) -> std::int64_t {
      if (global) return wire[slot] < 0 ? invalid : wire[slot];
      return experts.index_of(wire[slot]);
    });
  });
}

// Rows without a token carry invalid ids in every slot. Rank-major ids that nobody else writes to are cleared only as
// far as the rounds before can have filled them, so a small round in a large window costs little.
void HostOutputs::clear_ids(const DispatchOutputs& outputs, const Round& round) {
  const OutputPlane& ids = outputs.planes[protocol::kIdsPlane];
  const auto top_k = static_cast<std::size_t>(setup_.params.top_k);
  if (protocol::counts_first(setup_.spec.placement)) {
    for (std::int64_t row = rows_kept(round); row < outputs.rows_shown; ++row)
      fill_row(ids.at(0, row), top_k, ids.dtype, -1);
    return;
  }
  if (ids.own && filled_dtype_ != ids.dtype) {
    filled_dtype_ = ids.dtype;
    std::ranges::fill(filled_, setup_.layout.shape().max_tokens);
  }
  for (std::size_t source = 0; source < filled_.size(); ++source) {
    const std::int64_t until = ids.own ? filled_[source] : outputs.rows_per_block;
    for (std::int64_t row = 0; row < until; ++row)
      fill_row(ids.at(static_cast<std::int64_t>(source), row), top_k, ids.dtype, setup_.params.invalid_expert_id);
    if (ids.own) filled_[source] = round.tokens_of[source];
  }
}

// With local ids a weight of another rank's expert is 0.
void HostOutputs::fill_weights(const DispatchOutputs& outputs, const Round& round) const {
  const OutputPlane& weights = outputs.planes[protocol::kWeightsPlane];
  const auto top_k = static_cast<std::size_t>(setup_.params.top_k);
  const auto row_bytes = static_cast<std::size_t>(weights.row_bytes);
  const std::size_t element = row_bytes / top_k;
  const bool has_ids = round.planes.planes[protocol::kIdsPlane].row_bytes > 0;
  const bool local_only = setup_.spec.ids == protocol::IdView::kLocal && has_ids;
  const LocalExperts experts = local_experts();
  for_each_row(round, [&](std::int64_t source, std::int64_t row) {
    std::byte* to = weights.at(source, row);
    std::memcpy(to, round.received_row(protocol::kWeightsPlane, source, row), row_bytes);
    if (!local_only) return;
    const std::int32_t* wire = wire_ids_of(round, source, row);
    for (std::size_t slot = 0; slot < top_k; ++slot) {
      if (experts.index_of(wire[slot]) < 0) std::memset(to + slot * element, 0, element);
    }
  });
  if (!protocol::counts_first(setup_.spec.placement)) return;
  for (std::int64_t row = rows_kept(round); row < outputs.rows_shown; ++row)
    std::memset(weights.at(0, row), 0, row_bytes);
}

void HostOutputs::gather_stats(const DispatchOutputs& outputs) const {
  for (int source = 0; source < setup_.num_ranks; ++source) {
    std::memcpy(outputs.stats + source * outputs.num_stats, own_.stats(source),
                static_cast<std::size_t>(outputs.num_stats) * sizeof(std::int32_t));
  }
}

void HostOutputs::count_experts(Round& round) {
  const LocalExperts experts = local_experts();
  const int top_k = setup_.params.top_k;
  round.rows_per_expert.assign(static_cast<std::size_t>(experts.count), 0);
  last_row_.assign(static_cast<std::size_t>(experts.count), -1);
  std::int64_t index = 0;
  for_each_row(round, [&](std::int64_t source, std::int64_t row) {
    const std::int32_t* wire = wire_ids_of(round, source, row);
    for (int slot = 0; slot < top_k; ++slot) {
      const std::int32_t local = experts.index_of(wire[slot]);
      if (local < 0) continue;
      const auto expert = static_cast<std::size_t>(local);
      if (last_row_[expert] == index) continue;  // the same expert twice in one token is one row
      last_row_[expert] = index;
      ++round.rows_per_expert[expert];
    }
    ++index;
  });
}

}  // namespace tokenyard::engine::host
