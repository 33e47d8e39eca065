// SPDX-License-Identifier: Apache-2.0
// The sending half of an expert-major dispatch. Each block routes its tokens by itself: it counts the picks of all
// tokens before them, so that a row's place among those of its source goes along with it. The last block tells the
// counts of all tokens, from which receivers know where each source's rows begin.
#pragma once

#include <cstdint>

#include "engine/cuda/expert_lines.cuh"
#include "engine/cuda/expert_rows.cuh"
#include "engine/cuda/expert_state.cuh"
#include "protocol/casts.h"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {

// In shared memory: of the tokens counted so far, rows and routes of each expert, and rows for each rank.
struct SentTable {
  std::int32_t* rows = nullptr;      // [num_experts]
  std::int32_t* routes = nullptr;    // [num_experts]
  std::int32_t* per_rank = nullptr;  // [num_ranks]
};

struct SentToken {
  TokenOfBlock token;  // wire_ids: the owner of each pick, or -1
  std::int32_t places[kMaxTopK];
  std::uint32_t weights[kMaxTopK];
};

__device__ __forceinline__ std::int64_t id_of(const Picks& picks, std::int64_t token, int slot) {
  const std::byte* row = picks.ids + token * picks.ids_stride;
  return picks.ids_i64 ? reinterpret_cast<const std::int64_t*>(row)[slot]
                       : std::int64_t{reinterpret_cast<const std::int32_t*>(row)[slot]};
}

__device__ __forceinline__ bool is_expert(const Experts& experts, std::int64_t id) {
  return id >= 0 && id < experts.num_experts && id != experts.invalid_id;
}

__device__ inline float weight_of(const Picks& picks, std::int64_t token, int slot) {
  const std::byte* row = picks.weights + token * picks.weights_stride;
  switch (picks.weights_dtype) {
    case Dtype::kBf16:
      return protocol::decode<protocol::Bf16>(reinterpret_cast<const std::uint16_t*>(row)[slot]);
    case Dtype::kF16:
      return protocol::decode<protocol::F16>(reinterpret_cast<const std::uint16_t*>(row)[slot]);
    default:
      return reinterpret_cast<const float*>(row)[slot];
  }
}

__device__ inline void clear_table(const ExpertDispatchTask& task, const SentTable& table) {
  for (int i = static_cast<int>(threadIdx.x); i < task.experts.num_experts; i += kThreads)
    table.rows[i] = table.routes[i] = 0;
  for (int i = static_cast<int>(threadIdx.x); i < task.common.num_ranks; i += kThreads)
    table.per_rank[i] = 0;
}

// Adds tokens [first, last). A row counts once for each expert and each rank, a route for each pick.
__device__ inline void count_tokens(const ExpertDispatchTask& task,
                                    std::int64_t first,
                                    std::int64_t last,
                                    const SentTable& table) {
  const Experts& experts = task.experts;
  const auto top_k = static_cast<unsigned>(experts.top_k);
  const auto end = static_cast<unsigned>(last) * top_k;
  for (unsigned i = static_cast<unsigned>(first) * top_k + threadIdx.x; i < end; i += kThreads) {
    const std::int64_t token = i / top_k;
    const auto slot = static_cast<int>(i % top_k);
    const std::int64_t id = id_of(task.picks, token, slot);
    if (!is_expert(experts, id)) continue;
    const int owner = experts.owners.owner_of(static_cast<int>(id));
    const int from = protocol::first_local_expert(experts.num_experts, task.common.num_ranks, owner);
    const int to = from + protocol::num_local_experts(experts.num_experts, task.common.num_ranks, owner);
    bool same_expert = false;
    bool same_rank = false;
    for (int before = 0; before < slot; ++before) {
      const std::int64_t other = id_of(task.picks, token, before);
      same_expert = same_expert || other == id;
      same_rank = same_rank || (other >= from && other < to);
    }
    atomicAdd(table.routes + id, 1);
    if (!same_expert) atomicAdd(table.rows + id, 1);
    if (!same_rank) atomicAdd(table.per_rank + owner, 1);
  }
}

// A token's picks in the lanes of one warp, loaded before they are looked at.
struct PicksOfLane {
  static constexpr int kMost = kMaxTopK / kWarp;

