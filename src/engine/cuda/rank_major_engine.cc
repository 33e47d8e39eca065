// SPDX-License-Identifier: Apache-2.0

#include "engine/cuda/rank_major_engine.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "engine/cuda/access_unit.h"
#include "engine/cuda/bulk_sums.h"
#include "engine/cuda/combine_tasks.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/payload_tasks.h"

namespace tokenyard::engine::cuda {

RankMajorEngine::RankMajorEngine(const Setup& setup, fabric::Window& window)
    : CudaEngine(setup, window), small_(SmallLayout::of(setup.layout)) {
  const DeviceScope scope(device());
  load_rank_major_dispatch();
  bulk_ = load_bulk_dispatch();
  bulk_combines_ = load_combine();
  load_small_dispatch();
  load_small_combine();
}

void RankMajorEngine::reserve(Round& round) {
  keep(round, std::make_unique<RouteBuffers>(device(), setup().layout));
}

void RankMajorEngine::plan(const DispatchRequest& request, Round& round) {
  round.num_tokens = request.num_tokens;  // the rest is the kernel's
}

void RankMajorEngine::add_lanes(const DispatchRequest& request, const Round& round, DispatchTask& task) const {
  for (std::size_t i = 0; i < request.payloads.size(); ++i) {
    const PayloadRows& payload = request.payloads[i];
    if (i == protocol::kIdsPlane || payload.row_bytes == 0) continue;
    task.lanes[static_cast<std::size_t>(task.num_lanes++)] = lane_of(payload, round.planes.planes[i]);
  }
}

void RankMajorEngine::add_outputs(const DispatchRequest& request, const Round& round, DispatchTask& task) const {
  task.num_stats = request.outputs.num_stats;
  task.gathered_stats = request.outputs.stats;
  for (std::size_t i = 0; i < request.outputs.planes.size(); ++i) {
    const OutputPlane& output = request.outputs.planes[i];
    if (output.data == nullptr || i == protocol::kIdsPlane) continue;
    task.copied[static_cast<std::size_t>(task.num_copied++)] = copied_of(output, round.planes.planes[i]);
  }
}

DispatchTask RankMajorEngine::dispatch_task(const DispatchRequest& request, const Round& round) const {
  DispatchTask task;
  task.common = common();
  task.route = static_cast<const RouteBuffers&>(*round.memory).view();
  task.small = small_;
  task.ids = ids_of(setup().params, request, round);
  task.num_tokens = request.num_tokens;
  task.rows_per_block = request.tokens_per_rank;
  task.num_tokens_on_device = request.num_tokens_on_device;
  task.digest = request.digest;
  task.agreed = request.agreed;
  task.stats = request.stats.data();
  task.num_stats = static_cast<std::int64_t>(request.stats.size());
  add_lanes(request, round, task);
  return task;
}

// Ranks agree on it, for they agree on what it is made of; and who does not is found out (plain_headers.cuh).
bool RankMajorEngine::is_small(const DispatchRequest& request) const {
  const auto given = [](const PayloadRows& payload) { return payload.row_bytes > 0; };
  const auto payloads = std::ranges::count_if(request.payloads, given);
  const MoeParams& params = setup().params;
  return request.tokens_per_rank > 0 && request.tokens_per_rank <= small_.tokens && request.stats.empty() &&
         payloads <= 1 + kSmallLanes && params.top_k <= kSmallTopK &&
         params.num_experts < protocol::OwnerRule::kMostExperts;
}

void RankMajorEngine::add_small_lane(const DispatchRequest& request,
                                     const protocol::Plane& plane,
                                     std::size_t index,
                                     SmallLane& lane) const {
  const PayloadRows& payload = request.payloads[index];
  const OutputPlane& output = request.outputs.planes[index];
  // Where the caller sees it: its own tensor, or the window's space.
  const bool own = output.data == nullptr;
  lane.from = payload.data;
  lane.from_stride = payload.stride;
  lane.to = own ? window().own() + setup().layout.payload(0) + plane.offset : output.data;
  lane.to_block_stride = own ? setup().layout.payload_bytes() : output.block_stride;
  lane.to_row_stride = own ? plane.stride : output.row_stride;
  lane.row_bytes = static_cast<int>(payload.row_bytes);
  const std::uint64_t row = bits_of(payload.row_bytes);
  lane.words_from = unit_of(row | bits_of(lane.from) | bits_of(lane.from_stride)) >= 8;
  lane.words_to = unit_of(row | bits_of(lane.to) | bits_of(lane.to_block_stride) | bits_of(lane.to_row_stride)) >= 8;
}

SmallDispatchTask RankMajorEngine::small_dispatch_task(const DispatchRequest& request, const Round& round) const {
  SmallDispatchTask task;
  task.common = common();
  task.route = static_cast<const RouteBuffers&>(*round.memory).view();
  task.small = small_;
  task.ids = ids_of(setup().params, request, round);
  task.num_tokens = request.num_tokens;
  task.num_tokens_on_device = request.num_tokens_on_device;
  task.owners = protocol::OwnerRule(setup().params.num_experts, setup().num_ranks);
  task.rows_per_block = static_cast<int>(request.tokens_per_rank);
  std::size_t num_lanes = 0;
  for (std::size_t i = 0; i < request.payloads.size(); ++i) {
    if (i == protocol::kIdsPlane || request.payloads[i].row_bytes == 0) continue;
    SmallLane& lane = task.lanes[num_lanes++];
    add_small_lane(request, round.planes.planes[i], i, lane);
    lane.first_line = task.lane_lines;
    lane.end_line = task.lane_lines += static_cast<int>(lines_of(lane.row_bytes));
  }
  task.num_lines = task.lane_lines + static_cast<int>(lines_of(std::int64_t{4} * task.ids.top_k));
  constexpr std::uint64_t kSpread = 0x9E3779B97F4A7C15U;  // 2^64 over the golden ratio: all bits matter
  const std::uint64_t all = request.digest ^ static_cast<std::uint64_t>(request.agreed) * kSpread;
  task.agreed = static_cast<std::uint32_t>(all * kSpread >> 32);
  return task;
}

// Few rows are sliced, so that more multiprocessors share them. A thread has one line as long as that takes few
// threads, else two: 16 warps of one line each were at times slower by a half.
SmallWork RankMajorEngine::small_work(std::int64_t rows, int lines, int peers, int num_sms) const {
  constexpr int kLeastThreads = 128;
  constexpr int kFewThreads = 256;
  constexpr unsigned kMostSlices = 8;
  SmallWork work;
  const auto fit = [&](std::int64_t slices) { return slices * rows <= blocks_for(slices * rows, num_sms); };
  while (work.slices < kMostSlices && fit(std::int64_t{2} * work.slices))
    work.slices = 1U << ++work.slices_log2;
  const auto lines_of_slice = protocol::ceil_div(lines, std::int64_t{work.slices});
  work.threads = kLeastThreads;
  while (work.threads < kThreads) {
    const std::int64_t lines_each = work.threads < kFewThreads ? 1 : 2;
    if (work.threads / kLineThreads * lines_each >= lines_of_slice) break;
    work.threads *= 2;
  }
  work.step = work.slices * static_cast<unsigned>(work.threads / kLineThreads);
  work.peers = protocol::Divisor(std::max(peers, 1));
  work.overlaps = may_overlap(num_sms);
  return work;
}

void RankMajorEngine::launch_small_dispatch_half(SmallDispatchTask task, const DispatchRequest& request) {
  const DeviceScope scope(device());
  const int sources = setup().num_ranks - (task.own_direct ? 1 : 0);
  const std::int64_t rows = std::int64_t{task.rows_per_block} * ((task.sends ? 1 : 0) + (task.receives ? sources : 0));
  task.work = small_work(rows, task.num_lines, sources, request.num_sms);
  if (sources == 0) task.receives = false;
  launch_small_dispatch(task, blocks_for(rows * task.work.slices, request.num_sms), enter(request.stream));
}

void RankMajorEngine::launch_dispatch(const DispatchTask& task, const DispatchRequest& request) {
  const DeviceScope scope(device());
  const std::int64_t chunks =
      protocol::num_chunks(std::max<std::int64_t>(task.rows_per_block, 1), setup().layout.shape().tokens_per_chunk);
  const std::int64_t waits = task.receives ? protocol::ceil_div(chunks * setup().num_ranks, kWarps) : 0;
  const int blocks = blocks_for(std::max(task.sends ? request.num_tokens : 0, waits), request.num_sms);
  const auto launch =
      bulk_ && gains_from_bulk(task, task.num_tokens, blocks) ? launch_bulk_dispatch : launch_rank_major_dispatch;
  launch(task, blocks, enter(request.stream));
}

// In one call there is one launch, by the receive half.
Status RankMajorEngine::dispatch_send(const DispatchRequest& request, Round& round) {
  count_dispatch();
  auto& buffers = static_cast<RouteBuffers&>(*round.memory);
  buffers.ended_by_combine = buffers.received = buffers.own_shown = false;
  buffers.small = is_small(request);
  if (std::exchange(buffers.in_use, true)) {
    const DeviceScope scope(device());
    clear_route(buffers.view(), enter(request.stream));
  }
  round.rows = window().own() + setup().layout.payload(0);
  round.space_stride = setup().layout.payload_bytes();
  round.rows_on_device = reinterpret_cast<std::int32_t*>(buffers.view().rows_received);
  round.tokens_on_device = buffers.view().tokens_of;
  if (!request.in_one_call) launch_half(request, round, {.sends = true});
  return {.code = StatusCode::kEnqueued};
}

Status RankMajorEngine::dispatch_receive(const DispatchRequest& request, Round& round) {
  static_cast<RouteBuffers&>(*round.memory).received = true;
  launch_half(request, round, {.sends = request.in_one_call, .receives = true, .counts = true});
  return {.code = StatusCode::kEnqueued};
}

void RankMajorEngine::fill(const DispatchRequest& request, Round& round) {
  if (static_cast<const RouteBuffers&>(*round.memory).own_shown) {
    throw Error(ErrorCode::kUnsupported,
                "a round of few tokens is received once on a GPU, unless the first time was refused", setup().rank);
  }
  launch_half(request, round, {.receives = true});
}

void RankMajorEngine::launch_half(const DispatchRequest& request, const Round& round, Halves halves) {
  auto& buffers = static_cast<RouteBuffers&>(*round.memory);
  if (buffers.small) {
    SmallDispatchTask task = small_dispatch_task(request, round);
    task.own_direct = buffers.own_shown = halves.sends && halves.receives && task.ids.to != nullptr;
    task.sends = halves.sends;
    task.receives = halves.receives;
    task.counts = halves.counts;
    return launch_small_dispatch_half(task, request);
  }
  DispatchTask task = dispatch_task(request, round);
  task.sends = halves.sends;
  task.receives = halves.receives;
  task.counts = halves.counts;
  if (halves.receives) add_outputs(request, round, task);
  launch_dispatch(task, request);
}

void RankMajorEngine::release(const Round& round) {
  const auto& buffers = static_cast<const RouteBuffers&>(*round.memory);
  if (buffers.ended_by_combine) return;
  const DeviceScope scope(device());
  if (!buffers.received) launch_await_dispatch(common(), small_, last_stream());
  launch_release(common(), false, last_stream());
}

// Whether the rows lie in the window, where combine reads them.
bool RankMajorEngine::in_place(const TensorView& expert_output) const {
  const std::byte* section = window().own() + setup().layout.combine_row(0);
  const std::int64_t element = size_of(expert_output.dtype);
  const std::int64_t stride = setup().layout.combine_stride();
  if (static_cast<const std::byte*>(expert_output.data) != section || expert_output.num_dims != 3) return false;
  return expert_output.strides[1] * element == stride &&
         expert_output.strides[0] * element == stride * setup().layout.shape().max_tokens;
}

Status RankMajorEngine::combine_send(const CombineRequest& request, Round& round) {
  count_combine();
  const TensorView& rows = request.expert_output;
  const bool fp8 = setup().spec.combine_wire == protocol::CombineWire::kF8e4m3;
  combine_ = combine_task(request, fp8 ? Dtype::kF8e4m3 : setup().params.dtype, in_place(rows));
  combine_.common = common();
  combine_.route = static_cast<const RouteBuffers&>(*round.memory).view();
  combine_.most_rows = setup().layout.shape().max_tokens;
  combine_.from_block_stride =
      rows.num_dims == 3 ? rows.strides[0] * size_of(rows.dtype) : round.tokens_per_rank * combine_.from_row_stride;
  combine_.unit = unit_of(bits_of(rows.data) | bits_of(combine_.from_row_stride) | bits_of(combine_.from_block_stride) |
                          bits_of(combine_.row_bytes));
  auto& buffers = static_cast<RouteBuffers&>(*round.memory);
  buffers.ended_by_combine = true;
  buffers.in_use = !request.in_one_call;  // the receive half clears it
  if (buffers.small) combine_.small = small_;
  combine_.tokens_per_rank = static_cast<int>(round.tokens_per_rank);
  combine_.row_lines = static_cast<int>(lines_of(combine_.row_bytes));
  if (!request.in_one_call) launch_combine_half(combine_, round.num_tokens, request.stream, request.num_sms);
  return {.code = StatusCode::kEnqueued};
}

Status RankMajorEngine::combine_receive(const CombineTarget& target, const Round& round) {
  CombineTask task = combine_;
  task.sends = combine_.receives;  // in one call
  task.receives = true;
  task.route = static_cast<const RouteBuffers&>(*round.memory).view();
  const std::uint64_t all = add_target(target, task);
  task.vectors = task.small.tokens > 0 ? unit_of(all) >= 8 : in_vectors(task, all);
  launch_combine_half(task, round.num_tokens, target.stream, target.num_sms);
  return {.code = StatusCode::kEnqueued};
}

void RankMajorEngine::launch_combine_half(CombineTask task,
                                          std::int64_t num_tokens,
                                          const Stream& stream,
                                          int num_sms) {
  const DeviceScope scope(device());
  if (task.small.tokens > 0) {
    const int others = setup().num_ranks - 1;
    const std::int64_t rows =
        std::int64_t{task.tokens_per_rank} * ((task.sends ? others : 0) + (task.receives ? 1 : 0));
    task.work = small_work(rows, task.row_lines, others, num_sms);
    task.casts = task.from_dtype != task.rows_dtype;
    task.words = task.unit >= 8;
    task.biased = task.bias[0] != nullptr || task.bias[1] != nullptr;
    launch_small_combine(task, blocks_for(rows * task.work.slices, num_sms), enter(stream));
    return;
  }
  const std::int64_t rows = setup().num_ranks * setup().layout.shape().max_tokens;
  const std::int64_t staging = task.sends && task.staged ? protocol::ceil_div(rows, kWarps) : 0;
  const std::int64_t tokens = task.receives ? setup().layout.shape().max_tokens : 0;
  const int blocks = blocks_for(std::max(staging, tokens), num_sms);
  const bool in_bulk = bulk_combines_ && combines_in_bulk(task, num_tokens, rows, blocks);
  launch_combine(task, blocks, in_bulk, enter(stream));
}

void RankMajorEngine::release_combine(const Round& /*round*/) {
  const DeviceScope scope(device());
  launch_release(common(), true, last_stream());
}

void RankMajorEngine::abort_dispatch() {
  const DeviceScope scope(device());
  launch_abort_dispatch(common(), small_, last_stream());
}

void RankMajorEngine::abort_combine(const Round& round) {
  const DeviceScope scope(device());
  const auto& buffers = static_cast<const RouteBuffers&>(*round.memory);
  launch_abort_combine(common(), buffers.view(), buffers.small, last_stream());
}

}  // namespace tokenyard::engine::cuda
