// SPDX-License-Identifier: Apache-2.0
#include "communication/backend.h"

#include <algorithm>
#include <limits>

#include "tokenyard/error.h"
#include "tokenyard/group.h"

#include "protocol/block_cast.h"

namespace tokenyard::communication {

namespace {

// Rows and what combine keeps of them; all else in a window is small beside these.
void require_addressable(const protocol::WindowShape& shape) {
  const std::int64_t rows = shape.num_ranks * shape.max_tokens;
  const std::int64_t most = kMaxWindowBytes / rows;
  const std::int64_t rest = shape.row_capacity + shape.combine_row_bytes + shape.weights_row_bytes;
  if (rest <= most && shape.extra_capacity <= most - rest) return;
  throw Error(ErrorCode::kInvalidArgument,
              "a window of " + std::to_string(rows) + " rows of " + std::to_string(rest) + " and " +
                  std::to_string(shape.extra_capacity) + " bytes (hidden_size, extra_payload_bytes_per_token) is " +
                  "larger than any memory; rows of at most " + std::to_string(most) + " bytes fit");
}

}  // namespace

Plan plan_checked(const Backend& backend, const MoeParams& params, const BackendConfig& config, int num_ranks) {
  validate(params);
  if (num_ranks < 1 || num_ranks > Group::kMaxRanks) {
    throw Error(ErrorCode::kInvalidArgument, "num_ranks is " + std::to_string(num_ranks) + "; it must be in [1, " +
                                                 std::to_string(Group::kMaxRanks) + "]");
  }
  Plan plan = backend.plan(params, config, num_ranks);
  require_addressable(plan.shape);
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
