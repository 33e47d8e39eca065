// SPDX-License-Identifier: Apache-2.0
#include "communication/received.h"

#include <algorithm>
#include <array>
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

std::string_view label_of(int plane) {
  constexpr std::array<std::string_view, protocol::kFirstExtraPlane + 1> kLabels{
      "into->hidden_states", "into->hidden_states_scale", "into->topk_ids",
      "into->topk_weights",  "into->router_logits",       "one of into->extra_payloads"};
  return kLabels[static_cast<std::size_t>(std::min<int>(plane, protocol::kFirstExtraPlane))];
}

}  // namespace

TensorView& Received::output_of(DispatchResult& result, int plane) {
  if (plane < protocol::kFirstExtraPlane) return result.*member_of(plane);
  return result.extra_payloads[static_cast<std::size_t>(plane - protocol::kFirstExtraPlane)];
}

TensorView Received::wanted(const DispatchOptions& options, int plane) {
  if (options.into == nullptr) return {};
  if (plane < protocol::kFirstExtraPlane) return options.into->*member_of(plane);
  const auto extra = static_cast<std::size_t>(plane - protocol::kFirstExtraPlane);
  return extra < options.into->extra_payloads.size() ? options.into->extra_payloads[extra] : TensorView{};
}

std::int64_t Received::bytes_of_row(const PayloadKind& kind) {
  std::int64_t bytes = size_of(kind.dtype);
  for (int i = 0; i < kind.num_inner; ++i)
    bytes *= kind.inner[static_cast<std::size_t>(i)];
  return bytes;
}

Received::Received(const Limits& limits, const protocol::WindowLayout& layout, std::byte* window)
    : limits_(limits), layout_(layout), window_(window) {
  reshape();
  const auto ranks = static_cast<std::size_t>(limits.num_ranks);
  stats_.resize(ranks * static_cast<std::size_t>(layout.shape().stats_entries));
  if (protocol::by_expert(limits.plan.spec.placement)) make_expert_buffers();
  if (!own_copy(protocol::kIdsPlane)) return;
  make_room(layout.combine_rows());
  filled_.assign(ranks, layout.shape().max_tokens);
}

void Received::reshape() {
  first_expert_ = first_local_expert(limits_.params, limits_.rank, limits_.num_ranks);
  num_experts_ = num_local_experts(limits_.params, limits_.rank, limits_.num_ranks);
  last_row_.resize(static_cast<std::size_t>(num_experts_));
}

void Received::make_room(std::int64_t rows) {
  const std::size_t picks = static_cast<std::size_t>(rows) * static_cast<std::size_t>(limits_.params.top_k);
  if (ids_.size() < picks * sizeof(std::int64_t)) ids_.resize(picks * sizeof(std::int64_t));
  if (weights_.size() < picks * sizeof(float)) weights_.resize(picks * sizeof(float));
}

bool Received::own_copy(int plane) const {
  return protocol::routed(limits_.plan.spec.placement) && !protocol::by_expert(limits_.plan.spec.placement) &&
         (plane == protocol::kIdsPlane || plane == protocol::kWeightsPlane);
}

std::int64_t Received::rows_shown(const Route& route) const {
  if (blocked()) return route.num_blocks * route.rows_per_block;
  return route.num_worst_tokens.value_or(route.round.num_rows);
}

const std::byte* Received::window_row(const Route& route, int plane, std::int64_t source, std::int64_t row) const {
  const protocol::Plane& at = route.round.planes.planes[static_cast<std::size_t>(plane)];
  return route.round.rows + source * route.round.space_stride + at.offset + row * at.stride;
}

TensorView Received::shaped(const PayloadKind& kind,
                            const RowPlaces& places,
                            const Route& route,
                            std::int64_t rows) const {
  const std::int64_t element = size_of(kind.dtype);
  TensorView view;
  view.data = places.base;
  view.dtype = kind.dtype;
  const auto add = [&](std::int64_t extent, std::int64_t stride_bytes) {
    const auto at = static_cast<std::size_t>(view.num_dims++);
    view.shape[at] = extent;
    view.strides[at] = stride_bytes / element;
  };
  if (blocked()) {
    add(route.num_blocks, places.block_stride);
    add(route.rows_per_block, places.row_stride);
  } else {
    add(rows, places.row_stride);
  }
  if (kind.num_inner == 2) add(kind.inner[0], kind.inner[1] * element);
  if (kind.num_inner >= 1) add(kind.inner[static_cast<std::size_t>(kind.num_inner) - 1], element);
  return view;
}

TensorView Received::window_view(const Route& route, int plane, std::int64_t rows) const {
  const protocol::Plane& at = route.round.planes.planes[static_cast<std::size_t>(plane)];
  // Written through by no one: the view is of memory that the caller may use as it likes until its combine.
  auto* base = const_cast<std::byte*>(route.round.rows) + at.offset;
  const RowPlaces places{base, route.round.space_stride, at.stride};
  return shaped(route.kinds[static_cast<std::size_t>(plane)], places, route, rows);
}

TensorView Received::own_view(const Route& route, int plane, std::int64_t rows) {
  const PayloadKind& kind = route.kinds[static_cast<std::size_t>(plane)];
  const std::int64_t row_bytes = limits_.params.top_k * size_of(kind.dtype);
  if (!blocked()) make_room(rows);  // with a byte budget nobody knew before
  std::byte* memory = plane == protocol::kIdsPlane ? ids_.data() : weights_.data();
  return shaped(kind, {memory, row_bytes * layout_.shape().max_tokens, row_bytes}, route, rows);
}

