// SPDX-License-Identifier: Apache-2.0
#include "routing.h"

#include <algorithm>
#include <cstddef>

#include "cli/bench_trace.h"

namespace tokenyard::bench {
namespace {

std::vector<std::int64_t> rows_of(const cli::BenchShape& shape, const std::vector<std::int32_t>& ids) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(shape.num_ranks));
  std::vector<std::int64_t> last(rows.size(), -1);  // token that was counted
  for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
    for (int slot = 0; slot < shape.top_k; ++slot) {
      const auto owner =
          static_cast<std::size_t>(cli::bench_owner(shape, ids[static_cast<std::size_t>(token * shape.top_k + slot)]));
      if (last[owner] == token) continue;
      last[owner] = token;
      ++rows[owner];
    }
  }
  return rows;
}

Traffic traffic_of(const Routing& routing, ExchangeKind kind, std::int64_t bytes_per_row) {
  Traffic traffic;
  const auto ranks = routing.rows.size();
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    std::int64_t out = 0;
    std::int64_t in = 0;
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      out += kind == ExchangeKind::kAllGather ? routing.shape.num_tokens : routing.rows[rank][peer];
      in += kind == ExchangeKind::kAllGather ? routing.shape.num_tokens : routing.rows[peer][rank];
    }
    traffic.total += out * bytes_per_row;
    traffic.per_direction = std::max(traffic.per_direction, std::max(out, in) * bytes_per_row);
  }
  return traffic;
}

}  // namespace

Routing make_routing(const cli::BenchShape& shape, const std::string& trace) {
  Routing routing{.shape = shape};
  if (shape.skew == cli::BenchSkew::kTrace) {
    routing.ids = cli::trace_ids(trace, shape);
  } else {
    for (int rank = 0; rank < shape.num_ranks; ++rank)
      routing.ids.push_back(cli::bench_ids(shape, rank));
  }
  for (const auto& ids : routing.ids)
    routing.rows.push_back(rows_of(shape, ids));
  return routing;
}

Traffic dispatch_traffic(const Routing& routing, ExchangeKind kind) {
  return traffic_of(routing, kind, routing.shape.hidden_size * 2 + std::int64_t{routing.shape.top_k} * 8);
}

// What comes back crosses the other way, which changes neither sum.
Traffic combine_traffic(const Routing& routing, ExchangeKind kind) {
  return traffic_of(routing, kind, routing.shape.hidden_size * 2);
}

}  // namespace tokenyard::bench
