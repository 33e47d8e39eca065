// SPDX-License-Identifier: Apache-2.0
#include "engine/route_plan.h"

#include <algorithm>
#include <array>
#include <string>

#include "tokenyard/error.h"

#include "protocol/owner.h"

namespace tokenyard::engine {
namespace {

// Ids of one dtype, read row by row.
class IdReader {
 public:
  explicit IdReader(const DispatchRequest& request)
      : ids_(request.topk_ids), first_token_(request.first_token), stride_(ids_.row_stride_bytes()) {}

  // The token's index in the whole call, as messages say it.
  [[nodiscard]] std::int64_t in_call(std::int64_t token) const { return first_token_ + token; }

  [[nodiscard]] std::int64_t at(std::int64_t token, int slot) const {
    const std::byte* row = static_cast<const std::byte*>(ids_.data) + token * stride_;
    if (ids_.dtype == Dtype::kI32) return reinterpret_cast<const std::int32_t*>(row)[slot];
    return reinterpret_cast<const std::int64_t*>(row)[slot];
  }

 private:
  const TensorView& ids_;
  std::int64_t first_token_;
  std::int64_t stride_;
};

[[noreturn]] void refuse_id(const MoeParams& params, std::int64_t token, int slot, std::int64_t id) {
  throw Error(ErrorCode::kInvalidArgument, "topk_ids[" + std::to_string(token) + ", " + std::to_string(slot) + "] is " +
                                               std::to_string(id) + "; it must be in [0, " +
                                               std::to_string(params.num_experts) + "), -1 or the invalid id " +
                                               std::to_string(params.invalid_expert_id));
}

// Reads one token's ids into wire ids; -1 where there is no expert. Returns how many experts there are.
int read_ids(const MoeParams& params, const IdReader& reader, std::int64_t token, std::span<std::int32_t> wire) {
  int live = 0;
  for (int slot = 0; slot < params.top_k; ++slot) {
    const std::int64_t id = reader.at(token, slot);
    const bool none = id == -1 || id == params.invalid_expert_id;
    if (!none && (id < 0 || id >= params.num_experts)) refuse_id(params, reader.in_call(token), slot, id);
    wire[static_cast<std::size_t>(slot)] = none ? -1 : static_cast<std::int32_t>(id);
    live += none ? 0 : 1;
  }
  return live;
}

// The distinct owners of a token's experts, ascending.
int owners_of(const MoeParams& params,
              int num_ranks,
              std::span<const std::int32_t> wire,
              std::array<std::int32_t, kMaxTopK>& owners) {
  int count = 0;
  for (const std::int32_t id : wire) {
    if (id < 0) continue;
    const std::int32_t owner = protocol::owner_of(params.num_experts, num_ranks, id);
    int place = count;
    while (place > 0 && owners[static_cast<std::size_t>(place - 1)] > owner)
      --place;
    if (place > 0 && owners[static_cast<std::size_t>(place - 1)] == owner) continue;
    for (int i = count; i > place; --i)
      owners[static_cast<std::size_t>(i)] = owners[static_cast<std::size_t>(i - 1)];
    owners[static_cast<std::size_t>(place)] = owner;
    ++count;
  }
  return count;
}

}  // namespace

void plan_routes(const RouteRule& rule, const DispatchRequest& request, Round& round) {
  const MoeParams& params = rule.params;
  const IdReader reader(request);
  const auto top_k = static_cast<std::size_t>(params.top_k);
  std::array<std::int32_t, kMaxTopK> owners{};
  std::ranges::fill(round.rows_sent, 0);
  std::int32_t next = 0;
  for (std::int64_t token = 0; token < request.num_tokens; ++token) {
    const auto at = static_cast<std::size_t>(token);
    const std::span<std::int32_t> wire(round.wire_ids.data() + at * top_k, top_k);
    const int live = read_ids(params, reader, token, wire);
    if (live > params.num_experts) {
      throw Error(ErrorCode::kInvalidArgument, "token " + std::to_string(reader.in_call(token)) + " names " +
                                                   std::to_string(live) + " experts and there are " +
                                                   std::to_string(params.num_experts) + "; pad the row with -1");
    }
    round.first_destination[at] = next;
    const int count = owners_of(params, rule.num_ranks, wire, owners);
    for (int i = 0; i < count; ++i) {
      const std::int32_t owner = owners[static_cast<std::size_t>(i)];
      const std::int64_t row = rule.rank * rule.max_tokens + token;
      round.destinations[static_cast<std::size_t>(next++)] = {owner, static_cast<std::int32_t>(row)};
      ++round.rows_sent[static_cast<std::size_t>(owner)];
    }
  }
  round.first_destination[static_cast<std::size_t>(request.num_tokens)] = next;
}

}  // namespace tokenyard::engine
