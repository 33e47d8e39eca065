// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/expert_major_engine.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <utility>

#include "engine/cuda/access_unit.h"
#include "engine/cuda/payload_tasks.h"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {
namespace {

ExpertBuffers& buffers_of(const Round& round) {
  return static_cast<ExpertBuffers&>(*round.memory);
}

Copied copied_to(const OutputPlane& output, const protocol::Plane& plane) {
  return output.data == nullptr ? Copied{} : copied_of(output, plane);
}

int row_bits_of(std::int64_t rows) {
  return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(rows - 1)));
}

}  // namespace

ExpertMajorEngine::ExpertMajorEngine(const Setup& setup, fabric::Window& window)
    : CudaEngine(setup, window),
      extra_(ExpertLayout::of(setup.layout, setup.params.top_k, setup.params.num_experts)),
      experts_{.owners = {setup.params.num_experts, setup.num_ranks},
               .top_k = setup.params.top_k,
               .picks = protocol::Divisor(setup.params.top_k),
               .num_experts = setup.params.num_experts,
               .first_local = protocol::first_local_expert(setup.params.num_experts, setup.num_ranks, setup.rank),
               .num_local = protocol::num_local_experts(setup.params.num_experts, setup.num_ranks, setup.rank),
               .invalid_id = setup.params.invalid_expert_id,
               .rows = setup.layout.combine_rows(),
               .row_bits = row_bits_of(setup.layout.combine_rows())},
      shared_bytes_(expert_shared_bytes(extra_, experts_, setup.num_ranks, setup.layout.shape().row_capacity)),
      state_(make_device_memory(device(), sizeof(ExpertBoard))) {
  const DeviceScope scope(device());
  load_expert_dispatch(shared_bytes_);
  load_expert_combine();
  load_expert_notices();
}

// Kernels use memory that goes before the base.
ExpertMajorEngine::~ExpertMajorEngine() {
  try {
    drain();
  } catch (const Error&) {
    return;  // nothing runs any more on a device in such a state
  }
}

void ExpertMajorEngine::reserve(Round& round) {
  auto buffers = std::make_unique<ExpertBuffers>(device(), setup().layout, experts_);
  buffers_.push_back(buffers.get());
  round.memory = std::move(buffers);
}

void ExpertMajorEngine::check_dispatch() const {
  if (!dispatches_.open[static_cast<std::size_t>(dispatches_.next_slot())]) return;
  throw Error(ErrorCode::kInvalidState,
              "the dispatch before the last still needs its place in the window: receive it, or let its handle die, "
              "before the next dispatch");
}

void ExpertMajorEngine::check_combine() const {
  if (!combines_.open[static_cast<std::size_t>(combines_.next_slot())]) return;
  throw Error(ErrorCode::kInvalidState,
              "the combine before the last was sent and not received, and its rows lie where those of the next would: "
              "receive it, or let its handle die, before the next is sent");
}

void ExpertMajorEngine::plan(const DispatchRequest& request, Round& round) {
  round.num_tokens = request.num_tokens;  // the rest is the kernel's
}

ExpertNotice ExpertMajorEngine::notice(const ExpertRoute& route) const {
  return {.common = common(), .extra = extra_, .state = reinterpret_cast<ExpertBoard*>(state_.get()), .route = route};
}

// Where a cast makes them, scales come from nowhere, and only values' addresses and strides matter.
void ExpertMajorEngine::add_rows(const DispatchRequest& request, const Round& round, ExpertDispatchTask& task) const {
  const auto lane_of = [&](int index) -> Lane {
    const PayloadRows& payload = request.payloads[static_cast<std::size_t>(index)];
    const protocol::Plane& plane = round.planes.planes[static_cast<std::size_t>(index)];
    const std::uint64_t from = bits_of(payload.data) | bits_of(payload.stride);
    const std::uint64_t wire = bits_of(plane.offset) | bits_of(plane.stride) | bits_of(payload.row_bytes);
    return {.from = payload.data,
            .from_stride = payload.stride,
            .offset = plane.offset,
            .stride = plane.stride,
            .row_bytes = payload.row_bytes,
            .unit = unit_of(request.cast == DispatchCast::kNone ? from | wire : from)};
  };
  task.values = lane_of(protocol::kHiddenPlane);
  task.scales = lane_of(protocol::kScalePlane);
  task.cast = request.cast;
  task.rows_dtype = setup().params.dtype;
  const PayloadRows& weights = request.payloads[protocol::kWeightsPlane];
  task.picks = {.ids = static_cast<const std::byte*>(request.topk_ids.data),
                .ids_stride = request.topk_ids.row_stride_bytes(),
                .ids_i64 = request.topk_ids.dtype == Dtype::kI64,
                .weights = round.experts.has_weights ? weights.data : nullptr,
                .weights_stride = weights.stride,
                .weights_dtype = request.weights_dtype};
}

