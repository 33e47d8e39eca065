// SPDX-License-Identifier: Apache-2.0
// The sending half of an expert-major dispatch. Each block routes its tokens by itself: it counts the picks of all
// tokens before them, so that a row's place among those of its source goes along with it. One block tells the counts of
// all tokens, from which receivers know where each source's rows begin. What stands between two barriers needs nothing
// but loads that were issued at the start.
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

__device__ __forceinline__ void clear_table(const ExpertDispatchTask& task, const SentTable& table) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < task.experts.num_experts; i += kThreads)
    table.rows[i] = table.routes[i] = 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < task.common.num_ranks; i += kThreads)
    table.per_rank[i] = 0;
}

struct CountedPick {
  int id;  // an expert
  int owner;
  bool first_of_expert;  // among its token's picks
  bool first_of_rank;
};

__device__ __forceinline__ void count_pick(const SentTable& table, const CountedPick& pick) {
  if (is_clerk()) atomicAdd(table.routes + pick.id, 1);
  if (pick.first_of_expert) atomicAdd(table.rows + pick.id, 1);
  if (pick.first_of_rank) atomicAdd(table.per_rank + pick.owner, 1);
}

// Tokens [first, last), where a token has more picks than a warp has lanes.
__device__ __noinline__ void count_long_tokens(const ExpertDispatchTask& task,
                                               std::int64_t first,
                                               std::int64_t last,
                                               SentTable table) {
  const Experts& experts = task.experts;
  for (std::int64_t token = first + warp_index(); token < last; token += kWarps) {
    for (int slot = lane_index(); slot < experts.top_k; slot += kWarp) {
      const std::int64_t id = id_of(task.picks, token, slot);
      if (!is_expert(experts, id)) continue;
      CountedPick pick{static_cast<int>(id), experts.owners.owner_of(static_cast<int>(id)), true, true};
      for (int before = 0; before < slot; ++before) {
        const std::int64_t other = id_of(task.picks, token, before);
        if (!is_expert(experts, other)) continue;
        pick.first_of_expert = pick.first_of_expert && other != id;
        pick.first_of_rank = pick.first_of_rank && experts.owners.owner_of(static_cast<int>(other)) != pick.owner;
      }
      count_pick(table, pick);
    }
  }
}

// Counts tokens by whole ones in the lanes of each warp, so many of them at a time. A row counts once for each expert
// and each rank, a route for each pick. Only where tokens have no more picks than a warp has lanes.
class PickCounter {
 public:
  __device__ explicit PickCounter(const ExpertDispatchTask& task)
      : of_warp_(static_cast<int>(task.experts.picks.divide(kWarp))),
        in_warp_(static_cast<int>(task.experts.picks.divide(static_cast<unsigned>(lane_index())))),
        slot_(lane_index() - in_warp_ * task.experts.top_k) {}

  // The next tokens from `first` on, as far as `last`.
  __device__ __forceinline__ void load(const ExpertDispatchTask& task, int first, int last) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int token = token_of(first, k);
      ids_[k] = token < last && in_warp_ < of_warp_ ? id_of(task.picks, token, slot_) : -1;
    }
  }

  // What was loaded, as far as `last`.
  __device__ __forceinline__ void add(const Experts& experts, int first, int last, const SentTable& table) const {
    const auto lane = static_cast<unsigned>(lane_index());
    const unsigned below = (1U << lane) - 1;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (token_of(first, k) - in_warp_ >= last) continue;
      const bool counts = token_of(first, k) < last && is_expert(experts, ids_[k]);
      const int id = counts ? static_cast<int>(ids_[k]) : 0;
      const int owner = experts.owners.owner_of(id);
      // Of a token, neighbours in the high bits; lanes without an expert are like nobody.
      const unsigned mine = (counts ? static_cast<unsigned>(in_warp_) : kWarp + lane) << 16;
      const unsigned experts_like = __match_any_sync(kAllLanes, mine | static_cast<unsigned>(id));
      const unsigned ranks_like = __match_any_sync(kAllLanes, mine | static_cast<unsigned>(owner));
      if (counts) count_pick(table, {id, owner, (experts_like & below) == 0, (ranks_like & below) == 0});
    }
  }

  // Tokens that are loaded at once.
  [[nodiscard]] __device__ int step() const {
    return kAtOnce * kWarps * of_warp_;
  }

 private:
  static constexpr int kAtOnce = 2;

  [[nodiscard]] __device__ int token_of(int first, int lap) const {
    return first + (lap * kWarps + warp_index()) * of_warp_ + in_warp_;
  }

  int of_warp_;  // tokens of a warp
  int in_warp_;  // this lane's of them; the last lanes may have none
  int slot_;
  std::int64_t ids_[kAtOnce];  // NOLINT(modernize-avoid-c-arrays): device code
};

