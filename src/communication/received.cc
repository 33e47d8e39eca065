// SPDX-License-Identifier: Apache-2.0
#include "communication/received.h"

#include <algorithm>
#include <array>
#include <string>

#include "tokenyard/error.h"

#include "communication/row_places.h"

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

Received::Received(const Limits& limits, const protocol::WindowLayout& layout, engine::Engine& engine)
    : limits_(limits), layout_(layout), engine_(engine) {
  const std::int64_t stats = limits.num_ranks * layout.shape().stats_entries;
  if (stats > 0) stats_ = engine.allocate(stats * static_cast<std::int64_t>(sizeof(std::int32_t)));
  if (by_expert()) make_expert_buffers();
  if (own_copy(protocol::kIdsPlane)) make_room(layout.combine_rows());
}

void Received::make_room(std::int64_t rows) {
  const std::int64_t picks = rows * limits_.params.top_k;
  if (picks <= room_) return;
  room_ = 0;
  ids_.reset();  // never both
  weights_.reset();
  ids_ = engine_.allocate(picks * static_cast<std::int64_t>(sizeof(std::int64_t)));
  weights_ = engine_.allocate(picks * static_cast<std::int64_t>(sizeof(float)));
  room_ = picks;
}

bool Received::shows(int plane) const {
  return !by_expert() || plane == protocol::kHiddenPlane || plane == protocol::kScalePlane;
}

bool Received::own_copy(int plane) const {
  return protocol::routed(limits_.plan.spec.placement) && !by_expert() &&
         (plane == protocol::kIdsPlane || plane == protocol::kWeightsPlane);
}

std::int64_t Received::rows_shown(const Route& route) const {
  if (blocked()) return route.num_blocks * route.rows_per_block;
  return route.num_worst_tokens.value_or(route.round.num_rows);
}

TensorView Received::shaped(const PayloadKind& kind, const engine::OutputPlane& places, const Route& route) const {
  const std::int64_t element = size_of(kind.dtype);
  TensorView view;
  view.data = places.data;
  view.dtype = kind.dtype;
  view.device = limits_.device;
  const auto add = [&](std::int64_t extent, std::int64_t stride_bytes) {
    const auto at = static_cast<std::size_t>(view.num_dims++);
    view.shape[at] = extent;
    view.strides[at] = stride_bytes / element;
  };
  if (blocked()) {
    add(route.num_blocks, places.block_stride);
    add(route.rows_per_block, places.row_stride);
  } else {
    add(route.rows_shown, places.row_stride);
  }
  if (kind.num_inner == 2) add(kind.inner[0], kind.inner[1] * element);
  if (kind.num_inner >= 1) add(kind.inner[static_cast<std::size_t>(kind.num_inner) - 1], element);
  return view;
}

TensorView Received::window_view(const Route& route, int plane) const {
  const auto at = static_cast<std::size_t>(plane);
  // Written through by no one: the view is of memory that the caller may use as it likes until its combine.
  auto* base = const_cast<std::byte*>(route.round.received_row(plane, 0, 0));
  return shaped(
      route.kinds[at],
      {.data = base, .block_stride = route.round.space_stride, .row_stride = route.round.planes.planes[at].stride},
      route);
}

// In blocks of the size that never changes, so that what rounds before left in them is known.
engine::OutputPlane Received::own_places(const Route& route, int plane) {
  if (by_expert()) return expert_places(route, plane);
  if (!blocked()) make_room(route.rows_shown);  // with a byte budget nobody knew before
  std::byte* memory = plane == protocol::kIdsPlane ? ids_.get() : weights_.get();
  engine::OutputPlane places =
      dense_places(memory, route.kinds[static_cast<std::size_t>(plane)], blocked() ? layout_.shape().max_tokens : 0);
  places.own = true;
  return places;
}

TensorView Received::place_plane(Route& route, int plane, const TensorView& into, const Allocate& allocate) {
  const auto at = static_cast<std::size_t>(plane);
  const PayloadKind& kind = route.kinds[at];
  engine::OutputPlane& places = route.request.outputs.planes[at];
  places = {};
  if (route.request.payloads[at].row_bytes == 0) {
    // A payload of no bytes is still a payload.
    return kind.num_inner > 0 && !by_expert() ? window_view(route, plane) : TensorView{};
  }
  if (into.defined()) {
    const TensorView output = trimmed(into, kind, route.rows_per_block, route.rows_shown);
    places = places_of(output, kind, route.rows_per_block);
    return output;
  }
  if (allocate && !views_only()) {
    std::byte* memory = allocate_output(allocate, route.rows_shown * bytes_of_row(kind), limits_.device);
    places = dense_places(memory, kind, route.rows_per_block);
    return shaped(kind, places, route);
  }
  has_views_ = has_views_ || !by_expert();
  if (!own_copy(plane) && !by_expert()) return window_view(route, plane);
  places = own_places(route, plane);
  return shaped(kind, places, route);
}

void Received::check_into(const Route& route, const DispatchOptions& options) const {
  if (options.into == nullptr) return;
  check_stats_into(route, options.into->eplb_gathered_stats);
  for (int plane = 0; plane < protocol::kFirstExtraPlane + route.num_extras; ++plane) {
    const TensorView into = wanted(options, plane);
    check_tensor(into, label_of(plane));
    if (!into.defined()) continue;
    if (!shows(plane) || route.request.payloads[static_cast<std::size_t>(plane)].row_bytes == 0) {
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
    blocks ? check_blocks(limits_, into, label_of(plane)) : check_rows(limits_, into, label_of(plane), into.num_rows());
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

Received::Outcome Received::place(Route& route,
                                  const DispatchOptions& options,
                                  const Allocate& allocate,
                                  DispatchResult& result) {
  route.rows_shown = rows_shown(route);
  engine::DispatchOutputs& outputs = route.request.outputs;
  const int num_planes = protocol::kFirstExtraPlane + route.num_extras;
  for (int plane = 0; plane < num_planes && !blocked(); ++plane) {
    const TensorView into = wanted(options, plane);
    if (into.defined() && into.num_rows() < route.rows_shown) {
      outputs = {};
      return {.needed_rows = route.rows_shown, .has_views = true};
    }
  }
  has_views_ = false;
  outputs.rows_shown = route.rows_shown;
  outputs.rows_per_block = route.rows_per_block;
  outputs.count_experts = route.has_ids && protocol::routed(limits_.plan.spec.placement);
  result.extra_payloads.resize(static_cast<std::size_t>(route.num_extras));
  for (int plane = 0; plane < num_planes; ++plane) {
    TensorView& output = output_of(result, plane);
    output = {};
    if (shows(plane)) output = place_plane(route, plane, wanted(options, plane), allocate);
  }
  result.eplb_gathered_stats = place_stats(route, options);
  outputs.routes_per_expert = options.routes_per_expert.as<std::int32_t>();
  outputs.waited = options.wait_per_source.as<std::int64_t>();
  return {.needed_rows = 0, .has_views = has_views_};
}

void Received::finish(Route& route, const DispatchOptions& options, DispatchResult& result) const {
  fill_counts(route, result.counts);
  if (by_expert()) finish_experts(route, options, result);
}

}  // namespace tokenyard::communication
