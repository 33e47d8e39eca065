// SPDX-License-Identifier: Apache-2.0
// The receiving half of an expert-major dispatch. All blocks work out where each source's rows begin at each expert;
// then warps wait for rows, a part of one each, and copy them to the experts that they are for.
#pragma once

#include <cstdint>

#include "engine/cuda/expert_lines.cuh"
#include "engine/cuda/expert_rows.cuh"
#include "engine/cuda/expert_state.cuh"

namespace tokenyard::engine::cuda {

// In shared memory.
struct ReceivedTable {
  std::int32_t* base = nullptr;       // [num_ranks, num_local]: rows of the source at the expert, then its first
  std::int32_t* tokens_of = nullptr;  // [num_ranks]
  std::int32_t* row_base = nullptr;   // [num_ranks]: the source's first row among all received ones, as route.items
  std::int32_t* routes = nullptr;     // [num_local]; used by the clerk
};

// What the lanes of a warp know of the row that they are at: of picks `lane` and `lane` + kWarp.
struct RowOfLanes {
  std::int32_t item;                    // among its source's rows for this rank, or kNoRow
  std::int32_t places[kPicksOfLane];    // NOLINT(modernize-avoid-c-arrays): device code
  std::uint32_t weights[kPicksOfLane];  // NOLINT(modernize-avoid-c-arrays): device code
  unsigned listed[kPicksOfLane];        // NOLINT(modernize-avoid-c-arrays): device code; lanes, each place once
};

struct PartOfRow {
  int source;
  unsigned token;
  int part;
};

// By one thread. False when the dispatch ends here.
__device__ __forceinline__ bool wait_expert_header(const ExpertDispatchTask& task,
                                                   int source,
                                                   std::uint32_t epoch,
                                                   const ReceivedTable& table) {
  const Common& common = task.common;
  const Awaited awaited{source, Phase::kDispatch, epoch};
  std::uint32_t* given_up = task.route.state + kGivenUp;
  const std::byte* header = window_of(common, common.rank) + task.extra.header(epoch, source);
  TaggedUnit units[kExpertHeaderUnits];  // NOLINT(modernize-avoid-c-arrays): device code
  const auto there = [&] {
    bool all = true;
    for (int i = 0; i < kExpertHeaderUnits; ++i)
      all = load_tagged(header + i * kTaggedBytes, tag_of(epoch), units[i]) && all;
    return all;
  };
  if (!wait_until(common, awaited, there, given_up)) return false;
  const auto both = [](const TaggedUnit& unit) {
    return static_cast<std::uint64_t>(unit.words[1]) << 32 | unit.words[0];
  };
  const bool aborted = units[2].words[1] == static_cast<std::uint32_t>(protocol::HeaderStatus::kAborted);
  if (aborted || both(units[0]) != task.digest || both(units[1]) != static_cast<std::uint64_t>(task.agreed)) {
    // Each rank compares all others with itself, so when any two differ every rank ends this operation.
    give_up(common, given_up, aborted ? NoticeKind::kAborted : NoticeKind::kMismatch, awaited);
    return false;
  }
  table.tokens_of[source] = static_cast<std::int32_t>(units[2].words[0]);
  table.row_base[source] = static_cast<std::int32_t>(units[3].words[0]);
  return true;
}

// By all threads: the counts of all sources.
__device__ inline bool wait_counts(const ExpertDispatchTask& task, std::uint32_t epoch, const ReceivedTable& table) {
  const Common& common = task.common;
  const int num_local = task.experts.num_local;
  const auto thread = static_cast<int>(threadIdx.x);
  bool there = true;
#pragma unroll 1
  for (int source = kThreads - 1 - thread; source < common.num_ranks; source += kThreads) {
    const std::uint64_t began = task.waited != nullptr ? nanoseconds() : 0;
    there = wait_expert_header(task, source, epoch, table) && there;
    if (task.waited != nullptr && is_clerk()) atomicMax(task.route.waited_ns + source, nanoseconds() - began);
  }
#pragma unroll 1
  for (int i = thread; there && i < common.num_ranks * num_local; i += kThreads) {
    const int source = i / num_local;
    const std::byte* at =
        window_of(common, common.rank) + task.extra.counts(epoch, source) + i % num_local * kTaggedBytes;
    TaggedUnit unit{};
    there = wait_until(
        common, {source, Phase::kDispatch, epoch}, [&] { return load_tagged(at, tag_of(epoch), unit); },
        task.route.state + kGivenUp);
    table.base[i] = static_cast<std::int32_t>(unit.words[0]);
    if (is_clerk() && task.routes_per_expert != nullptr)
      atomicAdd(table.routes + i % num_local, static_cast<std::int32_t>(unit.words[1]));
  }
  return __syncthreads_and(there) != 0;
}

__device__ inline std::int32_t add_up_to_most(std::int32_t sum, std::int32_t more) {
  constexpr std::int32_t kMost = 0x7FFFFFFF;
  return sum > kMost - more ? kMost : sum + more;
}

// Turns counts into first rows. The clerk also leaves them where the caller sees them.
__device__ inline void place_sources(const ExpertDispatchTask& task, const ReceivedTable& table) {
  const int num_ranks = task.common.num_ranks;
  const int num_local = task.experts.num_local;
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int expert = thread; expert < num_local; expert += kThreads) {
    std::int32_t next = 0;
#pragma unroll 1
    for (int source = 0; source < num_ranks; ++source) {
      const std::int32_t rows = table.base[source * num_local + expert];
      table.base[source * num_local + expert] = next;
      if (is_clerk())
        reinterpret_cast<int2*>(task.route.source_ranges)[expert * num_ranks + source] = make_int2(next, rows);
      next += rows;
    }
    if (!is_clerk()) continue;
    task.route.rows_per_expert[expert] = next;
    if (task.routes_per_expert != nullptr)
      task.routes_per_expert[expert] = add_up_to_most(task.routes_per_expert[expert], table.routes[expert]);
  }
  if (thread == kThreads - 1) {
    std::int32_t next = 0;
#pragma unroll 1
    for (int i = 0, source = task.common.rank; i < num_ranks; ++i) {
      source = source + 1 < num_ranks ? source + 1 : 0;
      const std::int32_t rows = table.row_base[source];
      table.row_base[source] = next;
      next += rows;
      if (!is_clerk()) continue;
      task.route.rows_received[source] = rows;
      task.route.tokens_of[source] = table.tokens_of[source];
    }
    if (is_clerk()) task.route.state[kItems] = static_cast<std::uint32_t>(next);
  }
  __syncthreads();
}