// Adds tokens [first, last).
__device__ __noinline__ void count_tokens(const ExpertDispatchTask& task, int first, int last, SentTable table) {
  if (task.experts.top_k > kWarp) return count_long_tokens(task, first, last, table);
  PickCounter counter(task);
#pragma unroll 1
  for (int token = first; token < last; token += counter.step()) {
    counter.load(task, token, last);
    counter.add(task.experts, token, last, table);
  }
}

// A token's picks in the lanes of the warp that tells of it.
struct PicksOfLane {
  __device__ __forceinline__ void load(const ExpertDispatchTask& task, std::int64_t token) {
#pragma unroll
    for (int i = 0; i < kPicksOfLane; ++i) {
      const int slot = i * kWarp + lane_index();
      ids[i] = -1;
      weights[i] = 0;
      if (slot >= task.experts.top_k) continue;
      ids[i] = id_of(task.picks, token, slot);
      if (task.picks.weights != nullptr) weights[i] = weight_of(task.picks, token, slot);
    }
  }

  std::int64_t ids[kPicksOfLane];  // NOLINT(modernize-avoid-c-arrays): device code
  int owners[kPicksOfLane];        // NOLINT(modernize-avoid-c-arrays): device code; -1: no expert
  float weights[kPicksOfLane];     // NOLINT(modernize-avoid-c-arrays): device code
};

// The ranks that the block's token goes to, in shared memory.
struct RanksOfToken {
  std::uint32_t words[kMaxRanks / kWordBits];  // NOLINT(modernize-avoid-c-arrays): device code
};

// One warp of a block routes its token; it is the one that has least of a row to move.
__device__ __forceinline__ bool is_router() {
  return warp_index() == kWarps - 1;
}

__device__ __noinline__ void count_invalid_id(Board* board) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&board->invalid_ids), 1ULL);
}

// By the router: finds the owners of its picks.
__device__ __forceinline__ void find_owners(const ExpertDispatchTask& task,
                                            std::int64_t token,
                                            PicksOfLane& picks,
                                            RanksOfToken& to) {
  const Experts& experts = task.experts;
#pragma unroll 1
  for (int i = lane_index(); i < task.route.words; i += kWarp)
    to.words[i] = 0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPicksOfLane; ++i) {
    const std::int64_t id = picks.ids[i];
    picks.owners[i] = -1;
    if (i * kWarp >= experts.top_k) continue;
    if (is_expert(experts, id)) {
      const int owner = experts.owners.owner_of(static_cast<int>(id));
      picks.owners[i] = owner;
      atomicOr(&to.words[owner / kWordBits], 1U << (owner % kWordBits));
    } else if (id != -1 && id != experts.invalid_id) {
      count_invalid_id(task.common.board);
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane_index(); i < task.route.words; i += kWarp)
    task.route.ranks_of_token[token * task.route.words + i] = to.words[i];
}

