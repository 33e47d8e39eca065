// SPDX-License-Identifier: Apache-2.0
// The picks of all ranks, and what follows from them on the host: how many rows go where, and how many bytes cross.
// Thread rule: pure functions; a Routing is read by all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/bench_routing.h"

namespace tokenyard::bench {

enum class ExchangeKind { kAllGather, kAllToAll };

struct Routing {
  cli::BenchShape shape{};
  std::vector<std::vector<std::int32_t>> ids{};   // of each rank: [num_tokens, top_k]
  std::vector<std::vector<std::int64_t>> rows{};  // [source][owner]: tokens of the source that have an expert there
};

// `trace` is the file of BenchSkew::kTrace.
[[nodiscard]] Routing make_routing(const cli::BenchShape& shape, const std::string& trace);

// Rows, ids and weights that crossed between GPUs; own rows do not count.
struct Traffic {
  std::int64_t total = 0;          // of all ranks
  std::int64_t per_direction = 0;  // the most that went into one GPU, or out of one
};

[[nodiscard]] Traffic dispatch_traffic(const Routing& routing, ExchangeKind kind);
[[nodiscard]] Traffic combine_traffic(const Routing& routing, ExchangeKind kind);

}  // namespace tokenyard::bench