// By one warp: whether the row's packet has come, and reads it.
__device__ __forceinline__ bool load_packet(const ExpertDispatchTask& task,
                                            const std::byte* packet,
                                            std::uint32_t tag,
                                            RowOfLanes& row) {
  TaggedUnit unit{};
  const bool there = load_tagged(packet, tag, unit);
  row.item = static_cast<std::int32_t>(unit.words[0]);
  bool picks = true;
#pragma unroll
  for (int i = 0; i < kPicksOfLane; ++i) {
    const int slot = i * kWarp + lane_index();
    row.places[i] = kNoPlace;
    row.listed[i] = 0;
    if (slot >= task.experts.top_k) continue;
    picks = load_tagged(packet + (1 + slot) * kTaggedBytes, tag, unit) && picks;
    row.places[i] = static_cast<std::int32_t>(unit.words[0]);
    row.weights[i] = unit.words[1];
  }
  // Of a row that does not come, the first unit alone says so.
  return there && (picks || row.item == kNoRow);
}

// By one warp: the row's packet and, where rows cross in lines, a piece of it, which are polled together, because they
// arrive at about the same time. False when there is no row, or the dispatch ends here.
__device__ __forceinline__ bool await_row(
    const ExpertDispatchTask& task, std::uint32_t epoch, const PartOfRow& at, RowOfLanes& row, Piece& piece) {
  const Common& common = task.common;
  const std::byte* own = window_of(common, common.rank);
  const std::byte* packet = own + task.extra.packet(epoch, at.source, at.token);
  const std::byte* from =
      own + task.extra.lines(epoch, at.source, at.token) + at.part * kPieceLines * static_cast<int>(kDataLineBytes);
  const int lines = task.extra.in_lines() ? task.row.lines() - at.part * kPieceLines : 0;
  PartOfPiece part;
  const auto ready = [&] {
    const bool lines_there = load_piece(from, lines, line_flag(epoch), part);
    const bool there = load_packet(task, packet, tag_of(epoch), row) && (lines_there || row.item == kNoRow);
    return __all_sync(kAllLanes, static_cast<int>(there)) != 0;
  };
  const std::uint32_t* given_up = task.route.state + kGivenUp;
  const std::uint64_t began = task.waited != nullptr ? nanoseconds() : 0;
  if (!wait_as_warp(common, {at.source, Phase::kDispatch, epoch}, ready,
                    [given_up] { return load_relaxed_device(given_up) != 0; })) {
    return false;
  }
  if (row.item == kNoRow) return false;
  if (task.waited != nullptr && lane_index() == 0) atomicMax(task.route.waited_ns + at.source, nanoseconds() - began);
  leave_piece(part, lines, piece);
  return true;
}

