// SPDX-License-Identifier: Apache-2.0
// Dispatch of every rank's rows to all ranks. Sizes that the host was told need one launch: headers go out, rows follow
// to their final places, and the headers that come in are compared while rows are on their way. Otherwise a launch of
// one block exchanges headers first, and the host waits for what they say.
#include <algorithm>

#include "engine/cuda/bulk_send.cuh"
#include "engine/cuda/every_rank_headers.cuh"
#include "engine/cuda/every_rank_kernels.h"
#include "engine/cuda/every_rank_send.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/routes.cuh"

namespace tokenyard::engine::cuda {
namespace {

// By a block: whether the rows of the last dispatch are read everywhere. A rank that says so has also sent all of its
// own, so that none of them can still be on their way to places that are another's now. A rank that gives this dispatch
// up may go on reading older rows, so its header ends the wait too.
__device__ bool wait_for_places(const Announcement& said, std::uint32_t epoch) {
  const Common& common = said.common;
  std::uint32_t* state = said.route.state + kRouteAborted;
  bool there = true;
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kDispatchPhase, peer);
    const protocol::HeaderLine* header = header_of(common, common.rank, protocol::kDispatchPhase, epoch, peer);
    const Awaited awaited{peer, Phase::kDispatch, epoch};
    const auto read = [&] { return protocol::reached(protocol::rows_released(load_acquire_system(word)), epoch - 1); };
    const auto given_up = [&] {
      return protocol::stamp_is(load_acquire_system(&header->stamp), epoch) &&
             header->status == protocol::HeaderStatus::kAborted;
    };
    if (!wait_until(
            common, awaited, [&] { return read() || given_up(); }, state)) {
      there = false;
    } else if (given_up()) {
      give_up(common, state, NoticeKind::kAborted, awaited);
      there = false;
    }
  }
  return __syncthreads_and(there) != 0;
}

// Rows of the result that one warp takes at a time: fewer than a chunk where they are to be copied, and there are warps
// enough.
__device__ int rows_at_once(const EveryRankDispatchTask& task, int warps) {
  const Common& common = task.said.common;
  int rows = common.layout.shape().tokens_per_chunk;
  while (task.num_copied > 0 && rows > 1 && protocol::ceil_div(task.most_tokens, rows) * common.num_ranks < warps)
    rows /= 2;
  return rows;
}

struct Stretch {
  std::int64_t first = 0;  // token of the source
  std::int64_t count = 0;
};

// By one warp: the first row of a source in the result, from the headers of those before it. Negative when one of them
// gave up.
__device__ std::int64_t first_row_of(const Announcement& said, int source, std::uint32_t epoch) {
  std::int64_t rows = 0;
  bool there = true;
  for (int before = lane_index(); before < source; before += kWarp) {
    const protocol::HeaderLine* header = wait_header(said, before, epoch);
    there = there && header != nullptr;
    if (header != nullptr) rows += header->call_tokens;
  }
  __syncwarp();
  for (int step = kWarp / 2; step > 0; step /= 2)
    rows += __shfl_xor_sync(kAllLanes, rows, step);
  return __all_sync(kAllLanes, static_cast<int>(there)) != 0 ? rows : -1;
}

// By one warp. Sizes that turn out to be other than this rank's host was told must not lead out of its tensors.
__device__ void copy_payloads(const EveryRankDispatchTask& task, std::int64_t first, std::int64_t count) {
  const Common& common = task.said.common;
  count = min(count, task.num_rows - first);
  if (count <= 0) return;
  const std::byte* space = window_of(common, common.rank) + common.layout.payload(0);
  const Crew crew{lane_index(), kWarp};
  for (int index = 0; index < task.num_copied; ++index) {
    const Copied& plane = task.copied[static_cast<unsigned>(index)];
    const std::byte* from = space + plane.offset + first * plane.stride;
    std::byte* to = plane.data + first * plane.row_stride;
    if (plane.row_stride == plane.row_bytes && plane.stride == plane.row_bytes) {
      copy_row(to, from, count * plane.row_bytes, plane.unit, crew);
      continue;
    }
    copy_rows({to, plane.row_stride}, {from, plane.stride}, plane.row_bytes, plane.unit,
              ~std::uint64_t{0} >> (64 - count));
  }
}

