// SPDX-License-Identifier: Apache-2.0
// Where tokens with ids in host memory go: each once to every rank that owns one of its experts.
#pragma once

#include <cstdint>

#include "engine/engine.h"

namespace tokenyard::engine {

struct RouteRule {
  const MoeParams& params;
  int num_ranks = 1;
  int rank = 0;
  std::int64_t max_tokens = 0;  // of a rank
};

// Fills the round's destinations, wire ids and rows_sent, which have been reserved. Throws kInvalidArgument for ids
// that are no experts.
void plan_routes(const RouteRule& rule, const DispatchRequest& request, Round& round);

}  // namespace tokenyard::engine
