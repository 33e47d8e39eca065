// SPDX-License-Identifier: Apache-2.0
#include "communication/received.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "tokenyard/error.h"

#include "communication/received_rows.h"

namespace tokenyard::communication {
namespace {

// The outputs of one dispatch by plane; extras follow.
TensorView DispatchResult::*member_of(int plane) {
  switch (plane) {
    case protocol::kHiddenPlane:
      return &DispatchResult::hidden_states;
    case protocol::kScalePlane:
      return &DispatchResult::hidden_states_scale;
    case protocol::kIdsPlane:
      return &DispatchResult::topk_ids;
    case protocol::kWeightsPlane:
      return &DispatchResult::topk_weights;
    default:
      return &DispatchResult::router_logits;
  }
}

const char* label_of(int plane) {
  static constexpr const char* kLabels[] = {"hidden_states", "hidden_states_scale", "topk_ids", "topk_weights",
                                            "router_logits"};
  return plane < protocol::kFirstExtraPlane ? kLabels[plane] : "extra_payloads";
}

TensorView wanted(const DispatchOptions& options, int plane) {
  if (options.into == nullptr) return {};
  if (plane < protocol::kFirstExtraPlane) return options.into->*member_of(plane);
  const auto extra = static_cast<std::size_t>(plane - protocol::kFirstExtraPlane);
  return extra < options.into->extra_payloads.size() ? options.into->extra_payloads[extra] : TensorView{};
}

std::int64_t inner_bytes(const PayloadKind& kind) {
  std::int64_t bytes = size_of(kind.dtype);
  for (int i = 0; i < kind.num_inner; ++i)
    bytes *= kind.inner[static_cast<std::size_t>(i)];
  return bytes;
}

}  // namespace

Received::Received(const Limits& limits, const protocol::WindowLayout& layout, std::byte* window)
    : limits_(limits),
      layout_(layout),
      window_(window),
      first_expert_(first_local_expert(limits.params, limits.rank, limits.num_ranks)),
      num_experts_(num_local_experts(limits.params, limits.rank, limits.num_ranks)) {
  last_row_.resize(static_cast<std::size_t>(num_experts_));
  const auto ranks = static_cast<std::size_t>(limits.num_ranks);
  stats_.resize(ranks * static_cast<std::size_t>(layout.shape().stats_entries));
  if (!protocol::routed(limits.plan.spec.placement)) return;
  const std::size_t picks =
      static_cast<std::size_t>(layout.combine_rows()) * static_cast<std::size_t>(limits.params.top_k);
  ids_.resize(picks * sizeof(std::int64_t));
  weights_.resize(picks * sizeof(float));
  filled_.assign(ranks, layout.shape().max_tokens);
}

bool Received::own_copy(int plane) const {
  return protocol::routed(limits_.plan.spec.placement) &&
         (plane == protocol::kIdsPlane || plane == protocol::kWeightsPlane);
}

std::int64_t Received::rows_shown(const Route& route, const DispatchOptions& options) const {
  if (rank_major()) return limits_.num_ranks * route.round.tokens_per_rank;
  return options.num_worst_tokens ? *options.num_worst_tokens : route.round.num_rows;
}

const std::byte* Received::window_row(const Route& route, int plane, std::int64_t source, std::int64_t row) const {
  const protocol::Plane& at = route.round.planes.planes[static_cast<std::size_t>(plane)];
  return window_ + layout_.payload(static_cast<int>(source)) + at.offset + row * at.stride;
}

// Strides in bytes; `block_stride` separates sources in the rank-major layout.
TensorView Received::shaped(const PayloadKind& kind,
                            std::byte* memory,
                            const Route& route,
                            std::int64_t rows,
                            std::int64_t row_stride,
                            std::int64_t block_stride) const {
  const std::int64_t element = size_of(kind.dtype);
  TensorView view;
  view.data = memory;
  view.dtype = kind.dtype;
  const auto add = [&](std::int64_t extent, std::int64_t stride_bytes) {
    const auto at = static_cast<std::size_t>(view.num_dims++);
    view.shape[at] = extent;
    view.strides[at] = stride_bytes / element;
  };
  if (rank_major()) {
    add(limits_.num_ranks, block_stride);
    add(route.round.tokens_per_rank, row_stride);
  } else {
    add(rows, row_stride);
  }
  if (kind.num_inner == 2) add(kind.inner[0], kind.inner[1] * element);
  if (kind.num_inner >= 1) add(kind.inner[static_cast<std::size_t>(kind.num_inner) - 1], element);
  return view;
}

TensorView Received::window_view(const Route& route, int plane, std::int64_t rows) const {
  const protocol::Plane& at = route.round.planes.planes[static_cast<std::size_t>(plane)];
  return shaped(route.kinds[static_cast<std::size_t>(plane)], window_ + layout_.payload(0) + at.offset, route, rows,
                at.stride, layout_.payload_bytes());
}

TensorView Received::own_view(const Route& route, int plane, std::int64_t rows) {
  const PayloadKind& kind = route.kinds[static_cast<std::size_t>(plane)];
  const std::int64_t row_bytes = limits_.params.top_k * size_of(kind.dtype);
  std::byte* memory = plane == protocol::kIdsPlane ? ids_.data() : weights_.data();
  return shaped(kind, memory, route, rows, row_bytes, row_bytes * layout_.shape().max_tokens);
}

TensorView Received::place(
    const Route& route, int plane, std::int64_t rows, const TensorView& into, const Allocate& allocate) {
  const PayloadKind& kind = route.kinds[static_cast<std::size_t>(plane)];
  if (into.defined()) return trimmed(into, kind, route.round.tokens_per_rank, rows);
  if (allocate && !rank_major()) {
    const std::int64_t bytes = rows * inner_bytes(kind);
    void* memory = bytes > 0 ? allocate(bytes, {}) : nullptr;
    if (bytes > 0 && memory == nullptr) {
      throw Error(ErrorCode::kSystem, "allocate_output gave no memory for " + std::to_string(bytes) + " bytes");
    }
    return shaped(kind, static_cast<std::byte*>(memory), route, rows, inner_bytes(kind), 0);
  }
  has_views_ = true;
  return own_copy(plane) ? own_view(route, plane, rows) : window_view(route, plane, rows);
}

void Received::copy_rows(const Route& route, int plane, const TensorView& to) const {
  const std::int64_t bytes = route.round.planes.planes[static_cast<std::size_t>(plane)].row_bytes;
  const RowPlaces places = places_of(to, route.kinds[static_cast<std::size_t>(plane)], route.round.tokens_per_rank);
  for_each_received_row(route, layout_, [&](std::int64_t source, std::int64_t row) {
    std::memcpy(places.at(source, row), window_row(route, plane, source, row), static_cast<std::size_t>(bytes));
  });
}

void Received::check_into(const Route& route, const DispatchOptions& options) const {
  if (options.into == nullptr) return;
  check_stats_into(route, options.into->eplb_gathered_stats);
  for (int plane = 0; plane < protocol::kFirstExtraPlane + route.num_extras; ++plane) {
    const TensorView into = wanted(options, plane);
    if (!into.defined()) continue;
    const PayloadKind& kind = route.kinds[static_cast<std::size_t>(plane)];
    const std::string label = std::string("into->") + label_of(plane);
    if (route.request.payloads[static_cast<std::size_t>(plane)].row_bytes == 0) {
      throw Error(ErrorCode::kInvalidArgument, label + " is given and there is no such input");
    }
    const bool blocks = rank_major() && into.num_dims == kind.num_inner + 2;
    TensorView row = into;
    if (blocks) row = block_of(into, 0);
    if (row.dtype != kind.dtype || row.row_bytes() != inner_bytes(kind)) {
      throw Error(ErrorCode::kInvalidArgument, label + " is " + into.describe() + "; its rows must be " +
                                                   std::to_string(inner_bytes(kind)) + " bytes of " +
                                                   std::string(name(kind.dtype)));
    }
    check_rows(row, label, row.num_rows());
    if (!rank_major()) continue;
    const std::int64_t need = route.round.tokens_per_rank;
    const bool fits = blocks ? into.shape[0] == limits_.num_ranks && into.shape[1] >= need
                             : into.shape[0] >= limits_.num_ranks * need;
    if (!fits) {
      throw Error(ErrorCode::kInvalidArgument, label + " is " + into.describe() + "; it must have room for " +
                                                   std::to_string(limits_.num_ranks) + " times " +
                                                   std::to_string(need) + " rows");
    }
  }
}

Received::Outcome Received::fill(const Route& route,
                                 const DispatchOptions& options,
                                 const Allocate& allocate,
                                 DispatchResult& result) {
  const std::int64_t rows = rows_shown(route, options);
  const int num_planes = protocol::kFirstExtraPlane + route.num_extras;
  for (int plane = 0; plane < num_planes && !rank_major(); ++plane) {
    const TensorView into = wanted(options, plane);
    if (into.defined() && into.num_rows() < rows) return {.needed_rows = rows, .has_views = true};
  }
  has_views_ = false;
  result.extra_payloads.resize(static_cast<std::size_t>(route.num_extras));
  for (int plane = 0; plane < num_planes; ++plane) {
    TensorView& output = plane < protocol::kFirstExtraPlane
                             ? result.*member_of(plane)
                             : result.extra_payloads[static_cast<std::size_t>(plane - protocol::kFirstExtraPlane)];
    const TensorView into = wanted(options, plane);
    output = {};
    if (route.request.payloads[static_cast<std::size_t>(plane)].row_bytes == 0) {
      // A payload of no bytes is still a payload.
      if (route.kinds[static_cast<std::size_t>(plane)].num_inner > 0) output = window_view(route, plane, rows);
      continue;
    }
    output = place(route, plane, rows, into, allocate);
    const bool copied = into.defined() || (allocate && !rank_major());
    if (plane == protocol::kIdsPlane && own_copy(plane)) {
      fill_ids(route, output, rows);
    } else if (plane == protocol::kWeightsPlane && own_copy(plane)) {
      fill_weights(route, output, rows);
    } else if (copied) {
      copy_rows(route, plane, output);
    }
  }
  fill_stats(route, options, result.eplb_gathered_stats);
  fill_counts(route, options, result.counts);
  return {.needed_rows = 0, .has_views = has_views_};
}

}  // namespace tokenyard::communication
