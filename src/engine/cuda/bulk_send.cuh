// SPDX-License-Identifier: Apache-2.0
// The sender of large rounds, for devices with bulk copies. A block sends batches of consecutive tokens, and its warps
// have roles, so that nobody who moves rows waits for a route or a release:
//
//   mover    one thread: bulk copies of rows into a ring of stages in shared memory, and from there to every rank
//   closer   one warp: counts and stamps what is complete
//   routers  the others: routes, ids, and rows that bulk copies cannot take
//
// Who receives cannot tell it from the other sender. Placements differ in a `Send` (row_send.cuh).
#pragma once

#include "engine/cuda/batches.cuh"
#include "engine/cuda/bulk_ring.cuh"
#include "engine/cuda/row_send.cuh"

namespace tokenyard::engine::cuda {

inline constexpr int kMoverWarp = 0;
inline constexpr int kCloserWarp = 1;
inline constexpr int kFirstRouter = 2;
inline constexpr int kRouters = kWarps - kFirstRouter;

// Routes are handed from the routers to the mover in tables used in turn. Named barriers, one of each kind a table.
inline constexpr int kTables = 2;
inline constexpr int kFilledBarrier = 1;
inline constexpr int kFreeBarrier = kFilledBarrier + kTables;
inline constexpr int kHandingOver = (kRouters + 1) * kWarp;  // threads at such a barrier

inline constexpr std::int32_t kStopped = -1;

template <class Send>
struct BulkShared {
  typename Send::Token tables[kTables][kMaxBatch];
  std::uint64_t loaded[kStages];
  std::int32_t complete;  // batches of this block whose rows from stages are written; or kStopped
};

// Walks over the pieces that a block moves: its batches, their tokens, their bulk lanes, and of a row what fits a
// stage.
template <class Task>
class Pieces {
 public:
  __device__ Pieces(const Task& task, const Batches& batches)
      : task_(task), batches_(batches), batch_(blockIdx.x), lane_(bulk_lane(0)) {
    enter_batch();
  }

  __device__ bool there() const { return token_ < end_; }

  __device__ const Lane& lane() const { return task_.lanes[static_cast<unsigned>(lane_)]; }

  __device__ std::int64_t token() const { return token_; }

  __device__ std::int64_t offset() const { return offset_; }

  __device__ std::uint32_t bytes() const {
    return static_cast<std::uint32_t>(min(lane().row_bytes - offset_, std::int64_t{kStageBytes}));
  }

  __device__ void advance() {
    offset_ += kStageBytes;
    if (offset_ < lane().row_bytes) return;
    offset_ = 0;
    lane_ = bulk_lane(lane_ + 1);
    if (lane_ < task_.num_lanes) return;
    lane_ = bulk_lane(0);
    if (++token_ < end_) return;
    batch_ += gridDim.x;
    enter_batch();
  }

 private:
  __device__ int bulk_lane(int from) const {
    while (from < task_.num_lanes && !moves_in_bulk(task_.lanes[static_cast<unsigned>(from)]))
      ++from;
    return from;
  }

  __device__ void enter_batch() {
    token_ = end_ = 0;
    if (batch_ >= batches_.count) return;
    token_ = batches_.first(batch_);
    end_ = token_ + batches_.tokens_of(batch_);
  }

  const Task& task_;
  const Batches& batches_;
  std::int64_t batch_;
  std::int64_t token_ = 0;
  std::int64_t end_ = 0;
  std::int64_t offset_ = 0;
  int lane_;
};

// By one thread.
template <class Send>
class Mover {
 public:
  using Task = typename Send::Task;
  using Token = typename Send::Token;

  __device__ Mover(const Task& task, const Batches& batches, BulkShared<Send>& shared, std::byte* ring)
      : task_(task),
        batches_(batches),
        shared_(shared),
        ring_(task.common, shared.loaded, ring),
        loads_(task, batches),
        stores_(task, batches) {
    for (int index = 0; index < task.num_lanes; ++index) {
      const Lane& lane = task.lanes[static_cast<unsigned>(index)];
      if (moves_in_bulk(lane)) pieces_of_token_ += static_cast<int>(protocol::ceil_div(lane.row_bytes, kStageBytes));
    }
    expect_batch();
  }

  __device__ void begin() {
    for (int stage = 0; stage < kStages; ++stage)
      load_next();
  }

  // After a false nothing more is sent.
  __device__ bool send(const Token* routes, int tokens) {
    for (int token = 0; token < tokens; ++token) {
      for (int piece = 0; piece < pieces_of_token_; ++piece) {
        if (!send_piece(routes[token])) return false;
      }
    }
    return true;
  }

  // What was stored is written on return.
  __device__ void finish(bool sent_all) {
    wait_bulk_stores<0>();
    store_release_block(&shared_.complete, sent_all ? kAllOfBlock : kStopped);
  }

 private:
  static constexpr std::int32_t kAllOfBlock = 0x7FFFFFFF;

  __device__ void load_next() {
    if (!loads_.there()) return;
    const Lane& lane = loads_.lane();
    ring_.load(lane.from + loads_.token() * lane.from_stride + loads_.offset(), loads_.bytes());
    loads_.advance();
  }

  __device__ bool send_piece(const Token& route) {
    if (!ring_.wait_loaded()) return false;
    const Common& common = task_.common;
    const Lane& lane = stores_.lane();
    const std::int64_t base = Send::base(task_, lane, stores_.token()) + stores_.offset();
    for (int d = 0; d < route.num_destinations; ++d) {
      ring_.store(window_of(common, route.destinations[d]) + Send::place(base, lane, route, d), stores_.bytes());
    }
    stores_.advance();
    if (!ring_.close()) return true;
    load_next();
    if (ring_.complete() == batch_ends_) {
      store_release_block(&shared_.complete, ++complete_);
      batch_ += gridDim.x;
      expect_batch();
    }
    return true;
  }

