// SPDX-License-Identifier: Apache-2.0

#include "engine/cuda/every_rank_engine.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>
#include <utility>

#include "engine/cuda/access_unit.h"
#include "engine/cuda/bulk_sums.h"
#include "engine/cuda/combine_tasks.h"
#include "engine/cuda/every_rank_kernels.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/payload_tasks.h"

namespace tokenyard::engine::cuda {
namespace {

static_assert(kNoSizes == kNotGiven);

// Of rows, at least, for each block that moves or sums them.
constexpr std::int64_t kBytesPerBlock = 4 << 10;
constexpr std::int64_t kMostSlices = 16;

std::int64_t row_bytes_of(const EveryRankDispatchTask& task) {
  std::int64_t bytes = 0;
  for (int i = 0; i < task.num_lanes; ++i)
    bytes += task.lanes[static_cast<std::size_t>(i)].row_bytes;
  return bytes;
}

// Tokens whose rows, lying one behind the other on both sides, fit a stage; no more than leave each block something.
int tokens_at_once(const EveryRankDispatchTask& task, int tokens_per_chunk, int blocks) {
  const auto dense = [](const Lane& lane) {
    return lane.unit == 16 && lane.from_stride == lane.row_bytes && lane.stride == lane.row_bytes;
  };
  if (!std::all_of(task.lanes.begin(), task.lanes.begin() + task.num_lanes, dense)) return 1;
  const std::int64_t most = std::min(kStageBytes / row_bytes_of(task), task.said.num_tokens / blocks);
  int tokens = 1;
  while (std::int64_t{2} * tokens <= std::min<std::int64_t>(most, tokens_per_chunk))
    tokens *= 2;
  return tokens;
}

void set_sizes(Round& round) {
  round.rows_received = round.tokens_of;
  std::exclusive_scan(round.tokens_of.begin(), round.tokens_of.end(), round.result_row.begin(), 0);
  round.row_base = round.result_row;
  round.num_rows = std::reduce(round.tokens_of.begin(), round.tokens_of.end(), std::int64_t{0});
}

}  // namespace

EveryRankEngine::EveryRankEngine(const Setup& setup, fabric::Window& window)
    : CudaEngine(setup, window), sizes_(make_pinned_memory(device(), sizeof(HostSizes))) {
  const DeviceScope scope(device());
  bulk_ = load_every_rank_dispatch();
  bulk_combines_ = load_every_rank_combine();
}

void EveryRankEngine::reserve(Round& round) {
  const auto ranks = static_cast<std::size_t>(setup().num_ranks);
  for (auto* counts : {&round.tokens_of, &round.rows_received, &round.row_base, &round.result_row})
    counts->resize(ranks);
  keep(round, std::make_unique<RouteBuffers>(device(), setup().layout));
}

void EveryRankEngine::plan(const DispatchRequest& request, Round& round) {
  round.num_tokens = request.num_tokens;
  if (!request.num_tokens_per_rank.empty()) {
    std::ranges::copy(request.num_tokens_per_rank, round.tokens_of.begin());
  }
}

// The other ranks are told of this as of any misuse.
void EveryRankEngine::refuse_capture(const Stream& stream) {
  const DeviceScope scope(device());
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.native), &capture), "cudaStreamIsCapturing");
  if (capture == cudaStreamCaptureStatusNone) return;
  abort_dispatch();
  throw Error(ErrorCode::kInvalidState,
              "the stream is being captured and num_tokens_per_rank is not given: without it a dispatch to every rank "
              "waits on the host for the ranks' sizes, which a graph cannot",
              setup().rank);
}

Announcement EveryRankEngine::announcement(const DispatchRequest& request, const Round& round) const {
  return {.common = common(),
          .route = static_cast<const RouteBuffers&>(*round.memory).view(),
          .num_tokens = request.num_tokens,
          .num_tokens_on_device = request.num_tokens_on_device,
          .digest = request.digest,
          .agreed = request.agreed};
}

EveryRankDispatchTask EveryRankEngine::dispatch_task(const DispatchRequest& request, const Round& round) const {
  EveryRankDispatchTask task;
  task.said = announcement(request, round);
  task.first_row = round.result_row[static_cast<std::size_t>(setup().rank)];
  task.num_rows = round.num_rows;
  task.most_tokens = *std::ranges::max_element(round.tokens_of);
  task.announces = task.verifies = request.agreed != kNotGiven;
  if (!task.announces) {  // what the device said was read when sizes were learnt
    task.said.num_tokens = round.tokens_of[static_cast<std::size_t>(setup().rank)];
    task.said.num_tokens_on_device = nullptr;
  }
  for (std::size_t i = 0; i < request.payloads.size(); ++i) {
    if (request.payloads[i].row_bytes == 0) continue;
    task.lanes[static_cast<std::size_t>(task.num_lanes++)] = lane_of(request.payloads[i], round.planes.planes[i]);
  }
  return task;
}

