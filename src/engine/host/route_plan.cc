// SPDX-License-Identifier: Apache-2.0
// Where this rank's tokens go: along a handle's route, to every rank, or to the owners of their experts.
#include "engine/route_plan.h"

#include <algorithm>

#include "engine/host/host_engine.h"

namespace tokenyard::engine::host {
namespace {

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
  plan_routes({.params = setup_.params,
               .num_ranks = setup_.num_ranks,
               .rank = setup_.rank,
               .max_tokens = setup_.layout.shape().max_tokens},
              request, round);
}

}  // namespace tokenyard::engine::host