  __device__ void expect_batch() {
    if (batch_ < batches_.count) batch_ends_ += static_cast<unsigned>(batches_.tokens_of(batch_) * pieces_of_token_);
  }

  const Task& task_;
  const Batches& batches_;
  BulkShared<Send>& shared_;
  BulkRing ring_;
  Pieces<Task> loads_;
  Pieces<Task> stores_;
  int pieces_of_token_ = 0;
  std::int64_t batch_ = blockIdx.x;  // the next that will be complete
  unsigned batch_ends_ = 0;          // pieces of the block up to its end
  std::int32_t complete_ = 0;
};

// By one warp. A table is free again when its batch's last piece is on its way. Only where a batch comes that waits for
// the table is this said, so that nothing is left at a barrier.
template <class Send>
__device__ void move_batches(const typename Send::Task& task,
                             const Batches& batches,
                             BulkShared<Send>& shared,
                             std::byte* ring) {
  Mover<Send> mover(task, batches, shared, ring);
  if (lane_index() == 0) mover.begin();
  bool sends = true;
  int table = 0;
  for (std::int64_t batch = blockIdx.x; batch < batches.count; batch += gridDim.x) {
    wait_at(kFilledBarrier + table, kHandingOver);
    if (lane_index() == 0) sends = sends && mover.send(shared.tables[table], batches.tokens_of(batch));
    __syncwarp();
    if (batch + std::int64_t{kTables} * gridDim.x < batches.count) arrive_at(kFreeBarrier + table, kHandingOver);
    table = (table + 1) % kTables;
  }
  if (lane_index() == 0) mover.finish(sends);
  __syncwarp();
}

// Tokens go round all routers across the bounds of batches.
template <class Send>
__device__ void route_batches(const typename Send::Task& task, const Batches& batches, BulkShared<Send>& shared) {
  const Crew crew{lane_index(), kWarp};
  int next = warp_index() - kFirstRouter;
  int table = 0;
  for (std::int64_t batch = blockIdx.x; batch < batches.count; batch += gridDim.x) {
    if (batch >= std::int64_t{kTables} * gridDim.x) wait_at(kFreeBarrier + table, kHandingOver);
    const int tokens = batches.tokens_of(batch);
    for (; next < tokens; next += kRouters) {
      const std::int64_t token = batches.first(batch) + next;
      typename Send::Token& route = shared.tables[table][next];
      Send::find_route(task, token, route);
      __syncwarp();
      Send::send_rest(task, token, route, crew);
      for (int index = 0; index < task.num_lanes; ++index) {
        const Lane& lane = task.lanes[static_cast<unsigned>(index)];
        if (!moves_in_bulk(lane)) send_row<Send>(task, lane, token, route, crew);
      }
    }
    next -= tokens;
    __syncwarp();
    arrive_at(kFilledBarrier + table, kHandingOver);
    table = (table + 1) % kTables;
  }
}

// By one warp. Rows that came from stages are written when the mover says so; ids and the other rows, which the routers
// stored, were handed to the mover at a barrier before. Both are thus before the release in ends_chunk.
template <class Send>
__device__ void close_batches(const typename Send::Task& task,
                              const Batches& batches,
                              std::uint32_t epoch,
                              BulkShared<Send>& shared) {
  std::int32_t before = 0;
  for (std::int64_t batch = blockIdx.x; batch < batches.count; batch += gridDim.x, ++before) {
    const auto chunk = static_cast<int>(batches.first(batch) / task.common.layout.shape().tokens_per_chunk);
    std::int32_t complete = before;
    bool ends = false;
    if (lane_index() == 0) {
      while (complete != kStopped && complete <= before)
        complete = load_acquire_block(&shared.complete);
      ends =
          complete != kStopped && ends_chunk(task.common, chunk, static_cast<std::uint32_t>(batches.tokens_of(batch)),
                                             tokens_of_chunk(task.common, chunk, batches.tokens));
    }
    __syncwarp();
    if (__shfl_sync(kAllLanes, complete, 0) == kStopped) return;
    if (__shfl_sync(kAllLanes, ends ? 1 : 0, 0) != 0) Send::stamp(task, chunk, epoch, batches.tokens);
  }
}

// By all threads of a block, after the wait for space. Routers come back first and may receive meanwhile: nothing that
// the others of the block still do waits for them.
template <class Send>
__device__ void send_in_bulk(const typename Send::Task& task,
                             std::uint32_t epoch,
                             std::int64_t tokens,
                             std::byte* ring) {
  __shared__ BulkShared<Send> shared;
  const Batches batches = batches_of(tokens, task.common.layout.shape().tokens_per_chunk);
  if (threadIdx.x == kMoverWarp * kWarp) {
    for (std::uint64_t& counter : shared.loaded)
      init_byte_counter(&counter);
    shared.complete = 0;
    // Of the counters, and of the words that said that there is space.
    fence_before_bulk_copies();
  }
  __syncthreads();
  switch (warp_index()) {
    case kMoverWarp:
      return move_batches<Send>(task, batches, shared, ring);
    case kCloserWarp:
      if (tokens == 0 && blockIdx.x == 0) Send::stamp_nothing(task, epoch);
      return close_batches<Send>(task, batches, epoch, shared);
    default:
      return route_batches<Send>(task, batches, shared);
  }
}

}  // namespace tokenyard::engine::cuda
