// SPDX-License-Identifier: Apache-2.0
// The receiving half of an expert-major dispatch. All blocks work out where each source's rows begin at each expert;
// then warps wait for rows, a part of one each, and copy them to the experts that they are for.
#pragma once

#include <cstdint>

#include "engine/cuda/expert_lines.cuh"
#include "engine/cuda/expert_rows.cuh"
#include "engine/cuda/expert_state.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kParts = 4;  // of a row that is stamped, a warp each; of one in lines there are its pieces

__device__ __forceinline__ int parts_of(const ExpertDispatchTask& task) {
  return task.extra.in_lines() ? (task.row.lines() + kPieceLines - 1) / kPieceLines : kParts;
}

// In shared memory.
struct ReceivedTable {
  std::int32_t* base = nullptr;       // [num_ranks, num_local]: rows of the source at the expert, then its first
  std::int32_t* tokens_of = nullptr;  // [num_ranks]
  std::int32_t* row_base = nullptr;   // [num_ranks]: the source's first row among all received ones
  std::int32_t* routes = nullptr;     // [num_local]; used by the clerk
};

// What the lanes of a warp know of the row that they are at.
struct alignas(8) RowOfWarp {
  std::int32_t words[2 + 2 * kMaxTopK];  // of the packet
  std::byte* values[kMaxTopK];           // where the row goes, each place once
  std::byte* scales[kMaxTopK];
  int num_places;
};