// By one warp: final places. A token that chose an expert twice has one row there.
__device__ __forceinline__ void find_places(const ExpertDispatchTask& task,
                                            int source,
                                            const ReceivedTable& table,
                                            RowOfLanes& row) {
  const std::int32_t* base = table.base + source * task.experts.num_local;
#pragma unroll
  for (int i = 0; i < kPicksOfLane; ++i) {
    if (i * kWarp >= task.experts.top_k) continue;
    std::int32_t& place = row.places[i];
    if (place != kNoPlace) place += base[task.experts.expert_of(place)];
    const unsigned same = __match_any_sync(kAllLanes, place);
    bool listed = place != kNoPlace && __ffs(static_cast<int>(same)) - 1 == lane_index();
#pragma unroll 1
    for (int before = 0; before < i * kWarp; ++before)
      listed = __shfl_sync(kAllLanes, row.places[0], before) != place && listed;
    row.listed[i] = __ballot_sync(kAllLanes, static_cast<int>(listed));
  }
}

static_assert(kPicksOfLane <= 2, "picks of the second lap are compared with those of the first");

// By one warp: what combine and the caller need to know of the row.
__device__ __forceinline__ void note_row(const ExpertDispatchTask& task,
                                         const PartOfRow& at,
                                         const ReceivedTable& table,
                                         const RowOfLanes& row) {
  const std::int64_t item = table.row_base[at.source] + row.item;
  auto* record = reinterpret_cast<uint2*>(task.route.items + item * task.route.item_words);
  if (lane_index() == 0) record[0] = make_uint2(static_cast<unsigned>(at.source), at.token);
#pragma unroll
  for (int i = 0; i < kPicksOfLane; ++i) {
    const int slot = i * kWarp + lane_index();
    if (slot >= task.experts.top_k) continue;
    const std::int32_t place = row.places[i];
    record[1 + slot] = make_uint2(static_cast<unsigned>(place), row.weights[i]);
    if (place == kNoPlace) continue;
    const std::int64_t index = task.experts.expert_of(place) * task.experts.rows + task.experts.row_of(place);
    task.route.source_tokens[index] = static_cast<std::int32_t>(at.token);
  }
}

// Where a row's places are in a plane of the result.
__device__ __forceinline__ PlacesOfLanes places_in(const ExpertDispatchTask& task,
                                                   const Copied& plane,
                                                   const RowOfLanes& row) {
  PlacesOfLanes places;
#pragma unroll
  for (int i = 0; i < kPicksOfLane; ++i) {
    const std::int32_t place = row.places[i];
    places.rows[i] =
        plane.data + task.experts.expert_of(place) * plane.block_stride + task.experts.row_of(place) * plane.row_stride;
    places.listed[i] = row.listed[i];
  }
  return places;
}

// By one warp: a part of a row in lines. Values and scales may both lie in it.
__device__ __forceinline__ void copy_piece(const ExpertDispatchTask& task,
                                           int part,
                                           const RowOfLanes& row,
                                           const Piece& piece) {
  const int begin = part * kPieceBytes;
  const auto copy = [&](const Copied& plane, int start) {
    const int first = max(begin, start);
    const int bytes = min(begin + kPieceBytes, start + static_cast<int>(plane.row_bytes)) - first;
    if (bytes <= 0) return;
    copy_to_places(places_in(task, plane, row), {piece.bytes + (first - begin), first - start, bytes}, plane.unit,
                   {0, 1});
  };
  copy(task.values_to, 0);
  if (task.scales_to.data != nullptr) copy(task.scales_to, task.row.scales_at());
}

