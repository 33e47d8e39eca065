// SPDX-License-Identifier: Apache-2.0
// The sender of large dispatches to every rank, for devices with bulk copies. Rows that lie one behind the other on
// both sides are one stretch of bytes, whatever their width. The warps of a block have roles:
//
//   mover    one thread: pieces of stretches and of long rows through the ring, each read once and stored to every rank
//   closer   one warp: stamps the chunks that are complete
//   helpers  the others: what bulk copies cannot take
//
// Who receives cannot tell it from the other sender.
#pragma once

#include "engine/cuda/batches.cuh"
#include "engine/cuda/every_rank_send.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kEveryRankMover = 0;
inline constexpr int kEveryRankCloser = 1;
inline constexpr int kFirstHelper = 2;
inline constexpr int kHelpers = kWarps - kFirstHelper;
static_assert(kHelpers <= kWarp);

inline constexpr std::int32_t kMoverStopped = -1;
inline constexpr std::int32_t kMovedAll = 0x7FFFFFFF;

struct EveryRankShared {
  std::uint64_t loaded[kStages];
  std::int32_t moved;             // batches of this block whose pieces are written, or one of the two above
  std::int32_t helped[kHelpers];  // batches of this block that each helper is done with
};

// What of a lane's rows is contiguous: `count` times `bytes`.
struct Stretches {
  std::int64_t count = 0;
  std::int64_t bytes = 0;
};

__device__ inline Stretches stretches_of(const Lane& lane, int tokens) {
  return is_dense(lane) ? Stretches{1, tokens * lane.row_bytes} : Stretches{tokens, lane.row_bytes};
}

// Walks over the pieces that a block moves: its batches, their bulk lanes, the stretches of a lane, and of a stretch
// what fits a stage.
class StretchPieces {
 public:
  __device__ StretchPieces(const EveryRankDispatchTask& task, const Batches& batches)
      : task_(task), batches_(batches), batch_(blockIdx.x) {
    enter_lane(0);
  }

  __device__ bool there() const { return batch_ < batches_.count; }

  __device__ const std::byte* from() const { return lane().from + token() * lane().from_stride + offset_; }

  __device__ std::int64_t place() const { return place_of(task_, lane(), token()) + offset_; }

  __device__ std::uint32_t bytes() const {
    return static_cast<std::uint32_t>(min(stretches_.bytes - offset_, std::int64_t{kStageBytes}));
  }

  __device__ void advance() {
    offset_ += kStageBytes;
    if (offset_ < stretches_.bytes) return;
    offset_ = 0;
    if (++stretch_ < stretches_.count) return;
    enter_lane(lane_ + 1);
    if (lane_ < task_.num_lanes) return;
    batch_ += gridDim.x;
    enter_lane(0);
  }

 private:
  __device__ const Lane& lane() const { return task_.lanes[static_cast<unsigned>(lane_)]; }

  __device__ std::int64_t token() const { return batches_.first(batch_) + stretch_; }

  __device__ void enter_lane(int from) {
    lane_ = from;
    while (lane_ < task_.num_lanes && !moves_to_every_rank_in_bulk(lane()))
      ++lane_;
    stretch_ = 0;
    if (there() && lane_ < task_.num_lanes) stretches_ = stretches_of(lane(), batches_.tokens_of(batch_));
  }

  const EveryRankDispatchTask& task_;
  const Batches& batches_;
  std::int64_t batch_;
  int lane_ = 0;
  std::int64_t stretch_ = 0;
  std::int64_t offset_ = 0;
  Stretches stretches_{};
};

// By one thread.
class StretchMover {
 public:
  __device__ StretchMover(const EveryRankDispatchTask& task,
                          const Batches& batches,
                          EveryRankShared& shared,
                          std::byte* ring)
      : task_(task),
        batches_(batches),
        shared_(shared),
        ring_(task.said.common, shared.loaded, ring),
        loads_(task, batches),
        stores_(task, batches) {
    expect_batch();
  }

  // What was stored is written on return.
  __device__ void run() {
    for (int stage = 0; stage < kStages; ++stage)
      load_next();
    bool sends = true;
    while (sends && stores_.there())
      sends = send_piece();
    wait_bulk_stores<0>();
    store_release_block(&shared_.moved, sends ? kMovedAll : kMoverStopped);
  }

 private:
  __device__ void load_next() {
    if (!loads_.there()) return;
    ring_.load(loads_.from(), loads_.bytes());
    loads_.advance();
  }

  __device__ bool send_piece() {
    if (!ring_.wait_loaded()) return false;
    const Common& common = task_.said.common;
    const std::int64_t place = stores_.place();
    const std::uint32_t bytes = stores_.bytes();
    visit_ranks(common, [&](int rank) { ring_.store(window_of(common, rank) + place, bytes); });
    stores_.advance();
    if (!ring_.close()) return true;
    load_next();
    if (ring_.complete() == batch_ends_) {
      store_release_block(&shared_.moved, ++moved_);
      batch_ += gridDim.x;
      expect_batch();
    }
    return true;
  }

