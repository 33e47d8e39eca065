// SPDX-License-Identifier: Apache-2.0

#include "engine/cuda/rank_major_engine.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "engine/cuda/access_unit.h"
#include "engine/cuda/kernels.h"

namespace tokenyard::engine::cuda {
namespace {

// From here on a block sends more tokens than it takes to fill a pipeline. What other ranks choose does not matter.
bool better_in_bulk(const DispatchTask& task, int blocks) {
  constexpr std::int64_t kTokensPerBlock = 2;
  return task.sends && task.num_tokens > kTokensPerBlock * blocks &&
         std::any_of(task.lanes.begin(), task.lanes.begin() + task.num_lanes, moves_in_bulk);
}

}  // namespace

RankMajorEngine::RankMajorEngine(const Setup& setup, fabric::Window& window)
    : CudaEngine(setup, window), small_(SmallLayout::of(setup.layout)) {
  const DeviceScope scope(device());
  load_rank_major_dispatch();
  bulk_ = load_bulk_dispatch();
  load_combine();
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
    const protocol::Plane& plane = round.planes.planes[i];
    if (i == protocol::kIdsPlane || payload.row_bytes == 0) continue;
    const std::uint64_t all = bits_of(payload.data) | bits_of(payload.stride) | bits_of(plane.offset) |
                              bits_of(plane.stride) | bits_of(payload.row_bytes);
    task.lanes[static_cast<std::size_t>(task.num_lanes++)] = {.from = payload.data,
                                                              .from_stride = payload.stride,
                                                              .offset = plane.offset,
                                                              .stride = plane.stride,
                                                              .row_bytes = payload.row_bytes,
                                                              .unit = unit_of(all)};
  }
}

void RankMajorEngine::add_outputs(const DispatchRequest& request, const Round& round, DispatchTask& task) const {
  task.num_stats = request.outputs.num_stats;
  task.gathered_stats = request.outputs.stats;
  for (std::size_t i = 0; i < request.outputs.planes.size(); ++i) {
    const OutputPlane& output = request.outputs.planes[i];
    const protocol::Plane& plane = round.planes.planes[i];
    if (output.data == nullptr || i == protocol::kIdsPlane) continue;
    const std::uint64_t all = bits_of(output.data) | bits_of(output.block_stride) | bits_of(output.row_stride) |
                              bits_of(output.row_bytes) | bits_of(plane.offset) | bits_of(plane.stride);
    task.copied[static_cast<std::size_t>(task.num_copied++)] = {.data = output.data,
                                                                .block_stride = output.block_stride,
                                                                .row_stride = output.row_stride,
                                                                .row_bytes = output.row_bytes,
                                                                .offset = plane.offset,
                                                                .stride = plane.stride,
                                                                .unit = unit_of(all)};
  }
}

// Before the receive half no outputs are placed, and `to` is null.
Ids RankMajorEngine::ids_of(const DispatchRequest& request, const Round& round) const {
  const protocol::Plane& plane = round.planes.planes[protocol::kIdsPlane];
  const OutputPlane& output = request.outputs.planes[protocol::kIdsPlane];
  return {.from = static_cast<const std::byte*>(request.topk_ids.data),
          .from_stride = request.topk_ids.row_stride_bytes(),
          .offset = plane.offset,
          .stride = plane.stride,
          .from_i64 = request.topk_ids.dtype == Dtype::kI64,
          .to = output.data,
          .to_block_stride = output.block_stride,
          .to_row_stride = output.row_stride,
          .to_i64 = output.dtype == Dtype::kI64,
          .top_k = setup().params.top_k,
          .num_experts = setup().params.num_experts,
          .invalid_id = setup().params.invalid_expert_id};
}

DispatchTask RankMajorEngine::dispatch_task(const DispatchRequest& request, const Round& round) const {
  DispatchTask task;
  task.common = common();
  task.route = static_cast<const RouteBuffers&>(*round.memory).view();
  task.small = small_;
  task.ids = ids_of(request, round);
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
                                     SmallDispatchTask& task) const {
  const PayloadRows& payload = request.payloads[index];
  const OutputPlane& output = request.outputs.planes[index];
  // Where the caller sees it: its own tensor, or the window's space.
  const bool own = output.data == nullptr;
  SmallLane& lane = task.lanes[static_cast<std::size_t>(task.num_lanes++)];
  lane.from = payload.data;
  lane.from_stride = payload.stride;
  lane.to = own ? window().own() + setup().layout.payload(0) + plane.offset : output.data;
  lane.to_block_stride = own ? setup().layout.payload_bytes() : output.block_stride;
  lane.to_row_stride = own ? plane.stride : output.row_stride;
  lane.row_bytes = static_cast<int>(payload.row_bytes);
  lane.first_line = task.lane_lines;
  lane.end_line = task.lane_lines += static_cast<int>(lines_of(payload.row_bytes));
  const std::uint64_t row = bits_of(payload.row_bytes);
  lane.words_from = unit_of(row | bits_of(lane.from) | bits_of(lane.from_stride)) >= 8;
  lane.words_to = unit_of(row | bits_of(lane.to) | bits_of(lane.to_block_stride) | bits_of(lane.to_row_stride)) >= 8;
}

