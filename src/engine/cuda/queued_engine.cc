// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/queued_engine.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/cuda/access_unit.h"
#include "engine/cuda/combine_tasks.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/payload_tasks.h"
#include "protocol/queue_entry.h"

namespace tokenyard::engine::cuda {
namespace {

// Of a payload in an entry.
std::int64_t room_of(std::int64_t row_bytes) {
  return protocol::align_up(row_bytes, protocol::kRowAlignment);
}

RouteBuffers& buffers_of(const Round& round) {
  return static_cast<RouteBuffers&>(*round.memory);
}

}  // namespace

QueuedEngine::QueuedEngine(const Setup& setup, fabric::Window& window) : CudaEngine(setup, window) {
  const DeviceScope scope(device());
  const std::int64_t ranks = setup.num_ranks;
  std::vector<std::byte*> pointers(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < setup.num_ranks; ++rank)
    pointers[static_cast<std::size_t>(rank)] = setup.queues->window().peer(rank);
  queue_windows_ = make_device_memory(device(), ranks * static_cast<std::int64_t>(sizeof(std::byte*)));
  check(cudaMemcpy(queue_windows_.get(), pointers.data(), pointers.size() * sizeof(std::byte*), cudaMemcpyHostToDevice),
        "cudaMemcpy");
  queue_.layout = setup.queues->layout();
  queue_.windows = reinterpret_cast<std::byte* const*>(queue_windows_.get());
  tell_life_in({queue_.windows, queue_.layout.life(0), setup.rank, setup.num_ranks});
  make_state();
  const protocol::WindowShape& shape = setup.layout.shape();
  landing_ = make_device_memory(device(), ranks * (setup.layout.payload_bytes() + shape.stats_entries * 4));
  sums_ = make_device_memory(device(),
                             shape.max_tokens * setup.params.hidden_size * static_cast<std::int64_t>(sizeof(float)));
  load_queued_dispatch();
  load_queued_combine();
}

void QueuedEngine::make_state() {
  const std::int64_t items = std::int64_t{setup().num_ranks} * protocol::kMaxQueueChannels;
  const std::int64_t sending = protocol::align_up(sizeof(QueueBoard), 16);
  const std::int64_t receiving = sending + items * static_cast<std::int64_t>(sizeof(SendState));
  const std::int64_t summed = receiving + items * static_cast<std::int64_t>(sizeof(ReceiveState));
  state_bytes_ = summed + protocol::kMaxQueueChannels * static_cast<std::int64_t>(sizeof(std::int64_t));
  state_ = make_device_memory(device(), state_bytes_);
  queue_.board = reinterpret_cast<QueueBoard*>(state_.get());
  queue_.sending = reinterpret_cast<SendState*>(state_.get() + sending);
  queue_.receiving = reinterpret_cast<ReceiveState*>(state_.get() + receiving);
  queue_.summed = reinterpret_cast<std::int64_t*>(state_.get() + summed);
}

void QueuedEngine::reserve(Round& round) {
  keep(round, std::make_unique<RouteBuffers>(device(), setup().layout));
}

void QueuedEngine::plan(const DispatchRequest& request, Round& round) {
  round.num_tokens = request.num_tokens;  // the rest is the kernel's
}

QueueTask QueuedEngine::queue_for(std::int64_t row_bytes) const {
  QueueTask queue = queue_;
  queue.channels = protocol::QueueChannels::of(queue.layout.queue_bytes(),
                                               protocol::queue_entry_bytes(protocol::kQueueEntryHeader + row_bytes));
  return queue;
}

// An entry has the payloads in their order, and the ids last.
QueuedDispatchTask QueuedEngine::dispatch_task(const DispatchRequest& request, const Round& round) const {
  QueuedDispatchTask task;
  task.common = common();
  task.route = buffers_of(round).view();
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < request.payloads.size(); ++i) {
    const PayloadRows& payload = request.payloads[i];
    if (i == protocol::kIdsPlane || payload.row_bytes == 0) continue;
    task.lanes[static_cast<std::size_t>(task.num_lanes++)] = {.lane = lane_of(payload, round.planes.planes[i]),
                                                              .entry_offset = protocol::kQueueEntryHeader + bytes};
    bytes += room_of(payload.row_bytes);
  }
  const protocol::Plane& ids = round.planes.planes[protocol::kIdsPlane];
  task.lanes[static_cast<std::size_t>(task.num_lanes)] = {
      .lane = {.offset = ids.offset, .stride = ids.stride, .row_bytes = ids.row_bytes, .unit = 4},
      .entry_offset = protocol::kQueueEntryHeader + bytes};
  task.queue = queue_for(bytes + room_of(ids.row_bytes));
  task.ids = ids_of(setup().params, request, round);
  task.landing = landing_.get();
  task.space_stride = setup().layout.payload_bytes();
  task.num_tokens = request.num_tokens;
  task.num_tokens_on_device = request.num_tokens_on_device;
  task.rows_per_block = request.tokens_per_rank;
  task.digest = request.digest;
  task.agreed = request.agreed;
  task.stats = request.stats.data();
  task.landed_stats = reinterpret_cast<std::int32_t*>(landing_.get() + setup().num_ranks * task.space_stride);
  task.num_stats = static_cast<std::int64_t>(request.stats.size());
  return task;
}

