// SPDX-License-Identifier: Apache-2.0
#include "communication/sub_rounds.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <utility>

namespace tokenyard::communication {
namespace {

// Tokens of one sub-round among those of a rank's call.
struct Tokens {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

Tokens tokens_of_part(const Route& route, int index) {
  const std::int64_t per_part = route.limits.plan.shape.max_tokens;
  const std::int64_t first = std::min(index * per_part, route.request.num_tokens);
  return {first, std::min(per_part, route.request.num_tokens - first)};
}

TensorView rows_of(TensorView tensor, const Tokens& tokens) {
  if (!tensor.defined()) return tensor;
  tensor.shape[0] = tokens.count;
  if (tokens.count > 0) tensor.data = static_cast<std::byte*>(tensor.data) + tokens.first * tensor.row_stride_bytes();
  return tensor;
}

engine::DispatchRequest request_of_part(const Route& route, int index) {
  const Tokens tokens = tokens_of_part(route, index);
  engine::DispatchRequest request = route.request;
  request.num_tokens = tokens.count;
  request.first_token = tokens.first;
  request.call_tokens = route.request.num_tokens;
  request.call_rows = route.call_rows;
  request.topk_ids = rows_of(request.topk_ids, tokens);
  for (engine::PayloadRows& payload : request.payloads) {
    if (payload.row_bytes > 0 && tokens.count > 0) payload.data += tokens.first * payload.stride;
  }
  if (route.has_ids) {
    const auto& ids = route.parts[static_cast<std::size_t>(index)].wire_ids;
    request.payloads[protocol::kIdsPlane].data = reinterpret_cast<const std::byte*>(ids.data());
  }
  return request;
}

void reserve(const Route& route, std::int64_t num_tokens, engine::Round& round) {
  protocol::WindowShape shape = route.limits.plan.shape;
  shape.max_tokens = num_tokens;
  const Limits& limits = route.limits;
  round.reserve(shape, limits.params.top_k, num_local_experts(limits.params, limits.rank, limits.num_ranks));
}

// For a rank that has no tokens left.
void make_empty(const Route& route, engine::Round& part) {
  reserve(route, 0, part);
  part.num_tokens = 0;
  part.route_epoch = route.parts[0].route_epoch;
  part.planes = route.parts[0].planes;
  part.first_destination[0] = 0;
  std::ranges::fill(part.rows_sent, 0);
}

// The same on every rank: all have read the same headers.
int parts_of_call(const engine::Round& first, std::int64_t per_part) {
  const std::int64_t most = *std::ranges::max_element(first.call_tokens_of);
  return std::max(1, static_cast<int>(protocol::ceil_div(most, per_part)));
}

}  // namespace

void SubRounds::plan(engine::Engine& engine, const Route* replay, Route& route) {
  const protocol::WindowShape& shape = route.limits.plan.shape;
  const std::int64_t parts = std::max<std::int64_t>(1, protocol::ceil_div(route.request.num_tokens, shape.max_tokens));
  if (std::ssize(route.parts) < parts) route.parts.resize(static_cast<std::size_t>(parts));
  route.num_parts = 0;
  route.landed = false;
  route.call_rows.assign(static_cast<std::size_t>(shape.num_ranks), 0);
  reserve(route, 0, route.round);
  for (int index = 0; index < parts; ++index) {
    engine::Round& part = route.parts[static_cast<std::size_t>(index)];
    engine::DispatchRequest request = request_of_part(route, index);
    if (replay != nullptr) {
      request.replay = replay->num_parts > 0 ? &replay->parts[static_cast<std::size_t>(index)] : &replay->round;
    }
    reserve(route, request.num_tokens, part);
    engine.plan(request, part);
    part.planes = route.round.planes;
    std::ranges::transform(route.call_rows, part.rows_sent, route.call_rows.begin(), std::plus{});
  }
  route.num_parts = static_cast<int>(parts);
}

Status SubRounds::dispatch(engine::Engine& engine, std::optional<std::int64_t> shown, Route& route) {
  const protocol::WindowShape& shape = route.limits.plan.shape;
  int num_parts = 1;
  for (int index = 0; index < num_parts; ++index) {
    const engine::DispatchRequest request = request_of_part(route, index);
    const Status sent = engine.dispatch_send(request, route.parts[static_cast<std::size_t>(index)]);
    if (!sent.ok()) return sent;
    if (index == 0) {
      num_parts = parts_of_call(route.parts[0], shape.max_tokens);
      if (num_parts == 1 && shown.value_or(0) <= shape.num_ranks * shape.max_tokens) {
        std::swap(route.round, route.parts[0]);
        route.num_parts = 0;
        return {};
      }
      try {
        begin_landing(route, num_parts, shown);
      } catch (...) {
        engine.release(route.parts[0]);
        if (num_parts > 1) engine.abort_dispatch();
        throw;
      }
    }
    engine::Round& part = route.parts[static_cast<std::size_t>(index)];
    const Status received = engine.dispatch_receive(request, part);
    if (!received.ok()) return received;
    land(part, route);
    engine.release(part);
  }
  if (num_parts == 1) {
    // One round as any other; only that its rows are elsewhere.
    std::swap(route.parts[0].rows, route.round.rows);
    std::swap(route.parts[0].planes, route.round.planes);
    std::swap(route.parts[0], route.round);
    route.num_parts = 0;
  }
  return {};
}

// All that the first sub-round's headers say of the call: how many rows come, and from whom.
void SubRounds::begin_landing(Route& route, int num_parts, std::optional<std::int64_t> shown) {
  if (std::ssize(route.parts) < num_parts) route.parts.resize(static_cast<std::size_t>(num_parts));
  for (int index = route.num_parts; index < num_parts; ++index)
    make_empty(route, route.parts[static_cast<std::size_t>(index)]);
  route.num_parts = num_parts;

  const engine::Round& first = route.parts[0];
  engine::Round& all = route.round;
  all.epoch = first.epoch;
  all.route_epoch = first.route_epoch;
  all.num_tokens = route.request.num_tokens;
  all.rows_sent = route.call_rows;
  all.tokens_of = first.call_tokens_of;
  all.rows_received = first.call_rows_from;
  all.num_rows = 0;
  for (std::size_t source = 0; source < all.rows_received.size(); ++source) {
    all.row_base[source] = all.result_row[source] = static_cast<std::int32_t>(all.num_rows);
    all.num_rows += all.rows_received[source];
  }
  std::array<std::int64_t, protocol::kMaxPlanes> row_bytes{};
  for (std::size_t i = 0; i < row_bytes.size(); ++i)
    row_bytes[i] = route.request.payloads[i].row_bytes;
  all.planes = protocol::plan_planes(row_bytes, shown.value_or(all.num_rows));
  const std::int64_t bytes = std::max<std::int64_t>(all.planes.bytes, 1);  // no rows have an address, too
  if (bytes > rows_capacity_) {
    rows_capacity_ = 0;
    rows_.reset();  // never both
    rows_ = engine::make_untouched_memory(bytes);
    rows_capacity_ = bytes;
  }
  all.rows = rows_.get();
  all.space_stride = 0;
  route.landed = true;
}

// Each source's rows follow those of the sub-rounds before. With a limit, the rows kept of one sub-round are its first
// ones, as they are of the call: sources come in the same order.
void SubRounds::land(engine::Round& part, Route& route) const {
  engine::Round& all = route.round;
  part.row_limit = 0;
  for (std::size_t source = 0; source < part.rows_received.size(); ++source) {
    const std::int64_t to = all.result_row[source];
    const std::int64_t rows = part.rows_received[source];
    const std::int64_t kept = std::clamp<std::int64_t>(route.request.row_limit - to, 0, rows);
    part.result_row[source] = static_cast<std::int32_t>(to);
    part.row_limit += kept;
    all.result_row[source] += part.rows_received[source];
    for (std::size_t i = 0; i < all.planes.planes.size() && kept > 0; ++i) {
      const protocol::Plane& from = part.planes.planes[i];
      if (from.row_bytes == 0) continue;
      std::memcpy(rows_.get() + all.planes.planes[i].offset + to * from.stride,
                  part.rows + from.offset + part.row_base[source] * from.stride,
                  static_cast<std::size_t>(kept * from.stride));
    }
  }
}

// As in one round, a rank that gives up ends the combine of those whom it owes rows, and of no others: whoever is told
// so plays the other sub-rounds to their end.
Status SubRounds::combine(engine::Engine& engine, Route& route) {
  Status outcome;
  std::optional<Error> failure;
  for (int index = 0; index < route.num_parts; ++index) {
    engine::Round& part = route.parts[static_cast<std::size_t>(index)];
    const Tokens tokens = tokens_of_part(route, index);
    Status status = engine.combine_send(route.expert_output, part);
    if (!status.ok()) return status;
    engine::CombineTarget target;
    target.output = rows_of(route.target.output, tokens);
    target.topk_weights = rows_of(route.target.topk_weights, tokens);
    for (std::size_t i = 0; i < target.bias.size(); ++i)
      target.bias[i] = rows_of(route.target.bias[i], tokens);
    try {
      status = engine.combine_receive(target, part);
    } catch (const Error& error) {
      if (!failure) failure = error;
      continue;
    }
    if (!engine.fault().ok()) return status;
    if (outcome.ok() && !status.ok()) {
      outcome = status;
    } else {
      outcome.missing_rows += status.missing_rows;
    }
  }
  if (failure) throw Error(*failure);
  return outcome;
}

void SubRounds::abort_combine(engine::Engine& engine, const Route& route) {
  if (route.num_parts == 0) engine.abort_combine(route.round);
  for (int index = 0; index < route.num_parts; ++index)
    engine.abort_combine(route.parts[static_cast<std::size_t>(index)]);
}

}  // namespace tokenyard::communication
