// SPDX-License-Identifier: Apache-2.0
// The sender of large rounds, for devices with bulk copies. A warp takes one item after the other, and does all that
// there is to do for it: while its bytes come to the warp's stage in shared memory it works out where they go, stores
// them from there to every rank, and when they are written counts them. Nobody waits for another warp. An item is a
// token, or several whose rows lie one behind the other on both sides.
//
// Who receives cannot tell it from the other sender. Placements differ in a `Send` (row_send.cuh).
#pragma once

#include "engine/cuda/row_send.cuh"
#include "engine/cuda/waits.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kSenders = 12;  // warps of a block that have a stage
inline constexpr int kAllStagesBytes = kSenders * kStageBytes;
static_assert(kSenders < kWarps);

// Warps that receive while the others send; where long rows are copied those come to help.
template <class Task>
__device__ Crew receivers_beside_senders(const Task& task) {
  constexpr std::int64_t kLongRow = 512;
  bool help = false;
  for (int i = 0; i < task.num_copied; ++i)
    help = help || task.copied[static_cast<unsigned>(i)].row_bytes >= kLongRow;
  const int first = warp_index() - kSenders;
  if (!help) return {first, kWarps - kSenders};
  return {first < 0 ? first + kWarps : first, kWarps};
}

// By one warp.
template <class Send>
class BulkSender {
 public:
  using Task = typename Send::Task;
  using Token = typename Send::Token;

  // `loaded`: a byte counter in shared memory.
  __device__ BulkSender(const Task& task, std::byte* stage, std::uint64_t* loaded, Token& route)
      : task_(task),
        stage_(stage),
        loaded_(loaded),
        route_(route),
        at_once_(Send::tokens_at_once(task)),
        first_lane_(next_lane(0)) {}

  // Only the first warps load at once: all stages together would take microseconds before the first was full.
  __device__ void run(std::uint32_t epoch, std::int64_t tokens) {
    constexpr int kEager = 3;
    const int counted = tokens_counted_at_once(tokens);
    const std::int64_t step = std::int64_t{gridDim.x} * kSenders * counted;
    std::int64_t first = (warp_index() * std::int64_t{gridDim.x} + blockIdx.x) * counted;
    bool loads = warp_index() < kEager;
    if (loads) begin(first, tokens);
    for (; first < tokens; first += step) {
      const std::int64_t end = min(first + counted, tokens);
      for (std::int64_t token = first; token < end; token += at_once_) {
        send_rest(token, tokens_at(token, tokens));
        if (!loads) begin(token, tokens);
        loads = true;
        const bool stored = lane_index() != 0 || send_bytes(token, tokens_at(token, tokens));
        if (__all_sync(kAllLanes, static_cast<int>(stored)) == 0) return;
        begin(token + at_once_ < end ? token + at_once_ : first + step, tokens);
      }
      count(first, static_cast<std::uint32_t>(end - first), epoch, tokens);
    }
  }

 private:
  // Of those that bulk copies take.
  __device__ int next_lane(int from) const {
    while (from < task_.num_lanes && !moves_in_bulk(task_.lanes[static_cast<unsigned>(from)], at_once_))
      ++from;
    return from;
  }

  // Of one chunk, and so many that a warp counts several times.
  __device__ int tokens_counted_at_once(std::int64_t tokens) const {
    constexpr int kTimes = 4;
    const std::int64_t most = tokens / (std::int64_t{gridDim.x} * kSenders * kTimes);
    int counted = at_once_;
    while (2 * counted <= min(most, std::int64_t{Send::common(task_).layout.shape().tokens_per_chunk}))
      counted *= 2;
    return counted;
  }

  __device__ int tokens_at(std::int64_t first, std::int64_t tokens) const {
    return static_cast<int>(min(std::int64_t{at_once_}, tokens - first));
  }

  // The bytes that come do not depend on where they go.
  __device__ void begin(std::int64_t first, std::int64_t tokens) {
    if (lane_index() == 0 && first < tokens && first_lane_ < task_.num_lanes)
      load(first_lane_, first, tokens_at(first, tokens), 0);
  }

  __device__ std::uint32_t bytes_from(const Lane& lane, int count, std::int64_t offset) const {
    return static_cast<std::uint32_t>(min(count * lane.row_bytes - offset, std::int64_t{kStageBytes}));
  }

