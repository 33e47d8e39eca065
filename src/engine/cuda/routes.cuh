// SPDX-License-Identifier: Apache-2.0
// What ends a round, by the threads of one block.
#pragma once

#include <cstdint>

#include "engine/cuda/tasks.h"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/windows.cuh"

namespace tokenyard::engine::cuda {

// Tells every source that rows up to `epoch` will not be read any more (pairs with wait_for_space). Headers are
// further.
__device__ inline void release_views(const Common& common, std::uint32_t epoch) {
  for (int source = static_cast<int>(threadIdx.x); source < common.num_ranks; source += kThreads) {
    store_release_system(progress_of(common, source, protocol::kDispatchPhase, common.rank),
                         protocol::encode_progress(epoch, common.board->epochs[protocol::kDispatchPhase]));
  }
  if (threadIdx.x == 0) common.board->rows_released = epoch;
}

// Counters of a route are 0 before a dispatch, which adds to them.
__device__ inline void clear_route(const RouteMemory& route, int num_ranks) {
  for (int rank = static_cast<int>(threadIdx.x); rank < num_ranks; rank += kThreads) {
    route.rows_sent[rank] = 0;
    route.rows_received[rank] = 0;
  }
  if (threadIdx.x == 0) route.state[kRouteAborted] = route.state[kCombineAborted] = 0;
}

}  // namespace tokenyard::engine::cuda
