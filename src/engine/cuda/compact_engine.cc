// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/compact_engine.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/cuda/access_unit.h"
#include "engine/cuda/bulk_sums.h"
#include "engine/cuda/combine_tasks.h"
#include "engine/cuda/compact_kernels.h"
#include "engine/cuda/payload_tasks.h"
#include "engine/route_plan.h"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {
namespace {

constexpr std::int64_t kPart = 16;  // alignment of what a route keeps

const RouteBuffers& buffers_of(const Round& round) {
  return static_cast<const RouteBuffers&>(*round.memory);
}

ToldCounts& counts_in(const PinnedMemory& told) {
  return *reinterpret_cast<ToldCounts*>(told.get());
}

ToldLists lists_in(const PinnedMemory& told, int num_ranks) {
  auto* lists = reinterpret_cast<std::int32_t*>(told.get() + sizeof(ToldCounts));
  return {
      .rows_received = lists, .tokens_of = lists + num_ranks, .rows_per_expert = lists + 2 * std::int64_t{num_ranks}};
}

}  // namespace

CompactEngine::CompactEngine(const Setup& setup, fabric::Window& window)
    : CudaEngine(setup, window),
      num_local_experts_(protocol::num_local_experts(setup.params.num_experts, setup.num_ranks, setup.rank)),
      headers_(CompactHeaders::of(setup.layout, setup.params.num_experts)),
      dispatch_epoch_(setup.initial_epoch) {
  if (setup.layout.shape().budget_bytes > 0) {
    throw Error(ErrorCode::kUnsupported,
                "the CUDA engine has no byte budgets; leave HighThroughputConfig::buffer_bytes 0 and size the window "
                "by MoeParams",
                setup.rank);
  }
  if (setup.params.num_experts >= protocol::OwnerRule::kMostExperts) {
    throw Error(ErrorCode::kUnsupported,
                "num_experts is " + std::to_string(setup.params.num_experts) +
                    "; on the CUDA engine `high_throughput` takes at most " +
                    std::to_string(protocol::OwnerRule::kMostExperts - 1),
                setup.rank);
  }
  const DeviceScope scope(device());
  masks_ = make_device_memory(device(), setup.num_ranks * chunk_stride() * kTaggedBytes);
  expert_rows_ = make_device_memory(device(), std::int64_t{setup.params.num_experts} * 4);
  told_ = make_pinned_memory(device(), static_cast<std::int64_t>(sizeof(ToldCounts)) +
                                           (2 * std::int64_t{setup.num_ranks} + num_local_experts_) * 4);
  load_count();
  load_move();
  bulk_moves_ = load_bulk_move();
  bulk_combines_ = load_compact_combine();
}

std::int64_t CompactEngine::chunk_stride() const {
  return protocol::align_up(setup().layout.max_chunks(), 4);
}

// [first of chunks] [wire ids] [begins]
void CompactEngine::reserve(Round& round) {
  const std::int64_t ranks = setup().num_ranks;
  const std::int64_t ids = setup().layout.shape().max_tokens * setup().params.top_k * 4;
  const std::int64_t extra = ranks * chunk_stride() * 4 + protocol::align_up(ids, kPart) + ranks * 4;
  keep(round, std::make_unique<RouteBuffers>(device(), setup().layout, extra));
  for (auto* per_rank : {&round.rows_received, &round.tokens_of})
    per_rank->resize(static_cast<std::size_t>(ranks));
  round.rows_per_expert.resize(static_cast<std::size_t>(num_local_experts_));
}

CompactRoute CompactEngine::route_of(const Round& round) const {
  const std::int64_t ranks = setup().num_ranks;
  const std::int64_t ids = setup().layout.shape().max_tokens * setup().params.top_k * 4;
  CompactRoute route{.basic = buffers_of(round).view(),
                     .chunks = static_cast<int>(setup().layout.max_chunks()),
                     .chunk_stride = static_cast<int>(chunk_stride()),
                     .top_k = setup().params.top_k};
  std::byte* at = buffers_of(round).extra();
  route.first_of_chunk = reinterpret_cast<std::uint32_t*>(at);
  route.wire_ids = reinterpret_cast<std::int32_t*>(at += ranks * chunk_stride() * 4);
  route.begin_at = reinterpret_cast<std::int32_t*>(at + protocol::align_up(ids, kPart));
  return route;
}

void CompactEngine::plan(const DispatchRequest& request, Round& round) {
  round.num_tokens = request.num_tokens;  // the rest is the kernel's
}

