// SPDX-License-Identifier: Apache-2.0
// Where this rank's tokens go: each token once to every rank that owns one of its experts.
#include <algorithm>
#include <array>
#include <string>

#include "engine/host/host_engine.h"
#include "protocol/owner.h"

namespace tokenyard::engine::host {
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

void copy_route(const Round& from, Round& to) {
  const auto tokens = static_cast<std::size_t>(from.num_tokens);
  const auto copies = from.first_destination[tokens];
  std::copy_n(from.first_destination.begin(), tokens + 1, to.first_destination.begin());
  std::copy_n(from.destinations.begin(), copies, to.destinations.begin());
  std::ranges::copy(from.wire_ids, to.wire_ids.begin());
  std::ranges::copy(from.rows_sent, to.rows_sent.begin());
  to.route_epoch = from.route_epoch;
}

void plan_every_rank(int num_ranks, Round& round) {
  std::int32_t next = 0;
  for (std::int64_t token = 0; token < round.num_tokens; ++token) {
    round.first_destination[static_cast<std::size_t>(token)] = next;
    for (int rank = 0; rank < num_ranks; ++rank)
      round.destinations[static_cast<std::size_t>(next++)] = {rank, 0};
  }
  round.first_destination[static_cast<std::size_t>(round.num_tokens)] = next;
  std::ranges::fill(round.rows_sent, static_cast<std::int32_t>(round.num_tokens));
}

}  // namespace

void HostEngine::plan(const DispatchRequest& request, Round& round) {
  round.num_tokens = request.num_tokens;
  if (request.replay != nullptr) {
    copy_route(*request.replay, round);
    return;
  }
  if (!protocol::routed(setup_.spec.placement)) {
    plan_every_rank(setup_.num_ranks, round);
    return;
  }
  const MoeParams& params = setup_.params;
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
    const int count = owners_of(params, setup_.num_ranks, wire, owners);
    for (int i = 0; i < count; ++i) {
      const std::int32_t owner = owners[static_cast<std::size_t>(i)];
      const std::int64_t row = static_cast<std::int64_t>(setup_.rank) * setup_.layout.shape().max_tokens + token;
      round.destinations[static_cast<std::size_t>(next++)] = {owner, static_cast<std::int32_t>(row)};
      ++round.rows_sent[static_cast<std::size_t>(owner)];
    }
  }
  round.first_destination[static_cast<std::size_t>(request.num_tokens)] = next;
}

}  // namespace tokenyard::engine::host