// By one thread. False when the dispatch ends here.
__device__ inline bool wait_expert_header(const ExpertDispatchTask& task,
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
  for (int source = kThreads - 1 - thread; source < common.num_ranks; source += kThreads) {
    const std::uint64_t began = task.waited != nullptr ? nanoseconds() : 0;
    there = wait_expert_header(task, source, epoch, table) && there;
    if (task.waited != nullptr && is_clerk()) atomicMax(task.route.waited_ns + source, nanoseconds() - began);
  }
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
  for (int expert = thread; expert < num_local; expert += kThreads) {
    std::int32_t next = 0;
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
    for (int source = 0; source < num_ranks; ++source) {
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

// By one warp: the words of a row's packet. False when there is no row, or the dispatch ends here.
__device__ inline bool read_packet(
    const ExpertDispatchTask& task, std::uint32_t epoch, int source, std::int64_t token, RowOfWarp& row) {
  const Common& common = task.common;
  const std::byte* packet = window_of(common, common.rank) + task.extra.packet(epoch, source, token);
  const std::uint32_t tag = tag_of(epoch);
  const auto units =
      static_cast<unsigned>(ExpertLayout::units_of(1 + task.experts.top_k * (task.with_weights ? 2 : 1)));
  __syncwarp();
  bool absent = false;
  for (unsigned begin = 0; begin < units && !absent; begin += kWarp) {
    const unsigned index = begin + threadIdx.x % kWarp;
    TaggedUnit unit{};
    const auto ready = [&] {
      const bool there = index >= units || load_tagged(packet + index * kTaggedBytes, tag, unit);
      const unsigned lanes = __ballot_sync(kAllLanes, static_cast<int>(there));
      // Of a row that does not come, the first unit alone says so.
      absent = begin == 0 && (lanes & 1U) != 0 &&
               __shfl_sync(kAllLanes, static_cast<std::int32_t>(unit.words[0]), 0) == kNoRow;
      return absent || lanes == kAllLanes;
    };
    const std::uint32_t* given_up = task.route.state + kGivenUp;
    if (!wait_as_warp(common, {source, Phase::kDispatch, epoch}, ready,
                      [given_up] { return load_relaxed_device(given_up) != 0; })) {
      return false;
    }
    if (index < units && !absent) *reinterpret_cast<TaggedUnit*>(row.words + kTaggedWords * index) = unit;
  }
  __syncwarp();
  return !absent;
}

// By one warp: where the row goes. A token that chose an expert twice has one row there. Places then count from the
// expert's first row.
__device__ inline void list_places(const ExpertDispatchTask& task,
                                   int source,
                                   const ReceivedTable& table,
                                   RowOfWarp& row) {
  const int top_k = task.experts.top_k;
  const auto rows = static_cast<unsigned>(task.experts.rows);
  const std::int32_t* base = table.base + source * task.experts.num_local;
  int count = 0;
  for (int begin = 0; begin < top_k; begin += kWarp) {
    const int slot = begin + lane_index();
    const std::int32_t sent = slot < top_k ? row.words[1 + slot] : kNoPlace;
    const unsigned expert = sent == kNoPlace ? 0 : static_cast<unsigned>(sent) / rows;
    const std::int32_t place = sent == kNoPlace ? kNoPlace : sent + base[expert];
    const unsigned same = __match_any_sync(kAllLanes, place);
    bool listed = place != kNoPlace && __ffs(static_cast<int>(same)) - 1 == lane_index();
    for (int before = 0; before < begin && listed; ++before)
      listed = row.words[1 + before] != place;
    const unsigned lanes = __ballot_sync(kAllLanes, static_cast<int>(listed));
    if (slot < top_k) row.words[1 + slot] = place;
    if (listed) {
      const int at = count + __popc(lanes & ((1U << lane_index()) - 1U));
      const unsigned of_expert = static_cast<unsigned>(place) - expert * rows;
      const auto in = [&](const Copied& plane) {
        return plane.data + expert * plane.block_stride + of_expert * plane.row_stride;
      };
      row.values[at] = in(task.values_to);
      row.scales[at] = in(task.scales_to);
    }
    count += __popc(lanes);
    __syncwarp();
  }
  if (lane_index() == 0) row.num_places = count;
  __syncwarp();
}

// By one warp: what combine and the caller need to know of the row.
__device__ inline void note_row(
    const ExpertDispatchTask& task, int source, std::int64_t token, const ReceivedTable& table, const RowOfWarp& row) {
  const int top_k = task.experts.top_k;
  const std::int64_t item = table.row_base[source] + row.words[0];
  std::uint32_t* record = task.route.items + item * task.route.item_words;
  const int words = 1 + top_k * (task.with_weights ? 2 : 1);
  for (int i = lane_index(); i < words; i += kWarp) {
    record[i] = static_cast<std::uint32_t>(
        i == 0 ? static_cast<std::int32_t>(source * task.common.layout.shape().max_tokens + token) : row.words[i]);
  }
  for (int slot = lane_index(); slot < top_k; slot += kWarp) {
    const std::int32_t place = row.words[1 + slot];
    if (place != kNoPlace) task.route.source_tokens[place] = static_cast<std::int32_t>(token);
  }
}

struct PartOfRow {
  int source = 0;
  std::int64_t token = 0;
  int part = 0;
};

// By one warp: a part of a row in lines. Values and scales may both lie in it.
__device__ inline void take_part(
    const ExpertDispatchTask& task, std::uint32_t epoch, const PartOfRow& at, const RowOfWarp& row, Piece& piece) {
  const Common& common = task.common;
  const int first_line = at.part * kPieceLines;
  const std::uint32_t* given_up = task.route.state + kGivenUp;
  const std::byte* from = window_of(common, common.rank) + task.extra.lines(epoch, at.source, at.token) +
                          first_line * static_cast<int>(kDataLineBytes);
  const std::uint64_t began = task.waited != nullptr ? nanoseconds() : 0;
  const bool there = take_piece(common, {at.source, Phase::kDispatch, epoch}, from, task.row.lines() - first_line,
                                piece, [given_up] { return load_relaxed_device(given_up) != 0; });
  if (task.waited != nullptr && lane_index() == 0) atomicMax(task.route.waited_ns + at.source, nanoseconds() - began);
  if (!there || task.values_to.data == nullptr) return;
  const int begin = at.part * kPieceBytes;
  const int end = begin + kPieceBytes;
  const auto copy = [&](std::byte* const* to, const Copied& plane, int start) {
    const int from_byte = max(begin, start);
    const int bytes = min(end, start + static_cast<int>(plane.row_bytes)) - from_byte;
    if (bytes <= 0) return;
    copy_to_places({to, row.num_places, from_byte - start}, piece.bytes + (from_byte - begin), bytes, plane.unit,
                   {lane_index(), kWarp});
  };
  copy(row.values, task.values_to, 0);
  if (task.scales_to.data != nullptr) copy(row.scales, task.scales_to, task.row.scales_at());
}

// By one warp.
__device__ inline void receive_part(const ExpertDispatchTask& task,
                                    std::uint32_t epoch,
                                    const PartOfRow& at,
                                    const ReceivedTable& table,
                                    RowOfWarp& row,
                                    Piece& piece) {
  const Common& common = task.common;
  if (!read_packet(task, epoch, at.source, at.token, row)) return;
  list_places(task, at.source, table, row);
  if (at.part == 0) note_row(task, at.source, at.token, table, row);
  if (task.extra.in_lines()) return take_part(task, epoch, at, row, piece);
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
  const auto from = [&](const Copied& plane) { return space + plane.offset + at.token * plane.stride; };
  const auto copy = [&](std::byte* const* to, const Copied& plane, Crew crew) {
    copy_to_places({to, row.num_places, 0}, from(plane), static_cast<int>(plane.row_bytes), plane.unit, crew);
  };
  copy(row.values, task.values_to, {at.part * kWarp + lane_index(), kParts * kWarp});
  if (at.part == kParts - 1 && task.scales_to.data != nullptr) copy(row.scales, task.scales_to, {lane_index(), kWarp});
}

// By the last block to come here.
__device__ inline void add_waits(const ExpertDispatchTask& task) {
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
  __shared__ RowOfWarp rows[kWarps];  // NOLINT(modernize-avoid-c-arrays): device code
  const int num_ranks = task.common.num_ranks;
  if (task.routes_per_expert != nullptr) {
    for (int i = static_cast<int>(threadIdx.x); i < task.experts.num_local; i += kThreads)
      table.routes[i] = 0;
    __syncthreads();
  }
  if (!wait_counts(task, epoch, table)) return;
  place_sources(task, table);
  std::int32_t most = 0;
  for (int source = 0; source < num_ranks; ++source)
    most = max(most, table.tokens_of[source]);
  const auto ranks = static_cast<unsigned>(num_ranks);
  const auto parts = static_cast<unsigned>(parts_of(task));
  const unsigned items = static_cast<unsigned>(most) * ranks * parts;
  for (unsigned item = threadIdx.x / kWarp * gridDim.x + blockIdx.x; item < items; item += kWarps * gridDim.x) {
    const unsigned index = item / parts;
    const unsigned token = index / ranks;
    // Own rows last: the others' are on their way meanwhile.
    unsigned source = static_cast<unsigned>(task.common.rank) + 1 + index - token * ranks;
    source -= source >= ranks ? ranks : 0;
    if (static_cast<std::int32_t>(token) >= table.tokens_of[source]) continue;
    receive_part(task, epoch, {static_cast<int>(source), token, static_cast<int>(item - index * parts)}, table,
                 rows[warp_index()], pieces[warp_index()]);
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