  __device__ void expect_batch() {
    if (batch_ >= batches_.count) return;
    for (int index = 0; index < task_.num_lanes; ++index) {
      const Lane& lane = task_.lanes[static_cast<unsigned>(index)];
      if (!moves_to_every_rank_in_bulk(lane)) continue;
      const Stretches stretches = stretches_of(lane, batches_.tokens_of(batch_));
      batch_ends_ += static_cast<unsigned>(stretches.count * protocol::ceil_div(stretches.bytes, kStageBytes));
    }
  }

  const EveryRankDispatchTask& task_;
  const Batches& batches_;
  EveryRankShared& shared_;
  BulkRing ring_;
  StretchPieces loads_;
  StretchPieces stores_;
  std::int64_t batch_ = blockIdx.x;  // the next that will be complete
  unsigned batch_ends_ = 0;          // pieces of the block up to its end
  std::int32_t moved_ = 0;
};

__device__ inline bool needs_helpers(const EveryRankDispatchTask& task) {
  for (int index = 0; index < task.num_lanes; ++index) {
    if (!moves_to_every_rank_in_bulk(task.lanes[static_cast<unsigned>(index)])) return true;
  }
  return false;
}

// By one warp. Tokens go round all helpers across the bounds of batches.
__device__ inline void help_batches(const EveryRankDispatchTask& task,
                                    const Batches& batches,
                                    EveryRankShared& shared) {
  const int helper = warp_index() - kFirstHelper;
  int next = helper;
  std::int32_t done = 0;
  for (std::int64_t batch = blockIdx.x; batch < batches.count; batch += gridDim.x) {
    const int tokens = batches.tokens_of(batch);
    for (; next < tokens; next += kHelpers) {
      for (int index = 0; index < task.num_lanes; ++index) {
        const Lane& lane = task.lanes[static_cast<unsigned>(index)];
        if (!moves_to_every_rank_in_bulk(lane))
          send_slice(task, lane, batches.first(batch) + next, 0, {lane_index(), kWarp});
      }
    }
    next -= tokens;
    __syncwarp();
    if (lane_index() == 0) store_release_block(&shared.helped[helper], ++done);
  }
}

// By one warp. What the mover and the helpers say is complete is before the release in ends_chunk.
__device__ inline void close_stretches(const EveryRankDispatchTask& task,
                                       const Batches& batches,
                                       std::uint32_t epoch,
                                       EveryRankShared& shared) {
  const Common& common = task.said.common;
  const bool helped = needs_helpers(task);
  std::int32_t before = 0;
  for (std::int64_t batch = blockIdx.x; batch < batches.count; batch += gridDim.x, ++before) {
    const std::int64_t chunk = batches.first(batch) / common.layout.shape().tokens_per_chunk;
    const std::uint32_t rows = tokens_of_chunk(common, chunk, batches.tokens);
    std::int32_t moved = before;
    while (lane_index() == 0 && moved != kMoverStopped && moved <= before)
      moved = load_acquire_block(&shared.moved);
    while (helped && lane_index() < kHelpers && load_acquire_block(&shared.helped[lane_index()]) <= before) {
    }
    __syncwarp();
    if (__shfl_sync(kAllLanes, moved, 0) == kMoverStopped) return;
    bool ends = false;
    if (lane_index() == 0) ends = ends_chunk(common, chunk, static_cast<std::uint32_t>(batches.tokens_of(batch)), rows);
    if (__shfl_sync(kAllLanes, ends ? 1 : 0, 0) != 0) stamp_chunk_of(common, chunk, epoch, rows, {lane_index(), kWarp});
  }
}

// By all threads of a block, when there is space. Helpers come back first and may receive meanwhile: nothing that the
// others of the block still do waits for them.
__device__ inline void send_stretches(const EveryRankDispatchTask& task,
                                      std::uint32_t epoch,
                                      std::int64_t tokens,
                                      std::byte* ring) {
  __shared__ EveryRankShared shared;
  const Batches batches = batches_of(tokens, task.said.common.layout.shape().tokens_per_chunk);
  if (threadIdx.x == kEveryRankMover * kWarp) {
    for (std::uint64_t& counter : shared.loaded)
      init_byte_counter(&counter);
    for (std::int32_t& done : shared.helped)
      done = 0;
    shared.moved = 0;
    // Of the counters, and of the words that said that there is space.
    fence_before_bulk_copies();
  }
  __syncthreads();
  if (warp_index() == kEveryRankMover) {
    if (lane_index() == 0) StretchMover(task, batches, shared, ring).run();
    __syncwarp();
  } else if (warp_index() == kEveryRankCloser) {
    close_stretches(task, batches, epoch, shared);
  } else if (needs_helpers(task)) {
    help_batches(task, batches, shared);
  }
}

}  // namespace tokenyard::engine::cuda
