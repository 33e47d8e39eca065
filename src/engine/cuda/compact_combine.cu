// SPDX-License-Identifier: Apache-2.0
// Combine at final places: expert output that does not lie in the window is staged there, with weights to bring back, a
// header tells each origin, and the origin pulls its tokens' rows from where the route says and sums them in the order
// of ranks.
#include "engine/cuda/combine_kernels.cuh"
#include "engine/cuda/combine_pull.cuh"
#include "engine/cuda/combine_steps.cuh"
#include "engine/cuda/compact_kernels.h"
#include "engine/cuda/compact_places.cuh"
#include "engine/cuda/routes.cuh"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {
namespace {

constexpr int kWeightsAtOnce = 4;

// By warps: the rows that this rank kept, and their weights.
__device__ void stage_rows(const CompactCombineTask& task) {
  const CombineTask& rows = task.rows;
  const Common& common = rows.common;
  std::byte* window = window_of(common, common.rank);
  const std::int64_t kept = min(static_cast<std::int64_t>(task.route.basic.state[kRouteRows]), rows.row_limit);
  const std::int64_t first = static_cast<std::int64_t>(warp_index()) * gridDim.x + blockIdx.x;
  for (std::int64_t row = first; row < kept; row += std::int64_t{kWarps} * gridDim.x) {
    if (rows.staged) {
      stage_row(rows, window + common.layout.combine_row(row), rows.from + row * rows.from_row_stride,
                {lane_index(), kWarp});
    }
    if (task.weights == nullptr) continue;
    const auto* from = reinterpret_cast<const float*>(task.weights + row * task.weights_stride);
    auto* to = reinterpret_cast<float*>(window + common.layout.weights_row(row));
    for (int slot = lane_index(); slot < task.route.top_k; slot += kWarp)
      to[slot] = from[slot];
  }
}

// A handle may combine several times, so the combine before need not be behind a dispatch.
__device__ void send(const CompactCombineTask& task, std::uint32_t epoch) {
  const CombineTask& rows = task.rows;
  const Common& common = rows.common;
  const std::uint32_t dispatched = common.board->epochs[protocol::kDispatchPhase];
  if (rows.ends_views && blockIdx.x == 0) release_views(common, dispatched);
  if (!rows.staged && task.weights == nullptr) {
    if (blockIdx.x != 0 || !wait_for_section(common, epoch)) return;
    if (rows.reads_views) release_views(common, dispatched);
    return write_headers(rows, epoch);
  }
  if (!wait_for_section(common, epoch)) return;
  stage_rows(task);
  if (!last_block(&common.board->blocks_staged)) return;
  if (threadIdx.x == 0) common.board->blocks_staged = 0;
  if (rows.reads_views) release_views(common, dispatched);
  write_headers(rows, epoch);
}

// Rows that an owner kept, as its header says.
__device__ __forceinline__ std::int64_t rows_kept_by(const Common& common, int owner, std::uint32_t epoch) {
  return header_of(common, common.rank, protocol::kCombinePhase, epoch, owner)->row_limit;
}

// The owners of tokens, by one warp. What is known of a chunk serves all its tokens, and that of the next batch is
// loaded ahead.
class FindOwners {
 public:
  __device__ FindOwners(const CompactCombineTask& task, std::uint32_t epoch) : task_(task), epoch_(epoch) {
    const Common& common = task.rows.common;
    const int owner = lane_index();
    if (owner < common.num_ranks && task.route.basic.rows_sent[owner] > 0) limit_ = rows_kept_by(common, owner, epoch);
  }

  __device__ void prepare(std::int64_t token) {
    const Common& common = task_.rows.common;
    next_ = load_places(common, task_.route, in_chunk(common, token).chunk, lane_index());
  }

  __device__ void begin() { known_ = next_; }

  // Dropped rows are left out, and counted.
  __device__ void find(std::int64_t token, OwnersOfToken& owners) {
    const Common& common = task_.rows.common;
    int missing = 0;
    const auto note = [&](int position, int rank, std::int32_t row) {
      const bool kept = row < (rank < kWarp ? limit_ : rows_kept_by(common, rank, epoch_));
      owners.rows[position] = kept ? window_of(common, rank) + common.layout.combine_row(row) : nullptr;
      missing += kept ? 0 : 1;
    };
    const int count = visit_places(common, task_.route, in_chunk(common, token), known_, note);
    missing = __reduce_add_sync(kAllLanes, missing);
    missing_ += missing;
    if (lane_index() != 0) return;
    owners.count = count - missing;
    if (missing == 0) return;
    for (int i = 0, kept = 0; i < count; ++i) {
      if (owners.rows[i] != nullptr) owners.rows[kept++] = owners.rows[i];
    }
  }

  __device__ void end() {
    if (lane_index() != 0 || missing_ == 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(&task_.rows.common.board->missing_rows), missing_);
  }

