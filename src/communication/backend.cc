// SPDX-License-Identifier: Apache-2.0
#include "communication/backend.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <string>

#include "tokenyard/error.h"
#include "tokenyard/group.h"

#include "protocol/block_cast.h"
#include "protocol/queue_layout.h"

namespace tokenyard::communication {

namespace {

std::string listed(const MoeParams& params, const protocol::WindowShape& shape) {
  return std::to_string(shape.num_ranks) + " ranks, max_tokens_per_rank " + std::to_string(params.max_tokens_per_rank) +
         ", hidden_size " + std::to_string(params.hidden_size) + ", num_experts " + std::to_string(params.num_experts) +
         ", " + std::to_string(shape.extra_capacity) + " bytes of extra payloads a token and " +
         std::to_string(shape.queue_bytes) + " bytes of a queue";
}

[[noreturn]] void refuse_size(const std::string& what, const MoeParams& params, const protocol::WindowShape& shape) {
  throw Error(ErrorCode::kInvalidArgument, what + ", more than the " + std::to_string(kMaxWindowBytes) +
                                               " (2^56) that a memory can have: " + listed(params, shape));
}

// Floating point does not wrap: whatever comes out below twice the limit can then be worked out in 64 bits.
void require_addressable(const MoeParams& params, const Plan& plan) {
  const protocol::WindowShape& shape = plan.shape;
  const auto real = [](std::int64_t value) { return static_cast<double>(value); };
  const double rows = real(shape.num_ranks) * real(shape.max_tokens);
  const double row = real(shape.row_capacity) + real(shape.extra_capacity);
  const double back = real(shape.combine_row_bytes) + real(shape.weights_row_bytes);
  const double experts =
      protocol::by_expert(shape.placement) ? real(num_local_experts(params, 0, shape.num_ranks)) : 1.0;
  // Rows that cross in queues have no places in the window.
  const double places = shape.queue_bytes > 0 ? 0.0 : real(shape.depth) * rows;
  const double window = places * (row + back) + real(shape.depth) * rows * real(shape.given_weights_row_bytes) +
                        2 * real(shape.num_ranks) * real(shape.queue_bytes);
  const double output = experts * rows * row;
  constexpr double kMost = 2 * static_cast<double>(kMaxWindowBytes);
  if (window < kMost && output < kMost) return;
  std::ostringstream sizes;
  sizes << "a window of about " << window << " bytes and results of about " << output;
  refuse_size(sizes.str(), params, shape);
}

}  // namespace

std::int64_t window_bytes(const Plan& plan) {
  const protocol::WindowShape& shape = plan.shape;
  const std::int64_t queues =
      shape.queue_bytes > 0 ? protocol::QueueLayout::of(shape.num_ranks, shape.queue_bytes).bytes() : 0;
  return protocol::WindowLayout::of(shape).bytes() + queues;
}

std::int64_t output_bytes(const MoeParams& params, const protocol::WindowLayout& layout) {
  const protocol::WindowShape& shape = layout.shape();
  const std::int64_t rows = layout.combine_rows() * (shape.row_capacity + shape.extra_capacity);
  if (!protocol::by_expert(shape.placement)) return rows;
  // A row for every expert, each with the number of its token; rank 0 owns as many experts as any.
  const std::int64_t experts = num_local_experts(params, 0, shape.num_ranks);
  const std::int64_t ranges = std::int64_t{shape.num_ranks} * 2 * 4;
  return experts * (rows + layout.combine_rows() * 4 + ranges);
}

Plan plan_checked(const Backend& backend, const MoeParams& params, const BackendConfig& config, int num_ranks) {
  validate(params);
  if (num_ranks < 1 || num_ranks > Group::kMaxRanks) {
    throw Error(ErrorCode::kInvalidArgument, "num_ranks is " + std::to_string(num_ranks) + "; it must be in [1, " +
                                                 std::to_string(Group::kMaxRanks) + "]");
  }
  Plan plan = backend.plan(params, config, num_ranks);
  require_addressable(params, plan);
  if (const std::int64_t window = window_bytes(plan); window > kMaxWindowBytes) {
    refuse_size("a window of " + std::to_string(window) + " bytes", params, plan.shape);
  }
  const std::int64_t output = output_bytes(params, protocol::WindowLayout::of(plan.shape));
  if (output > kMaxWindowBytes) {
    refuse_size("results of " + std::to_string(output) + " bytes", params, plan.shape);
  }
  return plan;
}

protocol::WindowShape base_shape(const MoeParams& params, protocol::Placement placement, int num_ranks) {
  const std::int64_t rows = static_cast<std::int64_t>(num_ranks) * params.max_tokens_per_rank;
  if (rows > std::numeric_limits<std::int32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument, std::to_string(num_ranks) + " ranks with " +
                                                 std::to_string(params.max_tokens_per_rank) +
                                                 " tokens each are more than 2^31 - 1 rows");
  }
  // Ids are cargo where tokens go to every rank, and cross in the caller's dtype: up to 8 bytes each.
  const std::int64_t id_bytes = protocol::routed(placement) ? 4 : 8;
  protocol::WindowShape shape;
  shape.num_ranks = num_ranks;
  shape.tokens_per_chunk = protocol::chunk_tokens(dispatch_bytes_per_token(params));
  shape.max_tokens = params.max_tokens_per_rank;
  shape.placement = placement;
  // Each of values and scales is rounded up, and another split of the same bytes may round up more than this one.
  std::int64_t row = protocol::align_up(value_bytes_per_token(params), protocol::kRowAlignment) +
                     protocol::align_up(scale_bytes_per_token(params), protocol::kRowAlignment) +
                     2 * protocol::kRowAlignment;
  if (protocol::by_expert(placement)) {
    // Of small rows a cast with its scales may take more than the rows themselves.
    const protocol::RowBytes cast = protocol::cast_row_bytes(DispatchCast::kFp8Block128, params.hidden_size);
    row = std::max(row, protocol::align_up(cast.values, protocol::kRowAlignment) +
                            protocol::align_up(cast.scales, protocol::kRowAlignment));
  }
  shape.row_capacity = row + protocol::align_up(params.top_k * id_bytes, protocol::kRowAlignment) +
                       protocol::align_up(std::int64_t{params.top_k} * 4, protocol::kRowAlignment);
  shape.combine_row_bytes = std::int64_t{params.hidden_size} * size_of(params.dtype);
  return shape;
}

}  // namespace tokenyard::communication
