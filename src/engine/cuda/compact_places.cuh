// SPDX-License-Identifier: Apache-2.0
// Where the rows of a token are at the ranks that it went to, worked out by one warp from the route.
#pragma once

#include <cstdint>

#include "engine/cuda/compact_tasks.h"
#include "engine/cuda/routing.cuh"

namespace tokenyard::engine::cuda {

// The tokens before this one in its chunk, as bits of the chunk's masks.
struct InChunk {
  std::int64_t chunk = 0;
  int index = 0;
};

// A chunk's size is a power of two; a division takes a GPU longer than the rest of a token's places.
__device__ __forceinline__ int chunk_shift(const Common& common) {
  return __ffs(common.layout.shape().tokens_per_chunk) - 1;
}

__device__ __forceinline__ InChunk in_chunk(const Common& common, std::int64_t token) {
  return {token >> chunk_shift(common), static_cast<int>(token) & (common.layout.shape().tokens_per_chunk - 1)};
}

__device__ __forceinline__ int chunks_of(const Common& common, std::int64_t tokens) {
  const int size = common.layout.shape().tokens_per_chunk;
  return static_cast<int>((tokens + size - 1) >> chunk_shift(common));
}

// What a lane knows of one rank and chunk.
struct ChunkPlaces {
  std::uint64_t mask = 0;
  std::int32_t row = 0;  // of the chunk's first token there
};

__device__ __forceinline__ ChunkPlaces load_places(const Common& common,
                                                   const CompactRoute& route,
                                                   std::int64_t chunk,
                                                   int rank) {
  if (rank >= common.num_ranks) return {};
  const std::uint32_t before = route.first_of_chunk[rank * std::int64_t{route.chunk_stride} + chunk];
  return {route.basic.masks[rank * std::int64_t{route.chunks} + chunk],
          route.begin_at[rank] + static_cast<std::int32_t>(before)};
}

__device__ __forceinline__ std::int32_t place_in(const ChunkPlaces& places, int index) {
  return places.row + __popcll(places.mask & ((std::uint64_t{1} << index) - 1U));
}

// Calls visit(position, rank, row) for each rank that has a row of the token, ascending by rank; each call by a lane of
// its own. `known`: of the lane's rank among the first kWarp. Returns how many there are, to all lanes.
template <class Visit>
__device__ int visit_places(
    const Common& common, const CompactRoute& route, const InChunk& at, const ChunkPlaces& known, const Visit& visit) {
  const unsigned lanes_before = (1U << lane_index()) - 1U;
  int count = 0;
  for (int first = 0; first < common.num_ranks; first += kWarp) {
    const int rank = first + lane_index();
    const ChunkPlaces places = first == 0 ? known : load_places(common, route, at.chunk, rank);
    const bool has_row = (places.mask >> at.index & 1U) != 0;
    const unsigned ranks = __ballot_sync(kAllLanes, static_cast<int>(has_row));
    if (has_row) visit(count + __popc(ranks & lanes_before), rank, place_in(places, at.index));
    count += __popc(ranks);
  }
  return count;
}

}  // namespace tokenyard::engine::cuda