 private:
  const CompactCombineTask& task_;
  std::uint32_t epoch_;
  std::int64_t limit_ = 0;
  ChunkPlaces known_;
  ChunkPlaces next_;
  unsigned long long missing_ = 0;
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

__device__ std::int64_t tokens_of(const CompactCombineTask& task) {
  return task.route.basic.state[kRouteTokens];
}

// The next combine of the handle finds the route as this one did.
__device__ void end(const CompactCombineTask& task) {
  if (threadIdx.x != 0) return;
  task.route.basic.state[kCombineAborted] = 0;
  task.rows.common.host->missing_rows = task.rows.common.board->missing_rows;
}

template <class From, class To>
__device__ void receive(const CompactCombineTask& task, std::uint32_t epoch) {
  FindOwners owners_of(task, epoch);
  sum_tokens<From, To>(task.rows, [&owners_of](std::int64_t token, OwnersOfToken& owners) {
    if (warp_index() != 0) return;
    owners_of.prepare(token);
    owners_of.begin();
    owners_of.find(token, owners);
  });
  if (warp_index() == 0) owners_of.end();
  if (task.weights_output == nullptr) return;
  const std::int64_t tokens = tokens_of(task);
  const std::int64_t first = static_cast<std::int64_t>(warp_index()) * gridDim.x + blockIdx.x;
  for (std::int64_t token = first; token < tokens; token += std::int64_t{kWarps} * gridDim.x)
    gather_weights(task, epoch, {token, 1});
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads) combine_by_blocks(const __grid_constant__ CompactCombineTask task) {
  run_combine(
      task.rows, [&task](std::uint32_t epoch) { send(task, epoch); },
      [&task](std::uint32_t epoch) { receive<From, To>(task, epoch); }, [&task] { end(task); });
}

template <class From, class To>
__device__ void receive_in_bulk(const CompactCombineTask& task, std::uint32_t epoch) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte ring[];  // NOLINT(modernize-avoid-c-arrays): device code
  pull_tokens<From, To>(task.rows, tokens_of(task), ring, FindOwners(task, epoch), [&](const Batches& batches) {
    if (task.weights_output == nullptr) return;
    for (std::int64_t batch = blockIdx.x; batch < batches.count; batch += gridDim.x)
      gather_weights(task, epoch, {batches.first(batch), batches.tokens_of(batch)});
  });
#else
  receive<From, To>(task, epoch);  // compiled for an older device, and run on a newer one
#endif
}

// One block fills a multiprocessor: its stages do.
template <class From, class To>
__global__ void __launch_bounds__(kThreads, 1) combine_in_bulk(const __grid_constant__ CompactCombineTask task) {
  run_combine(
      task.rows, [&task](std::uint32_t epoch) { send(task, epoch); },
      [&task](std::uint32_t epoch) { receive_in_bulk<From, To>(task, epoch); }, [&task] { end(task); });
}

__global__ void __launch_bounds__(kThreads) acquire_section(const __grid_constant__ Common common) {
  if (__syncthreads_or(static_cast<int>(load_relaxed_device(&common.board->failed))) != 0) return;
  static_cast<void>(wait_for_section(common, common.board->epochs[protocol::kCombinePhase] + 1));
}

struct ByBlocks {
  template <class From, class To>
  static auto get() {
    return combine_by_blocks<From, To>;
  }
};

struct InBulk {
  template <class From, class To>
  static auto get() {
    return combine_in_bulk<From, To>;
  }
};

}  // namespace

void load_compact_combine() {
  load_combine_kernels<ByBlocks, false>();
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, acquire_section), "loading a kernel");
}

bool load_bulk_combine() {
  bool all = true;
  for_each_combine_kernel<InBulk, false>(
      [&all](const void* kernel) { all = make_room_for_ring(kernel, kPullRingBytes) && all; });
  return all;
}

bool combines_in_bulk(const CombineTask& task) {
  return task.vectors && task.row_bytes % 16 == 0 && task.row_bytes >= kLeastPulledBytes;
}

void launch_compact_combine(const CompactCombineTask& task, int blocks, cudaStream_t stream) {
  combine_kernel<ByBlocks, false>(task.rows.rows_dtype, task.rows.output_dtype)<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a combine");
}

void launch_bulk_combine(const CompactCombineTask& task, int blocks, cudaStream_t stream) {
  const auto kernel = combine_kernel<InBulk, false>(task.rows.rows_dtype, task.rows.output_dtype);
  kernel<<<blocks, kThreads, kPullRingBytes, stream>>>(task);
  check(cudaGetLastError(), "launching a combine");
}

void launch_acquire_section(const Common& common, cudaStream_t stream) {
  acquire_section<<<1, kThreads, 0, stream>>>(common);
  check(cudaGetLastError(), "launching a wait");
}

}  // namespace tokenyard::engine::cuda