// By the router, when the table holds all tokens before this one. Every rank is told of every token: of one that does
// not go there in one unit.
__device__ __forceinline__ void send_packets(const ExpertDispatchTask& task,
                                             std::uint32_t epoch,
                                             std::int64_t token,
                                             const PicksOfLane& picks,
                                             const SentTable& table,
                                             const RanksOfToken& to) {
  const Common& common = task.common;
  const Experts& experts = task.experts;
  const std::int64_t packet = task.extra.packet(epoch, common.rank, token);
  const std::uint32_t tag = tag_of(epoch);
#pragma unroll 1
  for (int rank = lane_index(); rank < common.num_ranks; rank += kWarp) {
    const bool goes_there = (to.words[rank / kWordBits] >> (rank % kWordBits) & 1U) != 0;
    const std::int32_t row = goes_there ? table.per_rank[rank] : kNoRow;
    store_tagged(window_of(common, rank) + packet, {{static_cast<std::uint32_t>(row), 0}}, tag);
  }
  std::int32_t places[kPicksOfLane];  // NOLINT(modernize-avoid-c-arrays): device code
#pragma unroll
  for (int i = 0; i < kPicksOfLane; ++i) {
    places[i] = kNoPlace;
    if (i * kWarp >= experts.top_k || picks.owners[i] < 0) continue;
    const auto id = static_cast<int>(picks.ids[i]);
    const int first = protocol::first_local_expert(experts.num_experts, common.num_ranks, picks.owners[i]);
    places[i] = experts.place(id - first, table.rows[id]);
  }
  RankWalk walk(to.words, task.route.words);
#pragma unroll 1
  for (int rank = walk.next(); rank >= 0; rank = walk.next()) {
#pragma unroll
    for (int i = 0; i < kPicksOfLane; ++i) {
      const int slot = i * kWarp + lane_index();
      if (slot >= experts.top_k) continue;
      const std::int32_t place = picks.owners[i] == rank ? places[i] : kNoPlace;
      store_tagged(window_of(common, rank) + packet + (1 + slot) * kTaggedBytes,
                   {{static_cast<std::uint32_t>(place), __float_as_uint(picks.weights[i])}}, tag);
    }
  }
}