void EveryRankEngine::add_outputs(const DispatchRequest& request,
                                  const Round& round,
                                  EveryRankDispatchTask& task) const {
  for (std::size_t i = 0; i < request.outputs.planes.size(); ++i) {
    const OutputPlane& output = request.outputs.planes[i];
    if (output.data == nullptr) continue;
    task.copied[static_cast<std::size_t>(task.num_copied++)] = copied_of(output, round.planes.planes[i]);
  }
  task.releases = task.num_copied == task.num_lanes;
}

void EveryRankEngine::launch_dispatch(EveryRankDispatchTask& task, const DispatchRequest& request) {
  const DeviceScope scope(device());
  const std::int64_t bytes = row_bytes_of(task);
  const std::int64_t sending = task.sends ? protocol::ceil_div(task.said.num_tokens * bytes, kBytesPerBlock) : 0;
  const std::int64_t chunks = protocol::num_chunks(task.most_tokens, setup().layout.shape().tokens_per_chunk);
  std::int64_t receiving = task.receives ? protocol::ceil_div(chunks * setup().num_ranks, kWarps) : 0;
  if (task.num_copied > 0) receiving = protocol::ceil_div(task.num_rows * bytes, kBytesPerBlock);
  // One more, which sends the headers.
  const int blocks = blocks_for(std::max(sending, receiving) + 1, request.num_sms);
  task.tokens_at_once = tokens_at_once(task, setup().layout.shape().tokens_per_chunk, blocks);
  if (bulk_ && gains_from_bulk(task, task.said.num_tokens, blocks, task.tokens_at_once)) {
    launch_every_rank_in_bulk(task, blocks, enter(request.stream));
    return;
  }
  const std::int64_t tokens = std::max<std::int64_t>(task.said.num_tokens, 1);
  task.slices = static_cast<int>(std::clamp<std::int64_t>((blocks - 1) / tokens, 1, kMostSlices));
  launch_every_rank_dispatch(task, blocks, enter(request.stream));
}

SizesState EveryRankEngine::sizes_state() const {
  auto& sizes = *reinterpret_cast<HostSizes*>(sizes_.get());
  return std::atomic_ref<SizesState>(sizes.state).load(std::memory_order_acquire);  // pairs with learn_sizes
}

// The kernel ends by its deadline at the latest. Where it ends without a word, it or one before it has failed.
void EveryRankEngine::wait_for_sizes(cudaStream_t stream) const {
  constexpr int kLooksPerQuery = 512;
  while (true) {
    for (int i = 0; i < kLooksPerQuery; ++i) {
      if (sizes_state() != SizesState::kUnknown) return;
    }
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) {
      check(state, "waiting for the ranks' sizes");
      return;
    }
    static_cast<void>(cudaGetLastError());  // so that the next launch does not report it
    std::this_thread::yield();
  }
}

Status EveryRankEngine::learn_sizes(const DispatchRequest& request, Round& round) {
  const DeviceScope scope(device());
  auto& sizes = *reinterpret_cast<HostSizes*>(sizes_.get());
  sizes.state = SizesState::kUnknown;
  cudaStream_t stream = enter(request.stream);
  launch_learn_sizes(announcement(request, round), &sizes, stream);
  wait_for_sizes(stream);
  if (sizes_state() != SizesState::kKnown) {
    const Status status = poll();
    if (!status.ok()) return status;
    throw Error(ErrorCode::kSystem, "the ranks' sizes did not come, and no reason was left", setup().rank);
  }
  std::copy_n(sizes.rows, round.tokens_of.size(), round.tokens_of.begin());
  return {};
}

// In one call there is one launch of rows, by the receive half.
Status EveryRankEngine::dispatch_send(const DispatchRequest& request, Round& round) {
  if (request.agreed == kNotGiven) refuse_capture(request.stream);
  count_dispatch();
  auto& buffers = static_cast<RouteBuffers&>(*round.memory);
  buffers.ended_by_combine = false;
  if (std::exchange(buffers.in_use, true)) {
    const DeviceScope scope(device());
    clear_route(buffers.view(), enter(request.stream));
  }
  round.rows = window().own() + setup().layout.payload(0);
  round.space_stride = 0;
  round.tokens_on_device = request.num_tokens_on_device == nullptr ? nullptr : buffers.view().tokens_of;
  if (request.agreed == kNotGiven) {
    const Status status = learn_sizes(request, round);
    if (!status.ok()) return status;
  }
  set_sizes(round);
  if (!request.in_one_call) {
    EveryRankDispatchTask task = dispatch_task(request, round);
    task.receives = task.verifies = false;
    launch_dispatch(task, request);
  }
  return {.code = StatusCode::kEnqueued};
}