// By one lane: how many of the stretch's rows there are, when they are all here.
__device__ std::int64_t wait_rows(const EveryRankDispatchTask& task, int source, Stretch rows, std::uint32_t epoch) {
  const Common& common = task.said.common;
  const protocol::HeaderLine* header = wait_header(task.said, source, epoch);
  if (header == nullptr) return 0;
  const std::int64_t count = min(rows.count, header->num_tokens - rows.first);
  if (count <= 0) return 0;
  const std::int64_t chunk = rows.first / common.layout.shape().tokens_per_chunk;
  const std::uint64_t* stamp = &chunk_of(common, common.rank, source, chunk)->stamp;
  const bool there = wait_until(
      common, {source, Phase::kDispatch, epoch}, [&] { return protocol::stamp_is(load_acquire_system(stamp), epoch); },
      task.said.route.state + kRouteAborted);
  return there ? count : 0;
}

__device__ void receive_rows(const EveryRankDispatchTask& task, int source, Stretch rows, std::uint32_t epoch) {
  std::int64_t count = 0;
  if (lane_index() == 0) count = wait_rows(task, source, rows, epoch);
  __syncwarp();
  count = __shfl_sync(kAllLanes, count, 0);
  if (task.num_copied == 0 || count == 0) return;
  const std::int64_t base = first_row_of(task.said, source, epoch);
  if (base >= 0) copy_payloads(task, base + rows.first, count);
}

// By the warps of all blocks, of each of which there are `warps.count`.
__device__ void receive(const EveryRankDispatchTask& task, std::uint32_t epoch, Crew warps) {
  const Common& common = task.said.common;
  const int all = warps.count * static_cast<int>(gridDim.x);
  const int index = warps.index * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  // One that has nothing to send first, unless there is one block only.
  if (task.verifies && index == static_cast<int>(gridDim.x) - 1) verify(task.said, epoch);
  const int rows = rows_at_once(task, all);
  const std::int64_t items = protocol::ceil_div(task.most_tokens, rows) * common.num_ranks;
  for (std::int64_t item = index; item < items; item += all) {
    // Own rows last: the others' are on their way meanwhile.
    const auto source = static_cast<int>((common.rank + 1 + item % common.num_ranks) % common.num_ranks);
    receive_rows(task, source, {item / common.num_ranks * rows, rows}, epoch);
  }
}

// By a block, when this rank has read all that it will read.
__device__ void publish_progress(const Common& common, std::uint32_t released, std::uint32_t epoch) {
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    store_release_system(progress_of(common, peer, protocol::kDispatchPhase, common.rank),
                         protocol::encode_progress(released, epoch));
  }
  if (threadIdx.x == 0) common.board->rows_released = released;
}

// By the last block of the operation, for the next one.
__device__ void finish(const EveryRankDispatchTask& task, std::uint32_t epoch) {
  const Common& common = task.said.common;
  Board& board = *common.board;
  // Nobody will combine an operation that was given up: its rows are released here.
  const bool aborted = load_relaxed_device(task.said.route.state + kRouteAborted) != 0;
  if (aborted) forget_arrivals(common);
  const std::uint32_t released = aborted || task.releases ? epoch : board.rows_released;
  __syncthreads();
  if (threadIdx.x == 0) board.blocks_done = 0;
  if (task.announces) write_epochs(common, protocol::kDispatchPhase, epoch, 0);
  if (task.receives) publish_progress(common, released, epoch);
}