// By one warp: a part of a row that is stamped.
__device__ __noinline__ void copy_stamped(const ExpertDispatchTask& task,
                                          std::uint32_t epoch,
                                          PartOfRow at,
                                          RowOfLanes row) {
  const Common& common = task.common;
  const std::byte* own = window_of(common, common.rank);
  const auto* stamp = reinterpret_cast<const std::uint64_t*>(own + task.extra.arrived(epoch, at.source, at.token));
  bool there = true;
  if (lane_index() == 0) {
    const std::uint64_t began = task.waited != nullptr ? nanoseconds() : 0;
    there = wait_until(
        common, {at.source, Phase::kDispatch, epoch},
        [&] { return protocol::stamp_is(load_acquire_system(stamp), epoch); }, task.route.state + kGivenUp);
    if (task.waited != nullptr) atomicMax(task.route.waited_ns + at.source, nanoseconds() - began);
  }
  __syncwarp();
  if (__all_sync(kAllLanes, static_cast<int>(there)) == 0 || task.values_to.data == nullptr) return;
  const std::byte* space = own + common.layout.payload(at.source, protocol::slot_of(epoch, kExpertDepth));
  const auto copy = [&](const Copied& plane, Crew warps) {
    copy_to_places(places_in(task, plane, row),
                   {space + plane.offset + at.token * plane.stride, 0, static_cast<int>(plane.row_bytes)}, plane.unit,
                   warps);
  };
  const auto parts = static_cast<int>(task.parts.value());
  copy(task.values_to, {at.part, parts});
  if (at.part == parts - 1 && task.scales_to.data != nullptr) copy(task.scales_to, {0, 1});
}

// By one warp.
__device__ __forceinline__ void receive_part(const ExpertDispatchTask& task,
                                             std::uint32_t epoch,
                                             const PartOfRow& at,
                                             const ReceivedTable& table,
                                             Piece& piece) {
  RowOfLanes row;
  if (!await_row(task, epoch, at, row, piece)) return;
  find_places(task, at.source, table, row);
  if (at.part == 0) note_row(task, at, table, row);
  if (!task.extra.in_lines()) return copy_stamped(task, epoch, at, row);
  if (task.values_to.data != nullptr) copy_piece(task, at.part, row, piece);
}

// By the last block to come here.
__device__ __noinline__ inline void add_waits(const ExpertDispatchTask& task) {
  for (int source = static_cast<int>(threadIdx.x); source < task.common.num_ranks; source += kThreads) {
    constexpr std::int64_t kMost = 0x7FFFFFFFFFFFFFFF;
    const auto more = static_cast<std::int64_t>(atomicExch(task.route.waited_ns + source, 0ULL));
    if (task.values_to.data == nullptr) continue;
    std::int64_t& sum = task.waited[source];
    sum = sum > kMost - more ? kMost : sum + more;
  }
  if (threadIdx.x == 0) task.common.board->blocks_done = 0;
}

// `pieces`: shared memory for one of each warp, where rows cross in lines.
__device__ inline void receive_rows(const ExpertDispatchTask& task,
                                    std::uint32_t epoch,
                                    const ReceivedTable& table,
                                    Piece* pieces) {
  const int num_ranks = task.common.num_ranks;
  // The warden's last warp is slow; where there are other blocks, they need not wait for it.
  const unsigned blocks = max(gridDim.x - 1, 1U);
  if (blockIdx.x >= blocks) return;
  if (task.routes_per_expert != nullptr) {
    for (int i = static_cast<int>(threadIdx.x); i < task.experts.num_local; i += kThreads)
      table.routes[i] = 0;
    __syncthreads();
  }
  if (!wait_counts(task, epoch, table)) return;
  place_sources(task, table);
  std::int32_t most = 0;
#pragma unroll 1
  for (int source = 0; source < num_ranks; ++source)
    most = max(most, table.tokens_of[source]);
  const auto ranks = static_cast<unsigned>(num_ranks);
  const unsigned parts = task.parts.value();
  const unsigned items = static_cast<unsigned>(most) * ranks * parts;
#pragma unroll 1
  for (unsigned item = threadIdx.x / kWarp * blocks + blockIdx.x; item < items; item += kWarps * blocks) {
    const unsigned index = task.parts.divide(item);
    const unsigned token = task.extra.in_lines() ? task.peers.divide(index) : index / ranks;
    // Own rows last: the others' are on their way meanwhile.
    unsigned source = static_cast<unsigned>(task.common.rank) + 1 + index - token * ranks;
    source -= source >= ranks ? ranks : 0;
    if (static_cast<std::int32_t>(token) >= table.tokens_of[source]) continue;
    receive_part(task, epoch, {static_cast<int>(source), token, static_cast<int>(item - index * parts)}, table,
                 pieces[warp_index()]);
  }
}

__device__ inline void receive_all(const ExpertDispatchTask& task,
                                   std::uint32_t epoch,
                                   const ReceivedTable& table,
                                   Piece* pieces) {
  receive_rows(task, epoch, table, pieces);
  if (task.waited != nullptr && last_block(&task.common.board->blocks_done)) add_waits(task);
}

}  // namespace tokenyard::engine::cuda