void ExpertMajorEngine::add_outputs(const DispatchRequest& request, const Round& round, ExpertDispatchTask& task) {
  const auto& outputs = request.outputs;
  const auto& planes = round.planes.planes;
  task.values_to = copied_to(outputs.planes[protocol::kHiddenPlane], planes[protocol::kHiddenPlane]);
  task.scales_to = copied_to(outputs.planes[protocol::kScalePlane], planes[protocol::kScalePlane]);
  if (task.values_to.data != nullptr) task.routes_per_expert = outputs.routes_per_expert;
  task.waited = outputs.waited;
}

ExpertDispatchTask ExpertMajorEngine::dispatch_task(const DispatchRequest& request, const Round& round) const {
  ExpertDispatchTask task;
  task.common = common();
  task.extra = extra_;
  task.state = reinterpret_cast<ExpertBoard*>(state_.get());
  task.route = buffers_of(round).view();
  task.experts = experts_;
  task.num_tokens = request.num_tokens;
  task.num_tokens_on_device = request.num_tokens_on_device;
  task.digest = request.digest;
  task.agreed = request.agreed;
  task.with_weights = round.experts.has_weights;
  const auto& planes = round.planes.planes;
  task.row = {.values = static_cast<int>(planes[protocol::kHiddenPlane].row_bytes),
              .scales = static_cast<int>(planes[protocol::kScalePlane].row_bytes)};
  const auto pieces = static_cast<int>(protocol::ceil_div(task.row.lines(), kPieceLines));
  task.parts = protocol::Divisor(extra_.in_lines() ? pieces : kStampedParts);
  task.peers = protocol::Divisor(setup().num_ranks);
  return task;
}

void ExpertMajorEngine::launch_dispatch(ExpertDispatchTask& task, const DispatchRequest& request) {
  const DeviceScope scope(device());
  task.overlaps = may_overlap(request.num_sms);
  const std::int64_t rows = task.receives ? setup().layout.combine_rows() : 0;
  const std::int64_t receivers = protocol::ceil_div(rows * task.parts.value(), kWarps);
  const int blocks = blocks_for(std::max(task.sends ? request.num_tokens + 2 : 1, receivers + 1), request.num_sms);
  launch_expert_dispatch(task, shared_bytes_, blocks, enter(request.stream));
}

// In one call there is one launch, by the receive half.
Status ExpertMajorEngine::dispatch_send(const DispatchRequest& request, Round& round) {
  count_dispatch();
  ExpertBuffers& buffers = buffers_of(round);
  if (std::exchange(buffers.in_use, true)) {
    const DeviceScope scope(device());
    buffers.clear_state(enter(request.stream));
  }
  buffers.closed = false;
  buffers.dispatch_slot = dispatches_.take();
  const ExpertRoute& route = buffers.view();
  round.rows_on_device = route.rows_received;
  round.tokens_on_device = route.tokens_of;
  round.experts.rows_on_device = route.rows_per_expert;
  round.experts.source_tokens_on_device = route.source_tokens;
  round.experts.source_ranges_on_device = route.source_ranges;
  if (!request.in_one_call) {
    ExpertDispatchTask task = dispatch_task(request, round);
    add_rows(request, round, task);
    task.receives = false;
    launch_dispatch(task, request);
  }
  return {.code = StatusCode::kEnqueued};
}

Status ExpertMajorEngine::dispatch_receive(const DispatchRequest& request, Round& round) {
  ExpertDispatchTask task = dispatch_task(request, round);
  task.sends = request.in_one_call;
  if (task.sends) add_rows(request, round, task);
  add_outputs(request, round, task);
  launch_dispatch(task, request);
  if (task.values_to.data != nullptr) close(buffers_of(round));
  return {.code = StatusCode::kEnqueued};
}

void ExpertMajorEngine::fill(const DispatchRequest& request, Round& round) {
  ExpertDispatchTask task = dispatch_task(request, round);
  task.sends = false;
  add_outputs(request, round, task);
  launch_dispatch(task, request);
  close(buffers_of(round));
}

void ExpertMajorEngine::close(ExpertBuffers& buffers) {
  buffers.closed = true;
  dispatches_.end(buffers.dispatch_slot);
}

void ExpertMajorEngine::release(const Round& round) {
  ExpertBuffers& buffers = buffers_of(round);
  if (buffers.closed) return;
  const DeviceScope scope(device());
  launch_expert_forget(notice(buffers.view()), protocol::kDispatchPhase, last_stream());
  close(buffers);
}