  // By one thread, as what follows: the lane's bytes from `offset` on, as many as fit the stage.
  __device__ void load(int index, std::int64_t first, int count, std::int64_t offset) {
    const Lane& lane = task_.lanes[static_cast<unsigned>(index)];
    const std::uint32_t bytes = bytes_from(lane, count, offset);
    expect_bytes(loaded_, bytes);
    load_bulk(stage_, lane.from + first * lane.from_stride + offset, bytes, loaded_);
  }

  // After a false nothing more is sent.
  __device__ bool send_bytes(std::int64_t first, int count) {
    for (int index = first_lane_; index < task_.num_lanes; index = next_lane(index + 1)) {
      const Lane& lane = task_.lanes[static_cast<unsigned>(index)];
      const std::int64_t base = Send::base(task_, lane, first);
      for (std::int64_t offset = 0; offset < count * lane.row_bytes; offset += kStageBytes) {
        if (index > first_lane_ || offset > 0) load(index, first, count, offset);
        if (!wait_loaded()) return false;
        store(lane, base + offset, bytes_from(lane, count, offset));
      }
    }
    return true;
  }

  __device__ bool wait_loaded() {
    if (!wait_for_bytes(Send::common(task_), loaded_, parity_)) return false;
    parity_ ^= 1U;
    return true;
  }

  // The stage is free again on return, but what was stored may not be written yet.
  __device__ void store(const Lane& lane, std::int64_t base, std::uint32_t bytes) const {
    const int destinations = Send::num_destinations(task_, route_);
    for (int d = 0; d < destinations; ++d) {
      std::byte* window = window_of(Send::common(task_), Send::destination(task_, route_, d));
      store_bulk(window + Send::place(base, lane, route_, d), stage_, bytes);
    }
    close_bulk_stores();
    wait_bulk_stores_read<0>();
  }

  // Routes, ids, and rows that bulk copies cannot take.
  __device__ void send_rest(std::int64_t first, int count) const {
    const Crew crew{lane_index(), kWarp};
    Send::find_route(task_, first, route_);
    __syncwarp();
    for (std::int64_t token = first; token < first + count; ++token) {
      Send::send_rest(task_, token, route_, crew);
      for (int index = 0; index < task_.num_lanes; ++index) {
        const Lane& lane = task_.lanes[static_cast<unsigned>(index)];
        if (!moves_in_bulk(lane, at_once_)) send_row<Send>(task_, lane, token, route_, crew);
      }
    }
  }

  // Bulk stores are written when their wait ends, and what the lanes stored came before __syncwarp: both are before the
  // release in ends_chunk.
  __device__ void count(std::int64_t first, std::uint32_t sent, std::uint32_t epoch, std::int64_t tokens) const {
    const Common& common = Send::common(task_);
    const std::int64_t chunk = first / common.layout.shape().tokens_per_chunk;
    bool ends = false;
    __syncwarp();
    if (lane_index() == 0) {
      wait_bulk_stores<0>();
      ends = ends_chunk(common, chunk, sent, tokens_of_chunk(common, chunk, tokens));
    }
    __syncwarp();  // what that thread has acquired, the others have
    if (__any_sync(kAllLanes, static_cast<int>(ends)) != 0) Send::stamp(task_, static_cast<int>(chunk), epoch, tokens);
  }

  const Task& task_;
  std::byte* stage_;
  std::uint64_t* loaded_;
  Token& route_;
  int at_once_;
  int first_lane_;
  std::uint32_t parity_ = 0;  // of the counter's phase
};

// By all threads of a block, after the wait for space. The warps without a stage come back at once and may receive.
template <class Send>
__device__ void send_in_bulk(const typename Send::Task& task,
                             std::uint32_t epoch,
                             std::int64_t tokens,
                             std::byte* stages) {
  __shared__ typename Send::Token routes[kSenders];
  __shared__ std::uint64_t loaded[kSenders];
  const int warp = warp_index();
  if (warp >= kSenders) return;
  if (tokens == 0 && blockIdx.x == 0 && warp == 0) Send::stamp_nothing(task, epoch);
  if (lane_index() == 0) {
    init_byte_counter(&loaded[warp]);
    // Of the counter, and of the words that said that there is space.
    fence_before_bulk_copies();
  }
  __syncwarp();
  BulkSender<Send>(task, stages + warp * kStageBytes, &loaded[warp], routes[warp]).run(epoch, tokens);
}

}  // namespace tokenyard::engine::cuda
