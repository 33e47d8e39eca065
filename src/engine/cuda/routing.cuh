// SPDX-License-Identifier: Apache-2.0
// Where a token goes, worked out by one warp.
#pragma once

#include <cstdint>

#include "engine/cuda/tasks.h"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;

__device__ __forceinline__ int lane_index() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

__device__ __forceinline__ int warp_index() {
  return static_cast<int>(threadIdx.x) / kWarp;
}

// The tokens of a call: the most that there may be, or how many the device says there are.
__device__ __forceinline__ std::int64_t tokens_of_call(std::int64_t most, const std::int32_t* on_device) {
  if (on_device == nullptr) return most;
  const std::int64_t given = *on_device;
  return given < 0 ? 0 : min(given, most);
}

// What the threads of a block know of the token they send.
struct TokenOfBlock {
  std::int32_t wire_ids[kMaxTopK];
  std::int32_t destinations[kMaxTopK];
  int num_destinations;
};

// The wire ids of a token and the distinct ranks that own them, ascending; by one warp.
__device__ inline void route_token(
    const Common& common, const RouteMemory& route, const Ids& ids, std::int64_t token, TokenOfBlock& shared) {
  constexpr int kSlots = kMaxTopK / kWarp;  // of a lane
  const std::byte* row = ids.from + token * ids.from_stride;
  int owners[kSlots];
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    const int slot = lane_index() + k * kWarp;
    owners[k] = -1;
    if (slot >= ids.top_k) continue;
    const std::int64_t id = ids.from_i64 ? reinterpret_cast<const std::int64_t*>(row)[slot]
                                         : std::int64_t{reinterpret_cast<const std::int32_t*>(row)[slot]};
    const bool expert = id >= 0 && id < ids.num_experts && id != ids.invalid_id;
    shared.wire_ids[slot] = expert ? static_cast<std::int32_t>(id) : -1;
    if (expert) {
      owners[k] = protocol::owner_of(ids.num_experts, common.num_ranks, static_cast<int>(id));
    } else if (id != -1 && id != ids.invalid_id) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&common.board->invalid_ids), 1ULL);
    }
  }
  int count = 0;
  for (int w = 0; w < route.words; ++w) {
    std::uint32_t bits = 0;
#pragma unroll
    for (const int owner : owners)
      bits |= owner >= 0 && owner / kWordBits == w ? 1U << (owner % kWordBits) : 0U;
    const std::uint32_t word = __reduce_or_sync(kAllLanes, bits);
    const int lane = lane_index();
    if (lane == 0) route.ranks_of_token[token * route.words + w] = word;
    if ((word >> lane & 1U) != 0)
      shared.destinations[count + __popc(word & ((1U << lane) - 1U))] = w * kWordBits + lane;
    count += __popc(word);
  }
  if (lane_index() == 0) shared.num_destinations = count;
}

__device__ __forceinline__ void store_id(std::byte* row, int slot, bool i64, std::int64_t id) {
  if (i64) {
    reinterpret_cast<std::int64_t*>(row)[slot] = id;
  } else {
    reinterpret_cast<std::int32_t*>(row)[slot] = static_cast<std::int32_t>(id);
  }
}

}  // namespace tokenyard::engine::cuda
