// SPDX-License-Identifier: Apache-2.0
// What a combine by expert waits for, and what its blocks work on. A rank that gives a combine up writes its header of
// that combine, and nobody else writes one.
#pragma once

#include <cstdint>

#include "engine/cuda/expert_state.cuh"
#include "engine/cuda/expert_sums.cuh"

namespace tokenyard::engine::cuda {

// By any threads: waits until origins have read the rows, and owners the weights, of combine n - 2. `rows` and
// `weights` say whether the rank will be sent such.
template <class Rows, class Weights>
__device__ bool wait_for_combine_space(
    const Common& common, std::uint32_t epoch, int peer, const Rows& rows, const Weights& weights) {
  const std::uint64_t* word = progress_of(common, common.rank, protocol::kCombinePhase, peer);
  return wait_until(common, {peer, Phase::kCombine, epoch}, [&] {
    const std::uint64_t progress = load_acquire_system(word);
    return (!rows || protocol::reached(protocol::rows_released(progress), epoch - kExpertDepth)) &&
           (!weights || protocol::reached(protocol::headers_read(progress), epoch - kExpertDepth));
  });
}

__device__ inline bool gave_combine_up(const Common& common, std::uint32_t epoch, int peer) {
  const protocol::HeaderLine* header = header_of(common, common.rank, protocol::kCombinePhase, epoch, peer);
  return protocol::stamp_is(load_acquire_system(&header->stamp), epoch);
}

// By all threads: this rank's weights to the owners of its tokens' experts.
__device__ __noinline__ inline void push_weights(const ExpertCombineTask& task,
                                                 std::uint32_t epoch,
                                                 std::int64_t tokens) {
  const Common& common = task.common;
  const int top_k = task.experts.top_k;
  const int units = ExpertLayout::units_of(top_k);
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    const auto* weights = reinterpret_cast<const float*>(task.weights + token * task.weights_stride);
    const std::uint32_t* ranks = task.route.ranks_of_token + token * task.route.words;
    for (int i = static_cast<int>(threadIdx.x); i < common.num_ranks * units; i += kThreads) {
      const int owner = i / units;
      const int first = i % units * kTaggedWords;
      if ((ranks[owner / kWordBits] >> (owner % kWordBits) & 1U) == 0) continue;
      const std::uint32_t second = first + 1 < top_k ? __float_as_uint(weights[first + 1]) : 0;
      store_tagged(window_of(common, owner) + task.extra.given(epoch, common.rank, token) + i % units * kTaggedBytes,
                   {{__float_as_uint(weights[first]), second}}, tag_of(epoch));
    }
  }
}

// A row that this rank owes, for the threads that make it.
struct OwedRow {
  WeighedRows from;
  unsigned token;
  int origin;
  bool needed;  // false: its origin gave the combine up, or there is no such row
};

// By one warp: the weights of the row's picks, where their origin gives them now. False when it gave the combine up.
__device__ __noinline__ inline bool take_weights(
    const ExpertCombineTask& task, std::uint32_t epoch, int origin, std::int64_t token, std::uint32_t* weights) {
  const Common& common = task.common;
  const std::byte* from = window_of(common, common.rank) + task.extra.given(epoch, origin, token);
  bool there = true;
  for (int i = lane_index(); i < ExpertLayout::units_of(task.experts.top_k); i += kWarp) {
    TaggedUnit unit{};
    bool given = false;
    const bool waited = wait_until(common, {origin, Phase::kCombine, epoch}, [&] {
      given = load_tagged(from + i * kTaggedBytes, tag_of(epoch), unit);
      return given || gave_combine_up(common, epoch, origin);
    });
    there = there && waited && given;
    weights[kTaggedWords * i] = unit.words[0];
    weights[kTaggedWords * i + 1] = unit.words[1];
  }
  const bool all = __all_sync(kAllLanes, static_cast<int>(there)) != 0;
  __syncwarp();
  return all;
}

// What a dispatch left for a row: its source and token, and of the lane's picks places and weights.
struct RecordOfLanes {
  uint2 head;
  uint2 picks[kPicksOfLane];  // NOLINT(modernize-avoid-c-arrays): device code

