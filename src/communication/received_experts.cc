// SPDX-License-Identifier: Apache-2.0
// Results by expert: the engine copies rows out of the window into memory that outlives them.
#include <limits>
#include <vector>

#include "communication/received.h"

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
  const std::int64_t rows = num_local_experts(limits_.params, limits_.rank, limits_.num_ranks) * layout_.combine_rows();
  const std::int64_t rows_bytes = protocol::payload_capacity(rows, layout_.shape().row_capacity, 0);
  const std::int64_t combine_row = std::int64_t{limits_.params.hidden_size} * size_of(limits_.params.dtype);
  combine_stride_ = protocol::align_up(combine_row, protocol::kRowAlignment);
  for (int i = 0; i < limits_.backend->info.contract.max_in_flight; ++i) {
    expert_buffers_.push_back({engine_.allocate(rows_bytes), engine_.allocate(rows * combine_stride_)});
  }
}

// Values first, then scales. Only rows of this communication's own memory have room for the padding of the wire's rows.
engine::OutputPlane Received::expert_places(const Route& route, int plane) const {
  const auto& planes = route.round.planes.planes;
  const protocol::Plane& wire = planes[static_cast<std::size_t>(plane)];
  const std::int64_t values = route.rows_shown * planes[protocol::kHiddenPlane].stride;
  const std::int64_t offset =
      plane == protocol::kHiddenPlane ? 0 : protocol::align_up(values, protocol::kPlaneAlignment);
  return {.data = expert_buffers_[static_cast<std::size_t>(route.buffer)].rows.get() + offset,
          .block_stride = route.rows_per_block * wire.stride,
          .row_stride = wire.stride,
          .row_bytes = wire.row_bytes,
          .dtype = route.kinds[static_cast<std::size_t>(plane)].dtype,
          .own = true};
}

void Received::finish_experts(Route& route, const DispatchOptions& options, DispatchResult& result) const {
  engine::ExpertRows& experts = route.round.experts;
  const bool on_device = experts.rows_on_device != nullptr;
  auto* tokens = on_device ? experts.source_tokens_on_device : experts.source_tokens.data();
  auto* ranges = on_device ? experts.source_ranges_on_device : experts.source_ranges.data();
  result.source_tokens = TensorView(tokens, Dtype::kI32, {route.num_blocks, route.rows_per_block});
  result.source_ranges = TensorView(ranges, Dtype::kI32, {route.num_blocks, limits_.num_ranks, 2});
  result.source_tokens.device = result.source_ranges.device = limits_.device;
  if (on_device) return;  // and added to the statistics there
  add_to(options.routes_per_expert, experts.routes_per_expert);
  add_to(options.wait_per_source, experts.waited);
}

TensorView Received::combine_buffer(const Route& route, Dtype dtype) const {
  TensorView view(expert_buffers_[static_cast<std::size_t>(route.buffer)].combine.get(), dtype,
                  {route.num_blocks, route.rows_per_block, limits_.params.hidden_size});
  view.device = limits_.device;
  const std::int64_t row_stride = combine_stride_ / size_of(dtype);
  view.strides[0] = row_stride * route.rows_per_block;
  view.strides[1] = row_stride;
  return view;
}

}  // namespace tokenyard::communication
