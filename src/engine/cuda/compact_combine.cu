// SPDX-License-Identifier: Apache-2.0
// Combine at final places: an origin's rows lie one behind the other, and so do their places. Weights may be brought
// back with the rows.
#include "engine/cuda/compact_kernels.h"
#include "engine/cuda/compact_places.cuh"
#include "engine/cuda/pull_combine.cuh"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {
namespace {

constexpr int kWeightsAtOnce = 4;

// Rows that this rank kept.
class KeptRows {
 public:
  __device__ explicit KeptRows(const CompactCombineTask& task)
      : task_(task), kept_(min(std::int64_t{task.route.basic.state[kRouteRows]}, task.rows.row_limit)) {}

  __device__ std::int64_t places(int origin) const {
    const std::int64_t left = kept_ - row(origin, 0);
    return max(std::int64_t{0}, min(left, std::int64_t{task_.route.basic.rows_received[origin]}));
  }

  __device__ bool there(int /*origin*/, int /*place*/) const { return true; }

  __device__ std::int64_t row(int origin, int place) const { return rows_before(task_.route.basic, origin) + place; }

  __device__ const std::byte* from(int origin, int place) const {
    return task_.rows.from + row(origin, place) * task_.rows.from_row_stride;
  }

  __device__ void stage_rest(std::int64_t row) const {
    if (task_.weights == nullptr) return;
    const Common& common = task_.rows.common;
    const auto* from = reinterpret_cast<const float*>(task_.weights + row * task_.weights_stride);
    auto* to = reinterpret_cast<float*>(window_of(common, common.rank) + common.layout.weights_row(row));
    for (int slot = lane_index(); slot < task_.route.top_k; slot += kWarp)
      to[slot] = from[slot];
  }

 private:
  const CompactCombineTask& task_;
  std::int64_t kept_;
};

// Rows that an owner kept, as its header says.
__device__ __forceinline__ std::int64_t rows_kept_by(const Common& common, int owner, std::uint32_t epoch) {
  return header_of(common, common.rank, protocol::kCombinePhase, epoch, owner)->row_limit;
}

// By ascending rank, without those that were dropped. Lanes know a rank each.
class PlacedRows {
 public:
  struct Known {
    InChunk at{};
    ChunkPlaces places{};   // of the lane's rank
    std::int32_t row = -1;  // of the token there; negative where there is none
    unsigned lanes = 0;     // whose rows are still to come
    int first = -kWarp;     // lane 0's rank
  };

  __device__ explicit PlacedRows(const CompactCombineTask& task) : task_(task), ready_(task.rows) {}

  __device__ void begin(std::uint32_t epoch) {
    epoch_ = epoch;
    ready_.begin(epoch);
    const int owner = lane_index();
    const Common& common = task_.rows.common;
    if (owner < common.num_ranks && task_.route.basic.rows_sent[owner] > 0) limit_ = rows_kept_by(common, owner, epoch);
  }

  [[nodiscard]] __device__ bool in_place() const { return ready_.in_place(); }

  __device__ Known load(int token) const {
    const InChunk at = in_chunk(task_.rows.common, token);
    return {at, load_places(task_.rows.common, task_.route, at.chunk, lane_index())};
  }

  __device__ bool wait(const Known& known) const {
    return ready_.wait([&known, this](int owner) {
      const std::int32_t row = row_at(known, owner < kWarp ? known.places : places_of(known, owner), owner);
      return row < 0 ? std::int64_t{-1} : std::int64_t{row} - task_.route.begin_at[owner];
    });
  }

  __device__ const std::byte* next(Known& known) const {
    const Common& common = task_.rows.common;
    while (known.lanes == 0) {
      known.first += kWarp;
      if (known.first >= common.num_ranks) return nullptr;
      const int owner = known.first + lane_index();
      if (known.first > 0) known.places = places_of(known, owner);
      known.row = row_at(known, known.places, owner);
      known.lanes = __ballot_sync(kAllLanes, static_cast<int>(known.row >= 0));
    }
    const int lane = __ffs(static_cast<int>(known.lanes)) - 1;
    known.lanes &= known.lanes - 1;
    return window_of(common, known.first + lane) + common.layout.combine_row(__shfl_sync(kAllLanes, known.row, lane));
  }

 private:
  __device__ ChunkPlaces places_of(const Known& known, int owner) const {
    return load_places(task_.rows.common, task_.route, known.at.chunk, owner);
  }

  __device__ std::int32_t row_at(const Known& known, const ChunkPlaces& places, int owner) const {
    if ((places.mask >> known.at.index & 1U) == 0) return -1;
    const std::int32_t row = place_in(places, known.at.index);
    return row < (owner < kWarp ? limit_ : rows_kept_by(task_.rows.common, owner, epoch_)) ? row : -1;
  }