  __device__ __forceinline__ void load(const ExpertCombineTask& task, unsigned index) {
    const auto* record = reinterpret_cast<const uint2*>(task.route.items + std::int64_t{index} * task.route.item_words);
    head = record[0];
#pragma unroll
    for (int i = 0; i < kPicksOfLane; ++i) {
      const int slot = i * kWarp + lane_index();
      picks[i] = slot < task.experts.top_k ? record[1 + slot] : make_uint2(static_cast<unsigned>(kNoPlace), 0);
    }
  }
};

// By one warp. `given`: shared memory for the weights that come with combine.
__device__ __forceinline__ void prepare_owed_row(const ExpertCombineTask& task,
                                                 std::uint32_t epoch,
                                                 const RecordOfLanes& record,
                                                 std::uint32_t* given,
                                                 OwedRow& row) {
  const auto origin = static_cast<int>(record.head.x);
  const bool needed = task.weights == nullptr || take_weights(task, epoch, origin, record.head.y, given);
  int count = 0;
#pragma unroll
  for (int i = 0; i < kPicksOfLane; ++i) {
    if (i * kWarp >= task.experts.top_k) continue;
    const auto place = static_cast<std::int32_t>(record.picks[i].x);
    const unsigned lanes = __ballot_sync(kAllLanes, static_cast<int>(place != kNoPlace));
    if (place != kNoPlace) {
      const int at = count + __popc(lanes & ((1U << lane_index()) - 1U));
      row.from.rows[at] = task.from + task.experts.expert_of(place) * task.from_block_stride +
                          task.experts.row_of(place) * task.from_row_stride;
      row.from.weights[at] =
          __uint_as_float(task.weights == nullptr ? record.picks[i].y : given[i * kWarp + lane_index()]);
    }
    count += __popc(lanes);
  }
  if (lane_index() != 0) return;
  row.from.count = count;
  row.origin = origin;
  row.token = record.head.y;
  row.needed = needed;
}

// The rows of a token that came back, ascending by owner, for the threads of a block.
struct ReturnedRows {
  const std::byte* rows[kMaxTopK];  // NOLINT(modernize-avoid-c-arrays): device code
  int owners[kMaxTopK];             // NOLINT(modernize-avoid-c-arrays): device code
  int count;
};

__device__ inline void find_returned(const ExpertCombineTask& task,
                                     std::uint32_t epoch,
                                     std::int64_t token,
                                     ReturnedRows& returned) {
  const Common& common = task.common;
  const std::byte* own = window_of(common, common.rank);
  int count = 0;
  for (int w = 0; w < task.route.words; ++w) {
    for (std::uint32_t word = task.route.ranks_of_token[token * task.route.words + w]; word != 0; word &= word - 1) {
      const int owner = w * kWordBits + __ffs(static_cast<int>(word)) - 1;
      returned.owners[count] = owner;
      returned.rows[count++] = own + common.layout.combine_row(owner * common.layout.shape().max_tokens + token,
                                                               protocol::slot_of(epoch, kExpertDepth));
    }
  }
  returned.count = count;
}

// By all threads of a block.
__device__ inline bool wait_returned(const ExpertCombineTask& task,
                                     std::uint32_t epoch,
                                     std::int64_t token,
                                     const ReturnedRows& returned) {
  const Common& common = task.common;
  std::uint32_t* given_up = task.route.state + kCombineGivenUp;
  bool there = true;
  for (int i = static_cast<int>(threadIdx.x); i < returned.count; i += kThreads) {
    const int owner = returned.owners[i];
    const Awaited awaited{owner, Phase::kCombine, epoch};
    const auto* stamp = reinterpret_cast<const std::uint64_t*>(window_of(common, common.rank) +
                                                               task.extra.returned(epoch, owner, token));
    bool came = false;
    const auto ready = [&] {
      came = protocol::stamp_is(load_acquire_system(stamp), epoch);
      return came || gave_combine_up(common, epoch, owner);
    };
    const bool waited = wait_until(common, awaited, ready, given_up);
    if (waited && !came) give_up(common, given_up, NoticeKind::kAborted, awaited);
    there = there && waited && came;
  }
  return __syncthreads_and(there) != 0;
}

}  // namespace tokenyard::engine::cuda
