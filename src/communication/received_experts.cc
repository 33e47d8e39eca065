// SPDX-License-Identifier: Apache-2.0
// Results by expert: the engine copies rows out of the window into memory that outlives them, the caller's or this
// communication's own.
#include <algorithm>
#include <limits>
#include <vector>

#include "tokenyard/error.h"

#include "communication/received.h"
#include "communication/received_rows.h"

namespace tokenyard::communication {
namespace {

// Sums stop at the largest number there is: what the caller's memory held is the caller's.
template <class Integer>
void add_to(const TensorView& statistic, const std::vector<Integer>& values) {
  if (!statistic.defined()) return;
  constexpr Integer kMost = std::numeric_limits<Integer>::max();
  auto* to = statistic.as<Integer>();
  for (std::size_t i = 0; i < values.size(); ++i)
    to[i] = to[i] > kMost - values[i] ? kMost : to[i] + values[i];
}

}  // namespace

void Received::make_expert_buffers() {
  const std::int64_t rows = num_experts_ * layout_.combine_rows();
  const std::int64_t rows_bytes = protocol::payload_capacity(rows, layout_.shape().row_capacity, 0);
  const std::int64_t combine_row = std::int64_t{limits_.params.hidden_size} * size_of(limits_.params.dtype);
  combine_stride_ = protocol::align_up(combine_row, protocol::kRowAlignment);
  for (int i = 0; i < limits_.backend->info.contract.max_in_flight; ++i) {
    expert_buffers_.push_back(
        {engine::make_untouched_memory(rows_bytes), engine::make_untouched_memory(rows * combine_stride_)});
  }
}

void Received::place_expert_rows(Route& route,
                                 const DispatchOptions& options,
                                 const Allocate& allocate,
                                 DispatchResult& result) {
  if (!protocol::by_expert(limits_.plan.spec.placement)) return;
  check_into(route, options);
  const std::int64_t rows = route.num_blocks * route.rows_per_block;
  std::int64_t offset = 0;
  for (const int plane : {int{protocol::kHiddenPlane}, int{protocol::kScalePlane}}) {
    const auto at = static_cast<std::size_t>(plane);
    TensorView& output = output_of(result, plane);
    output = {};
    route.request.expanded[at] = {};
    const protocol::Plane& wire = route.round.planes.planes[at];
    if (wire.row_bytes == 0) continue;
    const PayloadKind& kind = route.kinds[at];
    const TensorView into = wanted(options, plane);
    const bool own = !into.defined() && !allocate;
    if (own) {
      std::byte* memory = expert_buffers_[static_cast<std::size_t>(route.buffer)].rows.get() + offset;
      output = shaped(kind, {memory, route.rows_per_block * wire.stride, wire.stride}, route, rows);
      offset = protocol::align_up(offset + rows * wire.stride, protocol::kPlaneAlignment);
    } else {
      output = place(route, plane, rows, into, allocate);
    }
    const RowPlaces places = places_of(output, kind, route.rows_per_block);
    // Only rows of this communication's own memory have room for the padding of the wire's rows.
    route.request.expanded[at] = {places.base, places.block_stride, places.row_stride,
                                  own ? wire.row_bytes : bytes_of_row(kind)};
  }
}

Received::Outcome Received::fill_experts(Route& route, const DispatchOptions& options, DispatchResult& result) {
  engine::ExpertRows& experts = route.round.experts;
  result.topk_ids = {};
  result.topk_weights = {};
  result.router_logits = {};
  result.eplb_gathered_stats = {};
  result.extra_payloads.clear();
  result.source_tokens =
      TensorView(experts.source_tokens.data(), Dtype::kI32, {route.num_blocks, route.rows_per_block});
  result.source_ranges =
      TensorView(experts.source_ranges.data(), Dtype::kI32, {route.num_blocks, limits_.num_ranks, 2});
  fill_counts(route, result.counts);
  add_to(options.routes_per_expert, experts.routes_per_expert);
  add_to(options.wait_per_source, experts.waited);
  return {};
}

TensorView Received::combine_buffer(const Route& route, Dtype dtype) const {
  TensorView view(expert_buffers_[static_cast<std::size_t>(route.buffer)].combine.get(), dtype,
                  {route.num_blocks, route.rows_per_block, limits_.params.hidden_size});
  const std::int64_t row_stride = combine_stride_ / size_of(dtype);
  view.strides[0] = row_stride * route.rows_per_block;
  view.strides[1] = row_stride;
  return view;
}

}  // namespace tokenyard::communication