TensorView Received::place(
    const Route& route, int plane, std::int64_t rows, const TensorView& into, const Allocate& allocate) {
  const PayloadKind& kind = route.kinds[static_cast<std::size_t>(plane)];
  if (into.defined()) return trimmed(into, kind, route.rows_per_block, rows);
  if (allocate && !views_only()) {
    const std::int64_t bytes = rows * bytes_of_row(kind);
    std::byte* memory = allocate_output(allocate, bytes);
    return shaped(kind, {memory, route.rows_per_block * bytes_of_row(kind), bytes_of_row(kind)}, route, rows);
  }
  has_views_ = true;
  return own_copy(plane) ? own_view(route, plane, rows) : window_view(route, plane, rows);
}

void Received::copy_rows(const Route& route, int plane, const TensorView& to) const {
  const std::int64_t bytes = route.round.planes.planes[static_cast<std::size_t>(plane)].row_bytes;
  const RowPlaces places = places_of(to, route.kinds[static_cast<std::size_t>(plane)], route.rows_per_block);
  for_each_received_row(route, layout_, [&](std::int64_t source, std::int64_t row) {
    std::memcpy(places.at(source, row), window_row(route, plane, source, row), static_cast<std::size_t>(bytes));
  });
}

void Received::check_into(const Route& route, const DispatchOptions& options) const {
  if (options.into == nullptr) return;
  check_stats_into(route, options.into->eplb_gathered_stats);
  for (int plane = 0; plane < protocol::kFirstExtraPlane + route.num_extras; ++plane) {
    const TensorView into = wanted(options, plane);
    check_tensor(into, label_of(plane));
    if (!into.defined()) continue;
    const bool routing = plane == protocol::kIdsPlane || plane == protocol::kWeightsPlane;
    const bool shown = !protocol::by_expert(limits_.plan.spec.placement) || !routing;
    if (!shown || route.request.payloads[static_cast<std::size_t>(plane)].row_bytes == 0) {
      throw Error(ErrorCode::kInvalidArgument, std::string(label_of(plane)) + " is given and there is no such output");
    }
    const PayloadKind& kind = route.kinds[static_cast<std::size_t>(plane)];
    const bool blocks = blocked() && into.num_dims == kind.num_inner + 2;
    if (!blocks && into.num_dims != kind.num_inner + 1) {
      throw Error(ErrorCode::kInvalidArgument, std::string(label_of(plane)) + " is " + into.describe() +
                                                   "; it must have " + std::to_string(kind.num_inner + 1) +
                                                   " dimensions, as the input has" +
                                                   (blocked() ? ", or one more for blocks of rows" : ""));
    }
    const TensorView row = blocks ? block_of(into, 0) : into;
    if (row.dtype != kind.dtype || row.row_bytes() != bytes_of_row(kind)) {
      throw Error(ErrorCode::kInvalidArgument, std::string(label_of(plane)) + " is " + into.describe() +
                                                   "; its rows must be " + std::to_string(bytes_of_row(kind)) +
                                                   " bytes of " + std::string(name(kind.dtype)));
    }
    blocks ? check_blocks(into, label_of(plane)) : check_rows(into, label_of(plane), into.num_rows());
    if (blocked()) check_room(into, route, blocks, label_of(plane));
  }
}

void Received::check_room(const TensorView& into, const Route& route, bool blocks, std::string_view label) const {
  const bool fits = blocks ? into.shape[0] == route.num_blocks && into.shape[1] >= route.rows_per_block
                           : into.shape[0] >= route.num_blocks * route.rows_per_block;
  if (fits) return;
  throw Error(ErrorCode::kInvalidArgument, std::string(label) + " is " + into.describe() + "; it must have room for " +
                                               std::to_string(route.num_blocks) + " times " +
                                               std::to_string(route.rows_per_block) + " rows");
}

Received::Outcome Received::fill(Route& route,
                                 const DispatchOptions& options,
                                 const Allocate& allocate,
                                 DispatchResult& result) {
  const std::int64_t rows = rows_shown(route);
  route.rows_shown = rows;
  if (protocol::by_expert(limits_.plan.spec.placement)) return fill_experts(route, options, result);
  const int num_planes = protocol::kFirstExtraPlane + route.num_extras;
  for (int plane = 0; plane < num_planes && !blocked(); ++plane) {
    const TensorView into = wanted(options, plane);
    if (into.defined() && into.num_rows() < rows) return {.needed_rows = rows, .has_views = true};
  }
  has_views_ = false;
  result.extra_payloads.resize(static_cast<std::size_t>(route.num_extras));
  for (int plane = 0; plane < num_planes; ++plane) {
    TensorView& output = output_of(result, plane);
    const TensorView into = wanted(options, plane);
    output = {};
    if (route.request.payloads[static_cast<std::size_t>(plane)].row_bytes == 0) {
      // A payload of no bytes is still a payload.
      if (route.kinds[static_cast<std::size_t>(plane)].num_inner > 0) output = window_view(route, plane, rows);
      continue;
    }
    output = place(route, plane, rows, into, allocate);
    const bool copied = into.defined() || (allocate && !views_only());
    if (own_copy(plane)) {
      plane == protocol::kIdsPlane ? fill_ids(route, output, rows) : fill_weights(route, output, rows);
    } else if (copied) {
      copy_rows(route, plane, output);
    }
  }
  fill_stats(route, options, result.eplb_gathered_stats);
  fill_counts(route, result.counts);
  return {.needed_rows = 0, .has_views = has_views_};
}

}  // namespace tokenyard::communication