  __device__ void load(const ExpertDispatchTask& task, std::int64_t token) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int slot = i * kWarp + lane_index();
      if (slot >= task.experts.top_k) continue;
      ids[i] = id_of(task.picks, token, slot);
      if (task.picks.weights != nullptr) weights[i] = weight_of(task.picks, token, slot);
    }
  }

  std::int64_t ids[kMost];  // NOLINT(modernize-avoid-c-arrays): device code
  float weights[kMost];     // NOLINT(modernize-avoid-c-arrays): device code
};

// By one warp, when the table holds all tokens before this one.
__device__ inline void route_picks(const ExpertDispatchTask& task,
                                   std::int64_t token,
                                   const PicksOfLane& picks,
                                   const SentTable& table,
                                   SentToken& shared) {
  const Experts& experts = task.experts;
  const int num_ranks = task.common.num_ranks;
  for (int i = lane_index(); i < task.route.words; i += kWarp)
    shared.token.words[i] = 0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PicksOfLane::kMost; ++i) {
    const int slot = i * kWarp + lane_index();
    if (slot >= experts.top_k) continue;
    const std::int64_t id = picks.ids[i];
    shared.token.wire_ids[slot] = -1;
    if (task.picks.weights != nullptr) shared.weights[slot] = __float_as_uint(picks.weights[i]);
    if (is_expert(experts, id)) {
      const int owner = experts.owners.owner_of(static_cast<int>(id));
      const auto local = static_cast<int>(id) - protocol::first_local_expert(experts.num_experts, num_ranks, owner);
      shared.token.wire_ids[slot] = owner;
      shared.places[slot] = static_cast<std::int32_t>(local * experts.rows + table.rows[id]);
      atomicOr(&shared.token.words[owner / kWordBits], 1U << (owner % kWordBits));
    } else if (id != -1 && id != experts.invalid_id) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&task.common.board->invalid_ids), 1ULL);
    }
  }
  __syncwarp();
  for (int i = lane_index(); i < task.route.words; i += kWarp)
    task.route.ranks_of_token[token * task.route.words + i] = shared.token.words[i];
  list_destinations(task.route.words, shared.token, [](int /*rank*/) {});
}

// One word of what `rank` is told of the token.
__device__ inline std::uint32_t packet_word(
    const ExpertDispatchTask& task, int rank, int word, const SentTable& table, const SentToken& shared) {
  const int top_k = task.experts.top_k;
  const bool goes_there = (shared.token.words[rank / kWordBits] >> (rank % kWordBits) & 1U) != 0;
  if (word == 0) return static_cast<std::uint32_t>(goes_there ? table.per_rank[rank] : kNoRow);
  if (word > 2 * top_k) return 0;
  if (word > top_k) return shared.weights[word - 1 - top_k];
  const int slot = word - 1;
  return static_cast<std::uint32_t>(shared.token.wire_ids[slot] == rank ? shared.places[slot] : kNoPlace);
}

// Every rank is told of every token: of one that does not go there in one unit.
__device__ inline void send_packets(const ExpertDispatchTask& task,
                                    std::uint32_t epoch,
                                    std::int64_t token,
                                    const SentTable& table,
                                    const SentToken& shared) {
  const Common& common = task.common;
  const int units = ExpertLayout::units_of(1 + task.experts.top_k * (task.picks.weights != nullptr ? 2 : 1));
  for (int i = static_cast<int>(threadIdx.x); i < common.num_ranks * units; i += kThreads) {
    const int rank = i / units;
    const int unit = i % units;
    if (unit > 0 && (shared.token.words[rank / kWordBits] >> (rank % kWordBits) & 1U) == 0) continue;
    std::byte* to = window_of(common, rank) + task.extra.packet(epoch, common.rank, token) + unit * kTaggedBytes;
    const auto word = [&](int index) { return packet_word(task, rank, kTaggedWords * unit + index, table, shared); };
    store_tagged(to, {{word(0), word(1)}}, tag_of(epoch));
  }
}

// Each row's stores are before its stamp, which releases them (pairs with receive_part): the barrier orders those of
// other threads.
__device__ inline void stamp_rows(const ExpertDispatchTask& task,
                                  std::uint32_t epoch,
                                  std::int64_t token,
                                  const SentToken& shared) {
  const Common& common = task.common;
  for (int d = static_cast<int>(threadIdx.x); d < shared.token.num_destinations; d += kThreads) {
    std::byte* to = window_of(common, shared.token.destinations[d]) + task.extra.arrived(epoch, common.rank, token);
    store_release_system(reinterpret_cast<std::uint64_t*>(to), protocol::encode_stamp(epoch, 1));
  }
}

