// SPDX-License-Identifier: Apache-2.0
// The headers of a dispatch to every rank: each says how many rows its rank brings, and they are compared.
#pragma once

#include <cstdint>

#include "engine/cuda/every_rank_tasks.h"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"
#include "protocol/digest.h"

namespace tokenyard::engine::cuda {

// Rows that the rank takes up in the result: where sizes were told, they are its places, whatever the device says.
__device__ inline std::int64_t rows_taken(const Announcement& said, std::int64_t tokens) {
  return said.agreed == kNoSizes ? tokens : said.num_tokens;
}

// By a block. A header line is free when its peer read the one before the last (pairs with release of progress); the
// stamp releases the other fields (pairs with wait_header).
__device__ inline void announce(const Announcement& said, std::uint32_t epoch, std::int64_t tokens) {
  const Common& common = said.common;
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    said.route.rows_sent[peer] = static_cast<std::uint32_t>(tokens);
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kDispatchPhase, peer);
    const bool free = wait_until(common, {peer, Phase::kDispatch, epoch}, [&] {
      return protocol::reached(protocol::headers_read(load_acquire_system(word)), epoch - protocol::kHeaderSlots);
    });
    if (!free) continue;
    protocol::HeaderLine* header = header_of(common, peer, protocol::kDispatchPhase, epoch, common.rank);
    header->digest = said.digest;
    header->agreed = said.agreed;
    header->num_tokens = static_cast<std::int32_t>(tokens);
    header->call_tokens = static_cast<std::int32_t>(rows_taken(said, tokens));
    header->status = protocol::HeaderStatus::kOk;
    store_release_system(&header->stamp, protocol::encode_stamp(epoch, static_cast<std::uint32_t>(tokens)));
  }
  if (threadIdx.x == 0) said.route.state[kRouteTokens] = static_cast<std::uint32_t>(tokens);
}

// By a thread. Null when it does not come, or when this rank has found out that the operation was given up.
__device__ inline const protocol::HeaderLine* wait_header(const Announcement& said, int source, std::uint32_t epoch) {
  const Common& common = said.common;
  const protocol::HeaderLine* header = header_of(common, common.rank, protocol::kDispatchPhase, epoch, source);
  const bool there = wait_until(
      common, {source, Phase::kDispatch, epoch},
      [&] { return protocol::stamp_is(load_acquire_system(&header->stamp), epoch); }, said.route.state + kRouteAborted);
  return there && header->status != protocol::HeaderStatus::kAborted ? header : nullptr;
}

// By a thread, when all headers are here. Each rank knows by itself whether the sizes that ranks were told are those
// that ranks brought; where all ranks were told the same, each one's host has looked at its own.
__device__ inline bool sizes_are_right(const Announcement& said, std::uint32_t epoch) {
  const Common& common = said.common;
  protocol::Digest digest;
  for (int source = 0; source < common.num_ranks; ++source)
    digest.add(static_cast<std::uint64_t>(said.route.rows_received[source]));
  const std::int64_t right = protocol::as_agreed(digest);
  for (int source = 0; source < common.num_ranks; ++source) {
    const std::int64_t told = header_of(common, common.rank, protocol::kDispatchPhase, epoch, source)->agreed;
    if (told == kNoSizes || told == right) continue;
    give_up(common, said.route.state + kRouteAborted, NoticeKind::kMismatch, {source, Phase::kDispatch, epoch});
    return false;
  }
  return true;
}

// By one warp: waits for all headers, and leaves their sizes in the route. False when the operation ends here. Every
// rank comes to the same end: it is that of all headers together, which are the same everywhere.
__device__ inline bool verify(const Announcement& said, std::uint32_t epoch) {
  const Common& common = said.common;
  bool fine = true;
  bool some_told = false;
  bool all_told = true;
  for (int source = lane_index(); source < common.num_ranks; source += kWarp) {
    const Awaited awaited{source, Phase::kDispatch, epoch};
    const protocol::HeaderLine* header = header_of(common, common.rank, protocol::kDispatchPhase, epoch, source);
    const auto stamped = [&] { return protocol::stamp_is(load_acquire_system(&header->stamp), epoch); };
    // Also when the operation is given up already: the next one may be given up without another look at this rank's
    // peers, which must have ended the one before then.
    if (!wait_until(common, awaited, stamped)) {
      fine = false;
      continue;
    }
    const bool aborted = header->status == protocol::HeaderStatus::kAborted;
    const bool both_told = header->agreed != kNoSizes && said.agreed != kNoSizes;
    if (aborted || header->digest != said.digest || (both_told && header->agreed != said.agreed)) {
      give_up(common, said.route.state + kRouteAborted, aborted ? NoticeKind::kAborted : NoticeKind::kMismatch,
              awaited);
      fine = false;
      continue;
    }
    some_told = some_told || header->agreed != kNoSizes;
    all_told = all_told && both_told;
    said.route.tokens_of[source] = header->num_tokens;
    said.route.rows_received[source] = static_cast<std::uint32_t>(header->call_tokens);
  }
  if (__all_sync(kAllLanes, static_cast<int>(fine)) == 0) return false;
  const bool to_check =
      __any_sync(kAllLanes, static_cast<int>(some_told)) != 0 && __all_sync(kAllLanes, static_cast<int>(all_told)) == 0;
  if (!to_check) return true;
  __syncwarp();
  if (lane_index() == 0) fine = sizes_are_right(said, epoch);
  return __shfl_sync(kAllLanes, fine ? 1 : 0, 0) != 0;
}

}  // namespace tokenyard::engine::cuda