Status EveryRankEngine::dispatch_receive(const DispatchRequest& request, Round& round) {
  EveryRankDispatchTask task = dispatch_task(request, round);
  task.sends = request.in_one_call;
  task.announces = task.announces && task.sends;
  add_outputs(request, round, task);
  static_cast<RouteBuffers&>(*round.memory).ended_by_combine = task.releases;
  launch_dispatch(task, request);
  section_free_ = true;
  return {.code = StatusCode::kEnqueued};
}

void EveryRankEngine::fill(const DispatchRequest& request, Round& round) {
  EveryRankDispatchTask task = dispatch_task(request, round);
  task.sends = task.announces = task.verifies = false;
  add_outputs(request, round, task);
  static_cast<RouteBuffers&>(*round.memory).ended_by_combine = task.releases;
  launch_dispatch(task, request);
}

void EveryRankEngine::release(const Round& round) {
  if (static_cast<const RouteBuffers&>(*round.memory).ended_by_combine) return;
  const DeviceScope scope(device());
  launch_release(common(), false, last_stream());
}

// Whether the rows lie in the window, where combine reads them.
bool EveryRankEngine::in_place(const TensorView& expert_output) const {
  const std::byte* section = window().own() + setup().layout.combine_row(0);
  return static_cast<const std::byte*>(expert_output.data) == section &&
         expert_output.strides[0] * size_of(expert_output.dtype) == setup().layout.combine_stride();
}

Status EveryRankEngine::combine_send(const CombineRequest& request, Round& round) {
  count_combine();
  const TensorView& rows = request.expert_output;
  auto& buffers = static_cast<RouteBuffers&>(*round.memory);
  combine_ = {.rows = combine_task(request, setup().params.dtype, in_place(rows)),
              .first_row = round.result_row[static_cast<std::size_t>(setup().rank)]};
  combine_.rows.common = common();
  combine_.rows.route = buffers.view();
  combine_.rows.most_rows = *std::ranges::max_element(round.tokens_of);
  combine_.rows.unit =
      unit_of(bits_of(rows.data) | bits_of(combine_.rows.from_row_stride) | bits_of(combine_.rows.row_bytes));
  buffers.ended_by_combine = true;
  buffers.in_use = !request.in_one_call;  // the receive half clears it
  section_free_ = false;
  if (!request.in_one_call) launch_combine(combine_, request.stream, request.num_sms);
  return {.code = StatusCode::kEnqueued};
}

Status EveryRankEngine::combine_receive(const CombineTarget& target, const Round& /*round*/) {
  EveryRankCombineTask task = combine_;
  task.rows.sends = combine_.rows.receives;  // in one call
  task.rows.receives = true;
  const std::uint64_t places = add_target(target, task.rows);
  task.rows.vectors = in_vectors(task.rows, places);
  launch_combine(task, target.stream, target.num_sms);
  return {.code = StatusCode::kEnqueued};
}

void EveryRankEngine::launch_combine(const EveryRankCombineTask& task, const Stream& stream, int num_sms) {
  const DeviceScope scope(device());
  const CombineTask& rows = task.rows;
  const std::int64_t staged = rows.sends && rows.staged ? rows.most_rows * setup().num_ranks : 0;
  const std::int64_t tokens = rows.receives ? rows.most_rows : 0;
  const std::int64_t work = protocol::ceil_div(std::max(staged, tokens) * rows.row_bytes, kBytesPerBlock);
  const int blocks = blocks_for(work, num_sms);
  const bool in_bulk = bulk_combines_ && combines_in_bulk(rows, tokens, staged, blocks);
  launch_every_rank_combine(task, blocks, in_bulk, enter(stream));
}

void EveryRankEngine::release_combine(const Round& /*round*/) {
  const DeviceScope scope(device());
  launch_release(common(), true, last_stream());
}

void EveryRankEngine::abort_dispatch() {
  const DeviceScope scope(device());
  launch_abort_dispatch(common(), {}, last_stream());
}

void EveryRankEngine::abort_combine(const Round& round) {
  const DeviceScope scope(device());
  launch_abort_combine(common(), static_cast<const RouteBuffers&>(*round.memory).view(), false, last_stream());
}

// Before a dispatch the other ranks may still read the rows of the last combine; the caller's stream waits for them.
Status EveryRankEngine::acquire_combine_section() {
  if (std::exchange(section_free_, true)) return {};
  const DeviceScope scope(device());
  launch_await_section(common(), last_stream());
  return {};
}

}  // namespace tokenyard::engine::cuda