__device__ inline void send_header_unit(
    const ExpertDispatchTask& task, std::uint32_t epoch, std::int64_t tokens, int index, const SentTable& table) {
  const Common& common = task.common;
  const int rank = index / kExpertHeaderUnits;
  const int unit = index % kExpertHeaderUnits;
  const auto half = [](std::uint64_t word, int which) { return static_cast<std::uint32_t>(word >> (32 * which)); };
  TaggedUnit sent{};
  for (int i = 0; i < kTaggedWords; ++i) {
    if (unit == 0) sent.words[i] = half(task.digest, i);
    if (unit == 1) sent.words[i] = half(static_cast<std::uint64_t>(task.agreed), i);
  }
  if (unit == 2) sent.words[0] = static_cast<std::uint32_t>(tokens);  // and status kOk
  if (unit == 3) sent.words[0] = static_cast<std::uint32_t>(table.per_rank[rank]);
  store_tagged(window_of(common, rank) + task.extra.header(epoch, common.rank) + unit * kTaggedBytes, sent,
               tag_of(epoch));
}

// By the last block. Leaves the table empty. False when the dispatch ends here.
__device__ inline bool announce(const ExpertDispatchTask& task,
                                std::uint32_t epoch,
                                std::int64_t tokens,
                                const SentTable& table) {
  const Common& common = task.common;
  const Experts& experts = task.experts;
  const auto thread = static_cast<int>(threadIdx.x);
  count_tokens(task, 0, tokens, table);
  if (__syncthreads_and(wait_for_space(common, epoch, thread, kThreads)) == 0) return false;
  for (int id = thread; id < experts.num_experts; id += kThreads) {
    const int owner = experts.owners.owner_of(id);
    const int local = id - protocol::first_local_expert(experts.num_experts, common.num_ranks, owner);
    store_tagged(window_of(common, owner) + task.extra.counts(epoch, common.rank) + local * kTaggedBytes,
                 {{static_cast<std::uint32_t>(table.rows[id]), static_cast<std::uint32_t>(table.routes[id])}},
                 tag_of(epoch));
  }
  for (int i = thread; i < common.num_ranks * kExpertHeaderUnits; i += kThreads)
    send_header_unit(task, epoch, tokens, i, table);
  for (int rank = thread; rank < common.num_ranks; rank += kThreads)
    task.route.rows_sent[rank] = table.per_rank[rank];
  if (thread == 0) task.route.state[kOwnTokens] = static_cast<std::uint32_t>(tokens);
  __syncthreads();
  clear_table(task, table);
  __syncthreads();
  return true;
}

// What a block loads of a token before it knows the epoch. `Row`: how its row is loaded and stored (expert_rows.cuh).
template <class Row>
struct LoadedToken {
  __device__ void load(const ExpertDispatchTask& task, std::int64_t token) {
    row.load(task, token);
    if (warp_index() == 0) picks.load(task, token);
  }

  Row row;
  PicksOfLane picks;
};

// `table` is empty. `staged`: shared memory for a row that crosses in lines. `loaded`: the block's first token.
template <class Row>
__device__ void send_tokens(const ExpertDispatchTask& task,
                            std::uint32_t epoch,
                            const SentTable& table,
                            std::byte* staged,
                            LoadedToken<Row>& loaded) {
  __shared__ SentToken shared;
  const Common& common = task.common;
  const std::int64_t tokens = tokens_of_call(task.num_tokens, task.num_tokens_on_device);
  if (is_clerk() && !announce(task, epoch, tokens, table)) return;
  std::int64_t counted = 0;
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    const bool first = token == blockIdx.x;
    if (!first) loaded.load(task, token);
    count_tokens(task, counted, token, table);
    counted = token;
    const bool space = !first || wait_for_space(common, epoch, static_cast<int>(threadIdx.x), kThreads);
    if (__syncthreads_and(space) == 0) return;
    if (warp_index() == 0) route_picks(task, token, loaded.picks, table, shared);
    if (task.extra.in_lines()) loaded.row.store(task, token, RowToShared(task, staged));
    __syncthreads();
    send_packets(task, epoch, token, table, shared);
    if (task.extra.in_lines()) {
      store_row_in_lines(common, shared.token, task.extra.lines(epoch, common.rank, token), staged, task.row.lines(),
                         line_flag(epoch));
      __syncthreads();
    } else {
      loaded.row.store(task, token, RowToWindows(task, token, epoch, shared.token));
      __syncthreads();
      stamp_rows(task, epoch, token, shared);
    }
  }
}

}  // namespace tokenyard::engine::cuda