// On a stream of its own: kernels of this rank may wait for peers, and they for what this rank does next.
void CompactEngine::query(const DispatchRequest& request, Round& round) {
  const DeviceScope scope(device());
  const TensorView& ids = request.topk_ids;
  const auto row_bytes = static_cast<std::size_t>(ids.row_bytes());
  const auto rows = static_cast<std::size_t>(ids.num_rows());
  std::vector<std::byte> copy(rows * row_bytes);
  check(cudaMemcpy2DAsync(copy.data(), row_bytes, ids.data, static_cast<std::size_t>(ids.row_stride_bytes()), row_bytes,
                          rows, cudaMemcpyDeviceToHost, cudaStreamPerThread),
        "cudaMemcpy2DAsync");
  check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  DispatchRequest on_host = request;
  on_host.topk_ids = TensorView(copy.data(), ids.dtype, {ids.num_rows(), setup().params.top_k});
  round.num_tokens = request.num_tokens;
  plan_routes({.params = setup().params,
               .num_ranks = setup().num_ranks,
               .rank = setup().rank,
               .max_tokens = setup().layout.shape().max_tokens},
              on_host, round);
}

CountTask CompactEngine::count_task(const DispatchRequest& request) const {
  const MoeParams& params = setup().params;
  CountTask task{.num_tokens = request.num_tokens,
                 .num_tokens_on_device = request.num_tokens_on_device,
                 .digest = request.digest,
                 .agreed = request.agreed,
                 .headers = headers_,
                 .owners = protocol::OwnerRule(params.num_experts, setup().num_ranks),
                 .slots = protocol::Divisor(params.top_k),
                 .masks = masks_.get(),
                 .expert_rows = reinterpret_cast<std::uint32_t*>(expert_rows_.get())};
  // A replay picks what the route says that was picked.
  if (request.replay != nullptr) {
    const CompactRoute route = route_of(*request.replay);
    task.num_tokens_on_device = reinterpret_cast<const std::int32_t*>(route.basic.state + kRouteTokens);
  }
  return task;
}

void CompactEngine::launch_counts(const DispatchRequest& request, const Round& round) {
  MoveTask task = move_task(request, round);
  task.sends = task.receives = false;
  task.counts.told = &counts_in(told_);
  task.counts.lists = lists_in(told_, setup().num_ranks);
  task.counts.ticket = ++ticket_;
  const std::int64_t chunks = protocol::num_chunks(request.num_tokens, setup().layout.shape().tokens_per_chunk);
  launch_count(task, blocks_for(chunks, request.num_sms), enter(request.stream));
}

// The launch ends by its deadlines, and the stream then has nothing more to do. Where it went wrong its end is waited
// for: another block than the one that tells may still be writing the reason.
bool CompactEngine::wait_for_counts(const Stream& stream) const {
  constexpr int kLooksPerQuery = 256;
  auto& ticket = counts_in(told_).ticket;
  const auto told = [&] {
    // Pairs with tell_host.
    return std::atomic_ref<std::uint32_t>(ticket).load(std::memory_order_acquire) == ticket_;
  };
  while (true) {
    for (int look = 0; look < kLooksPerQuery; ++look) {
      if (told() && counts_in(told_).there != 0) return true;
    }
    const cudaError_t outcome = cudaStreamQuery(static_cast<cudaStream_t>(stream.native));
    if (outcome == cudaErrorNotReady) {
      std::this_thread::yield();
      continue;
    }
    check(outcome, "cudaStreamQuery");
    return told() && counts_in(told_).there != 0;
  }
}

void CompactEngine::take_counts(Round& round) const {
  const ToldLists lists = lists_in(told_, setup().num_ranks);
  std::copy_n(lists.rows_received, setup().num_ranks, round.rows_received.begin());
  std::copy_n(lists.tokens_of, setup().num_ranks, round.tokens_of.begin());
  round.rows_per_expert.assign(lists.rows_per_expert, lists.rows_per_expert + num_local_experts_);
  round.num_rows = counts_in(told_).num_rows;
}