void QueuedEngine::launch_dispatch(QueuedDispatchTask& task, const DispatchRequest& request, const Round& round) {
  const DeviceScope scope(device());
  for (std::size_t i = 0; task.receives && i < request.outputs.planes.size(); ++i) {
    const OutputPlane& output = request.outputs.planes[i];
    if (output.data == nullptr || i == protocol::kIdsPlane) continue;
    task.copied[static_cast<std::size_t>(task.num_copied++)] = copied_of(output, round.planes.planes[i]);
  }
  if (task.receives) {
    task.num_stats = request.outputs.num_stats;
    task.gathered_stats = request.outputs.stats;
  }
  const std::int64_t items = std::int64_t{setup().num_ranks} * task.queue.channels.count;
  launch_queued_dispatch(task, blocks_for(items, request.num_sms), enter(request.stream));
}

// In one call there is one launch, by the receive half.
Status QueuedEngine::dispatch_send(const DispatchRequest& request, Round& round) {
  count_dispatch();
  RouteBuffers& buffers = buffers_of(round);
  buffers.ended_by_combine = false;
  if (std::exchange(buffers.in_use, true)) {
    const DeviceScope scope(device());
    clear_route(buffers.view(), enter(request.stream));
  }
  round.rows = landing_.get();
  round.space_stride = setup().layout.payload_bytes();
  round.rows_on_device = reinterpret_cast<std::int32_t*>(buffers.view().rows_received);
  round.tokens_on_device = buffers.view().tokens_of;
  if (!request.in_one_call) {
    QueuedDispatchTask task = dispatch_task(request, round);
    task.receives = false;
    launch_dispatch(task, request, round);
  }
  return {.code = StatusCode::kEnqueued};
}

Status QueuedEngine::dispatch_receive(const DispatchRequest& request, Round& round) {
  QueuedDispatchTask task = dispatch_task(request, round);
  task.sends = request.in_one_call;
  launch_dispatch(task, request, round);
  buffers_of(round).ended_by_combine = true;  // the kernel tells the peers, for views are of this rank's memory
  return {.code = StatusCode::kEnqueued};
}

// A receive half that finds every row here.
void QueuedEngine::fill(const DispatchRequest& request, Round& round) {
  QueuedDispatchTask task = dispatch_task(request, round);
  task.sends = false;
  launch_dispatch(task, request, round);
}