// Each row's stores are before its stamp, which releases them (pairs with receive_part): the barrier orders those of
// other threads.
__device__ inline void stamp_rows(const ExpertDispatchTask& task,
                                  std::uint32_t epoch,
                                  std::int64_t token,
                                  const RanksOfToken& to) {
  const Common& common = task.common;
  for (int rank = static_cast<int>(threadIdx.x); rank < common.num_ranks; rank += kThreads) {
    if ((to.words[rank / kWordBits] >> (rank % kWordBits) & 1U) == 0) continue;
    std::byte* stamp = window_of(common, rank) + task.extra.arrived(epoch, common.rank, token);
    store_release_system(reinterpret_cast<std::uint64_t*>(stamp), protocol::encode_stamp(epoch, 1));
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

// By the clerk, when the table holds all tokens.
__device__ inline void announce(const ExpertDispatchTask& task,
                                std::uint32_t epoch,
                                std::int64_t tokens,
                                const SentTable& table) {
  const Common& common = task.common;
  const Experts& experts = task.experts;
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int id = thread; id < experts.num_experts; id += kThreads) {
    const int owner = experts.owners.owner_of(id);
    const int local = id - protocol::first_local_expert(experts.num_experts, common.num_ranks, owner);
    store_tagged(window_of(common, owner) + task.extra.counts(epoch, common.rank) + local * kTaggedBytes,
                 {{static_cast<std::uint32_t>(table.rows[id]), static_cast<std::uint32_t>(table.routes[id])}},
                 tag_of(epoch));
  }
#pragma unroll 1
  for (int i = thread; i < common.num_ranks * kExpertHeaderUnits; i += kThreads)
    send_header_unit(task, epoch, tokens, i, table);
#pragma unroll 1
  for (int rank = thread; rank < common.num_ranks; rank += kThreads)
    task.route.rows_sent[rank] = table.per_rank[rank];
  if (thread == 0) task.route.state[kOwnTokens] = static_cast<std::uint32_t>(tokens);
}

// What a block loads of a token before it knows the epoch. `Row`: how its row is loaded and stored (expert_rows.cuh).
template <class Row>
struct LoadedToken {
  __device__ __forceinline__ void load(const ExpertDispatchTask& task, std::int64_t token) {
    row.load(task, token);
    if (is_router()) picks.load(task, token);
  }

  Row row;
  PicksOfLane picks;
};

// A block's way through its tokens. `table` is cleared, which begin() makes seen. `staged`: shared memory for a
// row that crosses in lines.
template <class Row>
class Sender {
 public:
  __device__ Sender(const ExpertDispatchTask& task, const SentTable& table, std::byte* staged)
      : task_(task), table_(table), staged_(staged) {}

  // What needs no epoch, of the block's first token.
  __device__ __forceinline__ void begin() {
    if (has_token()) loaded_.load(task_, token_);
    const bool few_picks = task_.experts.top_k <= kWarp;
    int before = is_clerk() ? tokens_ : min(token_, tokens_);
    PickCounter counter(task_);
    if (few_picks) counter.load(task_, 0, before);
    tokens_ = static_cast<int>(tokens_of_call(tokens_, task_.num_tokens_on_device));
    before = min(before, tokens_);
    __syncthreads();
    if (few_picks) counter.add(task_.experts, 0, before, table_);
    const int counted = few_picks ? counter.step() : 0;
    if (counted < before) count_tokens(task_, counted, before, table_);
    if (has_token()) prepare();
  }

  // Behind a barrier, when there is room for the rows.
  __device__ __forceinline__ void send(std::uint32_t epoch) {
    if (is_clerk()) {
      announce(task_, epoch, tokens_, table_);
      if (!has_token()) return;
      __syncthreads();
      clear_table(task_, table_);
      __syncthreads();
      count_tokens(task_, 0, token_, table_);
      __syncthreads();
    }
#pragma unroll 1
    while (has_token()) {
      send_token(epoch);
      const int counted = token_;
      token_ += static_cast<int>(gridDim.x);
      if (!has_token()) return;
      __syncthreads();
      loaded_.load(task_, token_);
      count_tokens(task_, counted, token_, table_);
      prepare();
      __syncthreads();
    }
  }

 private:
  [[nodiscard]] __device__ bool has_token() const {
    return token_ < tokens_;
  }

  __device__ __forceinline__ void prepare() {
    if (is_router()) find_owners(task_, token_, loaded_.picks, ranks());
    if (task_.extra.in_lines()) loaded_.row.store(task_, token_, RowToShared(task_, staged_));
  }

  __device__ __forceinline__ void send_token(std::uint32_t epoch) {
    if (is_router()) send_packets(task_, epoch, token_, loaded_.picks, table_, ranks());
    if (task_.extra.in_lines()) {
      const std::int64_t place = task_.extra.lines(epoch, task_.common.rank, token_);
      return store_row_in_lines({task_.common, ranks().words, task_.route.words, place}, staged_, task_.row.lines(),
                                line_flag(epoch));
    }
    loaded_.row.store(task_, token_, RowToWindows(task_, token_, epoch, ranks().words));
    __syncthreads();
    stamp_rows(task_, epoch, token_, ranks());
  }

  static __device__ RanksOfToken& ranks() {
    __shared__ RanksOfToken ranks;
    return ranks;
  }

  const ExpertDispatchTask& task_;
  SentTable table_;
  std::byte* staged_;
  LoadedToken<Row> loaded_;
  int token_ = static_cast<int>(blockIdx.x);
  int tokens_ = static_cast<int>(task_.num_tokens);  // at most, until it is known
};

}  // namespace tokenyard::engine::cuda