Status CompactEngine::dispatch_send(const DispatchRequest& request, Round& round) {
  const DeviceScope scope(device());
  if (!request.fixed_rows && records(request.stream)) {
    throw Error(ErrorCode::kInvalidState,
                "the stream is being captured, and without num_worst_tokens the host waits for counts; give it",
                setup().rank);
  }
  count_dispatch();
  combined_ = false;
  round.epoch = ++dispatch_epoch_;
  round.route_epoch = request.replay == nullptr ? round.epoch : request.replay->route_epoch;
  auto& buffers = static_cast<RouteBuffers&>(*round.memory);
  buffers.ended_by_combine = false;
  round.rows = window().own() + setup().layout.payload(0);
  round.space_stride = 0;
  const CompactRoute route = route_of(round);
  round.rows_on_device = request.fixed_rows ? reinterpret_cast<std::int32_t*>(route.basic.rows_received) : nullptr;
  round.tokens_on_device = request.fixed_rows ? route.basic.tokens_of : nullptr;
  if (request.fixed_rows) {
    round.num_rows = request.row_limit;  // as many are shown
  } else {
    launch_counts(request, round);
    if (!wait_for_counts(request.stream)) {
      const Status ended = poll();  // throws when ranks disagree
      return ended.ok() ? Status{.code = StatusCode::kAborted, .fault = {.rank = setup().rank}} : ended;
    }
    take_counts(round);
  }
  if (!request.in_one_call) {
    MoveTask task = move_task(request, round);
    task.settles = request.fixed_rows;
    task.receives = false;
    launch_rows(task, request);
  }
  return {.code = StatusCode::kEnqueued};
}

MoveTask CompactEngine::move_task(const DispatchRequest& request, const Round& round) const {
  const MoeParams& params = setup().params;
  MoveTask task{.common = common(),
                .route = route_of(round),
                .counts = count_task(request),
                .ids = ids_of(params, request, round),
                .first_expert = protocol::first_local_expert(params.num_experts, setup().num_ranks, setup().rank),
                .num_local_experts = num_local_experts_,
                .row_limit = request.row_limit,
                .sends_ids = request.payloads[protocol::kIdsPlane].row_bytes > 0};
  if (request.replay != nullptr) {
    task.ids.from = reinterpret_cast<const std::byte*>(route_of(*request.replay).wire_ids);
    task.ids.from_stride = std::int64_t{params.top_k} * 4;
    task.ids.from_i64 = false;
  }
  for (std::size_t i = 0; i < request.payloads.size(); ++i) {
    const PayloadRows& payload = request.payloads[i];
    if (payload.row_bytes == 0 || i == protocol::kIdsPlane) continue;
    task.lanes[static_cast<std::size_t>(task.num_lanes++)] = lane_of(payload, round.planes.planes[i]);
  }
  return task;
}

void CompactEngine::add_outputs(const DispatchRequest& request, Round& round, MoveTask& task) const {
  task.rows_shown = request.outputs.rows_shown;
  task.releases = true;
  for (std::size_t i = 0; i < request.outputs.planes.size(); ++i) {
    const OutputPlane& output = request.outputs.planes[i];
    if (request.payloads[i].row_bytes > 0 && output.data == nullptr) task.releases = false;
    if (output.data == nullptr || i == protocol::kIdsPlane) continue;
    const Copied copied = copied_of(output, round.planes.planes[i]);
    if (i == protocol::kWeightsPlane) {
      task.weights = copied;
      task.weights.unit = static_cast<int>(output.row_bytes / setup().params.top_k);  // of an element
    } else {
      task.copied[static_cast<std::size_t>(task.num_copied++)] = copied;
    }
  }
  if (task.releases) static_cast<RouteBuffers&>(*round.memory).ended_by_combine = true;  // nothing is left to tell
}

void CompactEngine::launch_rows(const MoveTask& task, const DispatchRequest& request) {
  const DeviceScope scope(device());
  const std::int64_t chunks =
      protocol::num_chunks(setup().layout.shape().max_tokens, setup().layout.shape().tokens_per_chunk);
  const std::int64_t waits = task.receives ? protocol::ceil_div(chunks * setup().num_ranks, kWarps) : 0;
  const int blocks = blocks_for(std::max(request.num_tokens, waits), request.num_sms);
  const auto launch = bulk_moves_ && gains_from_bulk(task, request.num_tokens, blocks) ? launch_bulk_move : launch_move;
  launch(task, blocks, enter(request.stream));
}

Status CompactEngine::dispatch_receive(const DispatchRequest& request, Round& round) {
  MoveTask task = move_task(request, round);
  task.sends = request.in_one_call;
  task.settles = task.sends && request.fixed_rows;
  add_outputs(request, round, task);
  launch_rows(task, request);
  return {.code = StatusCode::kEnqueued};
}

void CompactEngine::fill(const DispatchRequest& request, Round& round) {
  MoveTask task = move_task(request, round);
  task.sends = task.settles = false;
  add_outputs(request, round, task);
  launch_rows(task, request);
}

void CompactEngine::release(const Round& round) {
  if (buffers_of(round).ended_by_combine) return;
  const DeviceScope scope(device());
  launch_release(common(), false, last_stream());
}