SmallDispatchTask RankMajorEngine::small_dispatch_task(const DispatchRequest& request, const Round& round) const {
  SmallDispatchTask task;
  task.common = common();
  task.route = static_cast<const RouteBuffers&>(*round.memory).view();
  task.small = small_;
  task.ids = ids_of(request, round);
  task.num_tokens = request.num_tokens;
  task.num_tokens_on_device = request.num_tokens_on_device;
  task.owners = protocol::OwnerRule(setup().params.num_experts, setup().num_ranks);
  task.rows_per_block = static_cast<int>(request.tokens_per_rank);
  for (std::size_t i = 0; i < request.payloads.size(); ++i) {
    if (i == protocol::kIdsPlane || request.payloads[i].row_bytes == 0) continue;
    add_small_lane(request, round.planes.planes[i], i, task);
  }
  constexpr std::uint64_t kSpread = 0x9E3779B97F4A7C15U;  // 2^64 over the golden ratio: all bits matter
  const std::uint64_t all = request.digest ^ static_cast<std::uint64_t>(request.agreed) * kSpread;
  task.agreed = static_cast<std::uint32_t>(all * kSpread >> 32);
  return task;
}

void RankMajorEngine::launch_small_dispatch_half(const SmallDispatchTask& task, const DispatchRequest& request) {
  const DeviceScope scope(device());
  const std::int64_t items = std::int64_t{task.rows_per_block} * (task.receives ? setup().num_ranks : 1);
  launch_small_dispatch(task, blocks_for(items, request.num_sms), enter(request.stream));
}

void RankMajorEngine::launch_dispatch(const DispatchTask& task, const DispatchRequest& request) {
  const DeviceScope scope(device());
  const std::int64_t chunks =
      protocol::num_chunks(std::max<std::int64_t>(task.rows_per_block, 1), setup().layout.shape().tokens_per_chunk);
  const std::int64_t waits = task.receives ? protocol::ceil_div(chunks * setup().num_ranks, kWarps) : 0;
  const int blocks = blocks_for(std::max(task.sends ? request.num_tokens : 0, waits), request.num_sms);
  const auto launch = bulk_ && better_in_bulk(task, blocks) ? launch_bulk_dispatch : launch_rank_major_dispatch;
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
    launch_clear(common(), buffers.view(), enter(request.stream));
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
  const std::int64_t element = size_of(rows.dtype);
  combine_ = {};
  combine_.common = common();
  combine_.route = static_cast<const RouteBuffers&>(*round.memory).view();
  combine_.hidden = hidden_of(rows);
  combine_.from_dtype = rows.dtype;
  combine_.rows_dtype =
      setup().spec.combine_wire == protocol::CombineWire::kF8e4m3 ? Dtype::kF8e4m3 : setup().params.dtype;
  combine_.row_bytes = combine_.hidden * size_of(combine_.rows_dtype);
  combine_.staged = combine_.rows_dtype != rows.dtype || !in_place(rows);
  combine_.from = static_cast<const std::byte*>(rows.data);
  const bool blocks = rows.num_dims == 3;
  combine_.from_row_stride = rows.strides[blocks ? 1 : 0] * element;
  combine_.from_block_stride = blocks ? rows.strides[0] * element : round.tokens_per_rank * combine_.from_row_stride;
  combine_.unit = unit_of(bits_of(rows.data) | bits_of(combine_.from_row_stride) | bits_of(combine_.from_block_stride) |
                          bits_of(combine_.row_bytes));
  combine_.ends_views = request.ends_views;
  combine_.reads_views = request.reads_views;
  auto& buffers = static_cast<RouteBuffers&>(*round.memory);
  buffers.ended_by_combine = true;
  buffers.in_use = !request.in_one_call;  // the receive half clears it
  combine_.receives = request.in_one_call;
  if (buffers.small) combine_.small = small_;
  combine_.tokens_per_rank = static_cast<int>(round.tokens_per_rank);
  combine_.row_lines = static_cast<int>(lines_of(combine_.row_bytes));
  if (!request.in_one_call) launch_combine_half(combine_, request.stream, request.num_sms);
  return {.code = StatusCode::kEnqueued};
}

Status RankMajorEngine::combine_receive(const CombineTarget& target, const Round& round) {
  CombineTask task = combine_;
  task.sends = combine_.receives;  // in one call
  task.receives = true;
  task.route = static_cast<const RouteBuffers&>(*round.memory).view();
  const TensorView& output = target.output;
  task.output = static_cast<std::byte*>(output.data);
  task.output_stride = output.row_stride_bytes();
  task.output_dtype = output.dtype;
  std::uint64_t all = bits_of(output.data) | bits_of(task.output_stride);
  for (std::size_t i = 0; i < target.bias.size(); ++i) {
    if (!target.bias[i].defined()) continue;
    task.bias[i] = static_cast<const std::byte*>(target.bias[i].data);
    task.bias_stride[i] = target.bias[i].row_stride_bytes();
    all |= bits_of(task.bias[i]) | bits_of(task.bias_stride[i]);
  }
  const std::int64_t wider = std::max(size_of(task.rows_dtype), size_of(output.dtype));
  if (task.small.tokens > 0) {
    task.vectors = unit_of(all) >= 8;
  } else {
    task.vectors = unit_of(all) == 16 && task.hidden % (16 / wider) == 0;
  }
  launch_combine_half(task, target.stream, target.num_sms);
  return {.code = StatusCode::kEnqueued};
}

void RankMajorEngine::launch_combine_half(const CombineTask& task, const Stream& stream, int num_sms) {
  const DeviceScope scope(device());
  if (task.small.tokens > 0) {
    launch_small_combine(task, blocks_for(std::int64_t{task.tokens_per_rank} * setup().num_ranks, num_sms),
                         enter(stream));
    return;
  }
  const std::int64_t rows = setup().num_ranks * setup().layout.shape().max_tokens;
  const std::int64_t staging = task.sends && task.staged ? protocol::ceil_div(rows, kWarps) : 0;
  const std::int64_t tokens = task.receives ? setup().layout.shape().max_tokens : 0;
  launch_combine(task, blocks_for(std::max(staging, tokens), num_sms), enter(stream));
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