  const CompactCombineTask& task_;
  Readiness ready_;
  std::uint32_t epoch_ = 0;
  std::int64_t limit_ = 0;  // of the lane's rank
};

struct Tokens {
  std::int64_t first = 0;
  int count = 0;
};

// The weight of a pick comes back from the rank that owns its expert; 0 where there is none or its row was dropped.
__device__ const float* weight_of(const CompactCombineTask& task, std::uint32_t epoch, std::int64_t token, int slot) {
  const Common& common = task.rows.common;
  const int expert = task.route.wire_ids[token * task.route.top_k + slot];
  if (expert < 0) return nullptr;
  const int owner = protocol::owner_of(task.num_experts, common.num_ranks, expert);
  const InChunk at = in_chunk(common, token);
  const std::int32_t row = place_in(load_places(common, task.route, at.chunk, owner), at.index);
  if (row >= rows_kept_by(common, owner, epoch)) return nullptr;
  if (!wait_for_place(task.rows, epoch, owner, row - task.route.begin_at[owner])) return nullptr;
  return reinterpret_cast<const float*>(window_of(common, owner) + common.layout.weights_row(row)) + slot;
}

// By one warp.
__device__ void gather_weights(const CompactCombineTask& task, std::uint32_t epoch, Tokens tokens) {
  const int top_k = task.route.top_k;
  for (int first = lane_index(); first < tokens.count * top_k; first += kWarp * kWeightsAtOnce) {
    float weights[kWeightsAtOnce] = {};
    // All loads before the first store: they cross the link.
#pragma unroll
    for (int k = 0; k < kWeightsAtOnce; ++k) {
      const int i = first + k * kWarp;
      if (i >= tokens.count * top_k) continue;
      const float* from = weight_of(task, epoch, tokens.first + i / top_k, i % top_k);
      if (from != nullptr) weights[k] = *from;
    }
#pragma unroll
    for (int k = 0; k < kWeightsAtOnce; ++k) {
      const int i = first + k * kWarp;
      if (i >= tokens.count * top_k) continue;
      std::byte* row = task.weights_output + (tokens.first + i / top_k) * task.weights_output_stride;
      reinterpret_cast<float*>(row)[i % top_k] = weights[k];
    }
  }
}

// By warps.
__device__ void gather_all_weights(const CompactCombineTask& task, std::uint32_t epoch) {
  const auto tokens = static_cast<int>(task.route.basic.state[kRouteTokens]);
  const int warps = kWarps * static_cast<int>(gridDim.x);
  const int most = max(1, kWeightsAtOnce * kWarp / task.route.top_k);
  const int count = max(1, min(most, (tokens + warps - 1) / warps));
  for (int first = (warp_index() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * count; first < tokens;
       first += warps * count)
    gather_weights(task, epoch, {first, min(count, tokens - first)});
}

// By one warp: an owner drops the last of its rows.
__device__ void count_missing(const CompactCombineTask& task, std::uint32_t epoch) {
  const Common& common = task.rows.common;
  for (int owner = lane_index(); owner < common.num_ranks; owner += kWarp) {
    const std::int64_t rows = task.route.basic.rows_sent[owner];
    if (rows == 0) continue;
    const std::int64_t first = task.route.begin_at[owner];
    const std::int64_t missing = first + rows - max(first, rows_kept_by(common, owner, epoch));
    if (missing > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&common.board->missing_rows),
                static_cast<unsigned long long>(missing));
    }
  }
}

struct FinalPlaces {
  using Task = CompactCombineTask;
  using Owed = KeptRows;
  using Rows = PlacedRows;
  static constexpr bool kLowPrecision = false;

  static __host__ __device__ const CombineTask& rows_of(const Task& task) { return task.rows; }

  static __device__ void sum_rest(const Task& task, std::uint32_t epoch) {
    if (blockIdx.x == 0 && warp_index() == 0) count_missing(task, epoch);
    if (task.weights_output != nullptr) gather_all_weights(task, epoch);
  }

  // The next combine of the handle finds the route as this one did.
  static __device__ void end(const Task& task) {
    if (threadIdx.x != 0) return;
    task.route.basic.state[kCombineAborted] = 0;
    task.rows.common.host->missing_rows = task.rows.common.board->missing_rows;
  }
};

}  // namespace

bool load_compact_combine() {
  return load_pull_combine<FinalPlaces>();
}

void launch_compact_combine(const CompactCombineTask& task, int blocks, bool in_bulk, cudaStream_t stream) {
  launch_pull_combine<FinalPlaces>(task, blocks, in_bulk, stream);
}

}  // namespace tokenyard::engine::cuda