// Whether the rows lie in the window, where combine reads them.
bool CompactEngine::in_place(const TensorView& expert_output) const {
  const std::byte* section = window().own() + setup().layout.combine_row(0);
  return static_cast<const std::byte*>(expert_output.data) == section &&
         expert_output.row_stride_bytes() == setup().layout.combine_stride();
}

Status CompactEngine::combine_send(const CombineRequest& request, Round& round) {
  count_combine();
  combined_ = true;
  const TensorView& rows = request.expert_output;
  combine_ = {.route = route_of(round), .num_experts = setup().params.num_experts};
  CombineTask& task = combine_.rows = combine_task(request, setup().params.dtype, in_place(rows));
  task.common = common();
  task.route = combine_.route.basic;
  task.row_limit = round.row_limit;
  task.most_rows = setup().layout.shape().max_tokens;
  task.repeats = true;
  task.unit = unit_of(bits_of(rows.data) | bits_of(task.from_row_stride) | bits_of(task.row_bytes));
  if (request.topk_weights.defined()) {
    combine_.weights = static_cast<const std::byte*>(request.topk_weights.data);
    combine_.weights_stride = request.topk_weights.row_stride_bytes();
    task.stages_rest = true;
  }
  static_cast<RouteBuffers&>(*round.memory).ended_by_combine = true;
  if (!request.in_one_call) launch_combine(combine_, round, request.stream, request.num_sms);
  return {.code = StatusCode::kEnqueued};
}

Status CompactEngine::combine_receive(const CombineTarget& target, const Round& round) {
  CompactCombineTask task = combine_;
  task.rows.sends = combine_.rows.receives;  // in one call
  task.rows.receives = true;
  task.rows.vectors = in_vectors(task.rows, add_target(target, task.rows));
  if (target.topk_weights.defined()) {
    task.weights_output = static_cast<std::byte*>(target.topk_weights.data);
    task.weights_output_stride = target.topk_weights.row_stride_bytes();
  }
  launch_combine(task, round, target.stream, target.num_sms);
  return {.code = StatusCode::kEnqueued};
}

void CompactEngine::launch_combine(const CompactCombineTask& task,
                                   const Round& round,
                                   const Stream& stream,
                                   int num_sms) {
  const DeviceScope scope(device());
  const std::int64_t kept = task.rows.sends ? std::min(round.num_rows, round.row_limit) : 0;
  const std::int64_t tokens = task.rows.receives ? round.num_tokens : 0;
  const int blocks = blocks_for(std::max(tokens, protocol::ceil_div(kept, kWarps)), num_sms);
  const bool in_bulk = bulk_combines_ && combines_in_bulk(task.rows, tokens, kept, blocks);
  launch_compact_combine(task, blocks, in_bulk, enter(stream));
}

void CompactEngine::release_combine(const Round& /*round*/) {
  const DeviceScope scope(device());
  launch_release(common(), true, last_stream());
}

void CompactEngine::abort_dispatch() {
  ++dispatch_epoch_;
  const DeviceScope scope(device());
  launch_abort_compact({.common = common(), .counts = {.headers = headers_}}, last_stream());
}

void CompactEngine::abort_combine(const Round& round) {
  combined_ = true;
  const DeviceScope scope(device());
  launch_abort_combine(common(), buffers_of(round).view(), false, last_stream());
}

// Behind a dispatch the section is free, because every rank that took part in it had ended the combine before.
Status CompactEngine::acquire_combine_section() {
  if (!combined_) return {};
  const DeviceScope scope(device());
  launch_await_section(common(), last_stream());
  return {};
}

Status CompactEngine::poll() {
  Status status = CudaEngine::poll();
  if (!status.ok()) return status;
  auto& missing = common().host->missing_rows;
  const std::uint64_t now = std::atomic_ref<std::uint64_t>(missing).load(std::memory_order_acquire);
  status.missing_rows = static_cast<std::int64_t>(now - told_missing_);
  told_missing_ = now;
  return status;
}

void CompactEngine::reset(std::uint32_t epoch) {
  CudaEngine::reset(epoch);
  const DeviceScope scope(device());
  check(cudaMemsetAsync(expert_rows_.get(), 0, static_cast<std::size_t>(setup().params.num_experts) * 4,
                        cudaStreamPerThread),
        "cudaMemsetAsync");
  check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  dispatch_epoch_ = epoch;
  told_missing_ = 0;
  combined_ = false;
}

}  // namespace tokenyard::engine::cuda