Status ExpertMajorEngine::combine_send(const CombineRequest& request, Round& round) {
  count_combine();
  ExpertBuffers& buffers = buffers_of(round);
  if (!buffers.closed) {
    keep_stream_order(request.stream);
    release(round);
  }
  buffers.combine_slot = combines_.take();
  const TensorView& rows = request.expert_output;
  const std::int64_t element = size_of(rows.dtype);
  const bool blocks = rows.num_dims == 3;
  ExpertCombineTask& task = sent_[static_cast<std::size_t>(buffers.combine_slot)];
  task = {};
  task.common = common();
  task.extra = extra_;
  task.state = reinterpret_cast<ExpertBoard*>(state_.get());
  task.route = buffers.view();
  task.experts = experts_;
  task.from = static_cast<const std::byte*>(rows.data);
  task.from_row_stride = rows.strides[blocks ? 1 : 0] * element;
  task.from_block_stride = blocks ? rows.strides[0] * element : experts_.rows * task.from_row_stride;
  task.from_dtype = rows.dtype;
  task.wire_dtype = setup().params.dtype;
  task.hidden = hidden_of(rows);
  task.from_vectors =
      unit_of(bits_of(rows.data) | bits_of(task.from_row_stride) | bits_of(task.from_block_stride)) == 16;
  if (!round.experts.has_weights) {
    task.weights = static_cast<const std::byte*>(request.topk_weights.data);
    task.weights_stride = request.topk_weights.row_stride_bytes();
  }
  task.receives = request.in_one_call;
  if (!request.in_one_call) launch_combine_half(task, request.stream, request.num_sms);
  return {.code = StatusCode::kEnqueued};
}

Status ExpertMajorEngine::combine_receive(const CombineTarget& target, const Round& round) {
  ExpertBuffers& buffers = buffers_of(round);
  ExpertCombineTask& task = sent_[static_cast<std::size_t>(buffers.combine_slot)];
  task.sends = target.in_one_call;
  task.receives = true;
  const TensorView& output = target.output;
  task.output = static_cast<std::byte*>(output.data);
  task.output_stride = output.row_stride_bytes();
  task.output_dtype = output.dtype;
  task.output_vectors = unit_of(bits_of(output.data) | bits_of(task.output_stride)) == 16;
  launch_combine_half(task, target.stream, target.num_sms);
  combines_.end(buffers.combine_slot);
  buffers.in_use = false;
  return {.code = StatusCode::kEnqueued};
}

// With few rows in lines, their pieces are small and each scheduler of a multiprocessor has one.
void ExpertMajorEngine::launch_combine_half(ExpertCombineTask& task, const Stream& stream, int num_sms) {
  const DeviceScope scope(device());
  const protocol::WindowLayout& layout = setup().layout;
  const std::int64_t rows = task.sends ? layout.combine_rows() : layout.shape().max_tokens;
  task.overlaps = may_overlap(num_sms);
  const bool logarithmic = setup().spec.combine_wire == protocol::CombineWire::kLogarithmic;
  std::int64_t work = rows;
  if (extra_.in_lines() && !logarithmic) {
    constexpr int kSchedulers = 4;
    const std::int64_t warps = std::int64_t{blocks_for(kMaxBlocks, num_sms)} * kWarps;
    task.row_lines = static_cast<int>(lines_of(task.hidden * size_of(setup().params.dtype)));
    task.piece_lines =
        rows * protocol::ceil_div(task.row_lines, kLinesOfAccess) <= warps ? kLinesOfAccess : kPieceLines;
    task.pieces = protocol::Divisor(static_cast<int>(protocol::ceil_div(task.row_lines, task.piece_lines)));
    work = protocol::ceil_div(rows * task.pieces.value(), kSchedulers);
  }
  launch_expert_combine(task, logarithmic, blocks_for(work, num_sms), enter(stream));
}

// What follows goes on the last stream, and is to go on this one.
void ExpertMajorEngine::keep_stream_order(const Stream& stream) {
  const DeviceScope scope(device());
  static_cast<void>(enter(stream));
}

void ExpertMajorEngine::release_combine(const Round& round) {
  const DeviceScope scope(device());
  ExpertBuffers& buffers = buffers_of(round);
  launch_expert_forget(notice(buffers.view()), protocol::kCombinePhase, last_stream());
  combines_.end(buffers.combine_slot);
}

void ExpertMajorEngine::abort_dispatch() {
  const DeviceScope scope(device());
  launch_expert_abort_dispatch(notice({}), last_stream());
  dispatches_.end(dispatches_.take());
}

void ExpertMajorEngine::abort_combine(const Round& round) {
  const DeviceScope scope(device());
  launch_expert_abort_combine(notice(buffers_of(round).view()), last_stream());
  combines_.end(combines_.take());
}

void ExpertMajorEngine::reset(std::uint32_t epoch) {
  CudaEngine::reset(epoch);
  const DeviceScope scope(device());
  check(cudaMemset(state_.get(), 0, sizeof(ExpertBoard)), "cudaMemset");
  for (ExpertBuffers* buffers : buffers_)
    buffers->clear();
  check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  dispatches_ = {};
  combines_ = {};
}

}  // namespace tokenyard::engine::cuda