// `send_all` is given the epoch and the number of tokens. `receivers` are the warps for the other half, none for an
// index below 0; they may begin while others of the block still send.
template <class Send>
__device__ void dispatch(const EveryRankDispatchTask& task, Crew receivers, const Send& send_all) {
  const Announcement& said = task.said;
  Board& board = *said.common.board;
  // Loaded together, before anything waits for either.
  const std::uint32_t last = load_relaxed_device(&board.epochs[protocol::kDispatchPhase]);
  const std::uint32_t failed = load_relaxed_device(&board.failed);
  const std::uint32_t epoch = task.announces ? last + 1 : last;
  // As a block: warps wait for each other at barriers that count them.
  if (__syncthreads_or(static_cast<int>(failed)) != 0) return;
  if (task.sends) {
    const std::int64_t tokens = tokens_of_call(said.num_tokens, said.num_tokens_on_device);
    // By a block that has no rows to send when there are few: nobody waits for the release then.
    if (task.announces && blockIdx.x == gridDim.x - 1) announce(said, epoch, tokens);
    if (wait_for_places(said, epoch)) send_all(epoch, tokens);
  }
  if (task.receives && receivers.index >= 0) receive(task, epoch, receivers);
  if (last_block(&board.blocks_done)) finish(task, epoch);
}

__global__ void __launch_bounds__(kThreads) every_rank_dispatch(const __grid_constant__ EveryRankDispatchTask task) {
  dispatch(task, {warp_index(), kWarps},
           [&task](std::uint32_t epoch, std::int64_t tokens) { send_by_stores(task, epoch, tokens); });
}

// One block fills a multiprocessor: its stages do.
__global__ void __launch_bounds__(kThreads, 1) every_rank_in_bulk(const __grid_constant__ EveryRankDispatchTask task) {
  dispatch(task, receivers_beside_senders(task), [&task](std::uint32_t epoch, std::int64_t tokens) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) std::byte stages[];  // NOLINT(modernize-avoid-c-arrays): device code
    send_in_bulk<EveryRankSend>(task, epoch, tokens, stages);
#else
    send_by_stores(task, epoch, tokens);  // compiled for an older device, and run on a newer one
#endif
  });
}

// One block. The rows that follow come with launches of their own, in the same epoch.
__global__ void __launch_bounds__(kThreads) learn_sizes(const __grid_constant__ Announcement said, HostSizes* sizes) {
  const Common& common = said.common;
  Board& board = *common.board;
  if (__syncthreads_or(static_cast<int>(load_relaxed_device(&board.failed))) != 0) return;
  const std::uint32_t epoch = board.epochs[protocol::kDispatchPhase] + 1;
  announce(said, epoch, tokens_of_call(said.num_tokens, said.num_tokens_on_device));
  const bool fine = __syncthreads_or(static_cast<int>(warp_index() == 0 && verify(said, epoch))) != 0;
  if (fine) {
    for (int source = static_cast<int>(threadIdx.x); source < common.num_ranks; source += kThreads)
      sizes->rows[source] = static_cast<std::int32_t>(said.route.rows_received[source]);
  } else if (load_relaxed_device(&board.failed) == 0) {
    publish_progress(common, epoch, epoch);
  }
  write_epochs(common, protocol::kDispatchPhase, epoch, 0);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  *const_cast<volatile SizesState*>(&sizes->state) = fine ? SizesState::kKnown : SizesState::kGivenUp;
}

}  // namespace

bool load_every_rank_dispatch() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, learn_sizes), "loading a kernel");
  check(cudaFuncSetAttribute(every_rank_dispatch, cudaFuncAttributePreferredSharedMemoryCarveout, 0),
        "loading a kernel");
  return make_room_for_ring(reinterpret_cast<const void*>(every_rank_in_bulk), kAllStagesBytes);
}

void launch_learn_sizes(const Announcement& said, HostSizes* sizes, cudaStream_t stream) {
  learn_sizes<<<1, kThreads, 0, stream>>>(said, sizes);
  check(cudaGetLastError(), "launching an exchange of sizes");
}

void launch_every_rank_dispatch(const EveryRankDispatchTask& task, int blocks, cudaStream_t stream) {
  every_rank_dispatch<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a dispatch");
}

void launch_every_rank_in_bulk(const EveryRankDispatchTask& task, int blocks, cudaStream_t stream) {
  every_rank_in_bulk<<<blocks, kThreads, kAllStagesBytes, stream>>>(task);
  check(cudaGetLastError(), "launching a dispatch");
}

}  // namespace tokenyard::engine::cuda