// Between the halves of a dispatch: the peers drop the rest of their rows.
void QueuedEngine::release(const Round& round) {
  if (buffers_of(round).ended_by_combine) return;
  const DeviceScope scope(device());
  launch_release(common(), false, last_stream());
}

// Between the halves, when the caller may reuse its rows already, this rank's own go through its queue too.
Status QueuedEngine::combine_send(const CombineRequest& request, Round& round) {
  count_combine();
  const TensorView& rows = request.expert_output;
  combine_ = {.combine = combine_task(request, setup().params.dtype, false)};
  CombineTask& task = combine_.combine;
  task.common = common();
  task.route = buffers_of(round).view();
  task.from_block_stride =
      rows.num_dims == 3 ? rows.strides[0] * size_of(rows.dtype) : round.tokens_per_rank * task.from_row_stride;
  const std::uint64_t places = bits_of(task.from) | bits_of(task.from_row_stride) | bits_of(task.from_block_stride);
  task.unit = unit_of(places | bits_of(task.row_bytes));
  combine_.queue = queue_for(task.row_bytes);
  combine_.sums = sums_.get();
  combine_.own_in_queue = !request.in_one_call || task.from_dtype != task.rows_dtype;
  if (request.in_one_call) return {.code = StatusCode::kEnqueued};
  QueuedCombineTask half = combine_;
  half.combine.output = sums_.get();
  half.combine.output_stride = task.hidden * static_cast<std::int64_t>(sizeof(float));
  half.combine.output_dtype = Dtype::kF32;
  half.combine.vectors = in_vectors(half.combine, bits_of(half.combine.output_stride));
  launch_combine_half(half, request.stream, request.num_sms);
  return {.code = StatusCode::kEnqueued};
}

Status QueuedEngine::combine_receive(const CombineTarget& target, const Round& round) {
  QueuedCombineTask task = combine_;
  task.combine.sends = combine_.combine.receives;  // in one call
  task.combine.receives = true;
  std::uint64_t places = add_target(target, task.combine);
  if (!task.own_in_queue) {
    places |=
        bits_of(task.combine.from) | bits_of(task.combine.from_row_stride) | bits_of(task.combine.from_block_stride);
  }
  task.combine.vectors = in_vectors(task.combine, places);
  launch_combine_half(task, target.stream, target.num_sms);
  buffers_of(round).in_use = false;  // the kernel clears it
  return {.code = StatusCode::kEnqueued};
}

void QueuedEngine::launch_combine_half(const QueuedCombineTask& task, const Stream& stream, int num_sms) {
  const DeviceScope scope(device());
  const std::int64_t items = std::int64_t{setup().num_ranks} * task.queue.channels.count;
  launch_queued_combine(task, blocks_for(items, num_sms), enter(stream));
}

void QueuedEngine::release_combine(const Round& /*round*/) {
  const DeviceScope scope(device());
  launch_release(common(), true, last_stream());
}

void QueuedEngine::abort_dispatch() {
  const DeviceScope scope(device());
  launch_queued_abort(common(), last_stream());
}

void QueuedEngine::abort_combine(const Round& round) {
  const DeviceScope scope(device());
  launch_abort_combine(common(), buffers_of(round).view(), false, last_stream());
}

// Words of operations that are forgotten.
void QueuedEngine::reset(std::uint32_t epoch) {
  CudaEngine::reset(epoch);
  const DeviceScope scope(device());
  check(cudaMemsetAsync(setup().queues->window().own(), 0, static_cast<std::size_t>(queue_.layout.queues()),
                        cudaStreamPerThread),
        "cudaMemsetAsync");
  check(cudaMemsetAsync(state_.get(), 0, static_cast<std::size_t>(state_bytes_), cudaStreamPerThread),
        "cudaMemsetAsync");
  check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
}

void QueuedEngine::clear_route(const RouteMemory& route, cudaStream_t stream) {
  launch_queued_clear(common(), route, stream);
}

}  // namespace tokenyard::engine::cuda
