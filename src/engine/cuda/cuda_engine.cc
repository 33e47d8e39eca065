// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/cuda_engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "engine/cuda/kernels.h"
#include "protocol/stamp.h"

namespace tokenyard::engine::cuda {
namespace {

// Bytes of the widest access, a power of two up to 16, that divides all of what was or-ed together.
int unit_of(std::uint64_t addresses_and_sizes) {
  const std::uint64_t bits = addresses_and_sizes | 16U;
  return static_cast<int>(bits & (~bits + 1));
}

std::uint64_t bits_of(const void* address) {
  return reinterpret_cast<std::uint64_t>(address);
}

std::uint64_t bits_of(std::int64_t size) {
  return static_cast<std::uint64_t>(size);
}

// What peers may store at any time is read as a whole.
Notice read_notice(const Notice& from) {
  Notice notice{};
  auto& kind = const_cast<NoticeKind&>(from.kind);
  notice.kind = std::atomic_ref<NoticeKind>(kind).load(std::memory_order_acquire);  // pairs with leave_notice
  if (notice.kind == NoticeKind::kNone) return notice;
  notice.peer = from.peer;
  notice.phase = from.phase;
  notice.epoch = from.epoch;
  notice.waited_ns = from.waited_ns;
  return notice;
}

std::int64_t hidden_of(const TensorView& rows) {
  return rows.shape[static_cast<std::size_t>(rows.num_dims - 1)];
}

constexpr int kWarpsOfBlock = kThreads / 32;

// From here on a block sends more tokens than it takes to fill a pipeline. What other ranks choose does not matter.
bool better_in_bulk(const DispatchTask& task, int blocks) {
  constexpr std::int64_t kTokensPerBlock = 2;
  return task.sends && task.num_tokens > kTokensPerBlock * blocks &&
         std::any_of(task.lanes.begin(), task.lanes.begin() + task.num_lanes, moves_in_bulk);
}

}  // namespace

std::unique_ptr<Engine> make_cuda_engine(const Setup& setup, fabric::Window& window) {
  return std::make_unique<CudaEngine>(setup, window);
}

CudaEngine::CudaEngine(const Setup& setup, fabric::Window& window)
    : setup_(setup), window_(window), device_(window.device().index) {
  if (setup.spec.placement != protocol::Placement::kRankMajor || setup.spec.transport != protocol::Transport::kWindow) {
    throw Error(ErrorCode::kUnsupported, "the CUDA engine moves rank-major rows through windows (`one_sided`) so far",
                setup.rank);
  }
  const DeviceScope scope(device_);
  const std::int64_t ranks = setup.num_ranks;
  std::vector<std::byte*> pointers(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    pointers[static_cast<std::size_t>(rank)] = window.peer(rank);
    if (window.peer(rank) != nullptr) continue;
    throw Error(
        ErrorCode::kUnsupported,
        "the CUDA engine needs load/store reach to every rank's window, and has none to rank " + std::to_string(rank),
        setup.rank, rank);
  }
  windows_ = make_device_memory(device_, ranks * static_cast<std::int64_t>(sizeof(std::byte*)));
  check(cudaMemcpy(windows_.get(), pointers.data(), pointers.size() * sizeof(std::byte*), cudaMemcpyHostToDevice),
        "cudaMemcpy");
  const std::int64_t board = protocol::align_up(sizeof(Board), 8);
  board_bytes_ = board + (setup.layout.max_chunks() + 1 + ranks) * 4;
  board_ = make_device_memory(device_, board_bytes_);
  host_ = make_pinned_memory(device_, sizeof(HostBoard));
  order_ = make_event(device_);
  common_ = {.layout = setup.layout,
             .windows = reinterpret_cast<std::byte* const*>(windows_.get()),
             .board = reinterpret_cast<Board*>(board_.get()),
             .host = reinterpret_cast<HostBoard*>(host_.get()),
             .arrivals = reinterpret_cast<std::uint32_t*>(board_.get() + board),
             .owed = reinterpret_cast<std::uint32_t*>(board_.get() + board) + setup.layout.max_chunks() + 1,
             .rank = setup.rank,
             .num_ranks = setup.num_ranks};
  int processors = 1;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device_), "cudaDeviceGetAttribute");
  // All blocks of all ranks on the device are resident: blocks wait for each other.
  max_blocks_ = std::max(1, processors / window.ranks_on_device());
  load_rank_major_dispatch();
  bulk_ = load_bulk_dispatch();
  load_combine();
  load_notices();
  set_back(setup.initial_epoch);
}

CudaEngine::~CudaEngine() {
  // Kernels end by their deadlines; they use what is freed next.
  if (streams_known_) static_cast<void>(cudaStreamSynchronize(last_stream_));
}

void CudaEngine::reserve(Round& round) {
  auto buffers = std::make_unique<RouteBuffers>(device_, setup_.layout);
  routes_.push_back(buffers.get());
  round.memory = std::move(buffers);
}

Memory CudaEngine::allocate(std::int64_t bytes) {
  DeviceMemory memory = make_device_memory(device_, bytes);
  const FreeDevice free = memory.get_deleter();
  return Memory(memory.release(), [free](std::byte* address) { free(address); });
}

void CudaEngine::reshape(const MoeParams& params, const protocol::WindowLayout& layout) {
  setup_.params = params;
  setup_.layout = common_.layout = layout;
}

void CudaEngine::check_dispatch() const {}  // at most one operation is in flight, which the caller checks

void CudaEngine::check_combine() const {}

void CudaEngine::plan(const DispatchRequest& request, Round& round) {
  round.num_tokens = request.num_tokens;  // the rest is the kernel's
}

cudaStream_t CudaEngine::enter(const Stream& stream) {
  auto* native = static_cast<cudaStream_t>(stream.native);
  if (streams_known_ && native != last_stream_) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(native, &capture), "cudaStreamIsCapturing");
    if (capture == cudaStreamCaptureStatusNone) {
      check(cudaEventRecord(order_.get(), last_stream_), "cudaEventRecord");
      check(cudaStreamWaitEvent(native, order_.get(), 0), "cudaStreamWaitEvent");
    }
  }
  streams_known_ = true;
  return last_stream_ = native;
}

int CudaEngine::blocks_for(std::int64_t work, int num_sms) const {
  const int most = num_sms > 0 ? std::min(num_sms, max_blocks_) : max_blocks_;
  return static_cast<int>(std::clamp<std::int64_t>(work, 1, most));
}

void CudaEngine::add_lanes(const DispatchRequest& request, const Round& round, DispatchTask& task) const {
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

void CudaEngine::add_outputs(const DispatchRequest& request, const Round& round, DispatchTask& task) const {
  task.gathered_stats = request.outputs.stats;
  for (std::size_t i = 0; i < request.outputs.planes.size(); ++i) {
    const OutputPlane& output = request.outputs.planes[i];
    const protocol::Plane& plane = round.planes.planes[i];
    if (output.data == nullptr) continue;
    if (i == protocol::kIdsPlane) {
      task.ids.to = output.data;
      task.ids.to_block_stride = output.block_stride;
      task.ids.to_row_stride = output.row_stride;
      task.ids.to_i64 = output.dtype == Dtype::kI64;
      continue;
    }
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

DispatchTask CudaEngine::dispatch_task(const DispatchRequest& request, const Round& round) const {
  const protocol::Plane& ids = round.planes.planes[protocol::kIdsPlane];
  DispatchTask task;
  task.common = common_;
  task.route = static_cast<const RouteBuffers&>(*round.memory).view();
  task.ids = {.from = static_cast<const std::byte*>(request.topk_ids.data),
              .from_stride = request.topk_ids.row_stride_bytes(),
              .offset = ids.offset,
              .stride = ids.stride,
              .from_i64 = request.topk_ids.dtype == Dtype::kI64,
              .top_k = setup_.params.top_k,
              .num_experts = setup_.params.num_experts,
              .invalid_id = setup_.params.invalid_expert_id};
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

void CudaEngine::launch_dispatch(const DispatchTask& task, const DispatchRequest& request) {
  const DeviceScope scope(device_);
  const std::int64_t chunks =
      protocol::num_chunks(std::max<std::int64_t>(task.rows_per_block, 1), setup_.layout.shape().tokens_per_chunk);
  const std::int64_t waits = task.receives ? protocol::ceil_div(chunks * setup_.num_ranks, kWarpsOfBlock) : 0;
  const int blocks = blocks_for(std::max(task.sends ? request.num_tokens : 0, waits), request.num_sms);
  const auto launch = bulk_ && better_in_bulk(task, blocks) ? launch_bulk_dispatch : launch_rank_major_dispatch;
  launch(task, blocks, enter(request.stream));
}

// In one call there is one launch, by the receive half.
Status CudaEngine::dispatch_send(const DispatchRequest& request, Round& round) {
  ++num_dispatches_;
  auto& buffers = static_cast<RouteBuffers&>(*round.memory);
  buffers.ended_by_combine = false;
  round.rows = window_.own() + setup_.layout.payload(0);
  round.space_stride = setup_.layout.payload_bytes();
  round.rows_on_device = reinterpret_cast<std::int32_t*>(buffers.view().rows_received);
  round.tokens_on_device = buffers.view().tokens_of;
  if (!request.in_one_call) {
    DispatchTask task = dispatch_task(request, round);
    task.receives = false;
    launch_dispatch(task, request);
  }
  return {.code = StatusCode::kEnqueued};
}

Status CudaEngine::dispatch_receive(const DispatchRequest& request, Round& round) {
  DispatchTask task = dispatch_task(request, round);
  task.sends = request.in_one_call;
  add_outputs(request, round, task);
  launch_dispatch(task, request);
  return {.code = StatusCode::kEnqueued};
}

void CudaEngine::fill(const DispatchRequest& request, Round& round) {
  DispatchTask task = dispatch_task(request, round);
  task.sends = task.counts = false;
  add_outputs(request, round, task);
  launch_dispatch(task, request);
}

void CudaEngine::release(const Round& round) {
  if (static_cast<const RouteBuffers&>(*round.memory).ended_by_combine) return;
  const DeviceScope scope(device_);
  launch_release(common_, static_cast<const RouteBuffers&>(*round.memory).view(), last_stream_);
}

// Whether the rows lie in the window, where combine reads them.
bool CudaEngine::in_place(const TensorView& expert_output) const {
  const std::byte* section = window_.own() + setup_.layout.combine_row(0);
  const std::int64_t element = size_of(expert_output.dtype);
  const std::int64_t stride = setup_.layout.combine_stride();
  if (static_cast<const std::byte*>(expert_output.data) != section || expert_output.num_dims != 3) return false;
  return expert_output.strides[1] * element == stride &&
         expert_output.strides[0] * element == stride * setup_.layout.shape().max_tokens;
}

Status CudaEngine::combine_send(const CombineRequest& request, Round& round) {
  ++num_combines_;
  const TensorView& rows = request.expert_output;
  const std::int64_t element = size_of(rows.dtype);
  combine_ = {};
  combine_.common = common_;
  combine_.route = static_cast<const RouteBuffers&>(*round.memory).view();
  combine_.hidden = hidden_of(rows);
  combine_.from_dtype = rows.dtype;
  combine_.rows_dtype =
      setup_.spec.combine_wire == protocol::CombineWire::kF8e4m3 ? Dtype::kF8e4m3 : setup_.params.dtype;
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
  static_cast<RouteBuffers&>(*round.memory).ended_by_combine = true;
  combine_.receives = request.in_one_call;
  if (!request.in_one_call) launch_combine_half(combine_, request.stream, request.num_sms);
  return {.code = StatusCode::kEnqueued};
}

Status CudaEngine::combine_receive(const CombineTarget& target, const Round& round) {
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
  task.vectors = unit_of(all) == 16 && task.hidden % (16 / wider) == 0;
  launch_combine_half(task, target.stream, target.num_sms);
  return {.code = StatusCode::kEnqueued};
}

void CudaEngine::launch_combine_half(const CombineTask& task, const Stream& stream, int num_sms) {
  const DeviceScope scope(device_);
  const std::int64_t rows = setup_.num_ranks * setup_.layout.shape().max_tokens;
  const std::int64_t staging = task.sends && task.staged ? protocol::ceil_div(rows, kWarpsOfBlock) : 0;
  const std::int64_t tokens = task.receives ? setup_.layout.shape().max_tokens : 0;
  launch_combine(task, blocks_for(std::max(staging, tokens), num_sms), enter(stream));
}

void CudaEngine::release_combine(const Round& round) {
  const DeviceScope scope(device_);
  launch_release(common_, static_cast<const RouteBuffers&>(*round.memory).view(), last_stream_);
}

void CudaEngine::abort_dispatch() {
  const DeviceScope scope(device_);
  launch_abort_dispatch(common_, last_stream_);
}

void CudaEngine::abort_combine(const Round& round) {
  const DeviceScope scope(device_);
  launch_abort_combine(common_, static_cast<const RouteBuffers&>(*round.memory).view(), last_stream_);
}

// The handle's dispatch is behind the combine before on every rank that stamped it, so the section is free.
Status CudaEngine::acquire_combine_section() {
  return {};
}

Status CudaEngine::status_of(const Notice& notice, StatusCode code) const {
  return {.code = code,
          .fault = {.rank = setup_.rank,
                    .peer = notice.peer,
                    .phase = static_cast<Phase>(notice.phase),
                    .epoch = notice.epoch,
                    .waited = std::chrono::nanoseconds(notice.waited_ns)}};
}

Status CudaEngine::fault() const {
  const Notice notice = read_notice(common_.host->fault);
  return notice.kind == NoticeKind::kNone ? Status{} : status_of(notice, StatusCode::kTimeout);
}

Status CudaEngine::poll() {
  const Status status = fault();
  if (!status.ok()) return status;
  const Notice notice = read_notice(common_.host->aborted);
  if (notice.kind == NoticeKind::kNone || notice.epoch == told_abort_) return {};
  told_abort_ = notice.epoch;
  if (notice.kind == NoticeKind::kAborted) return status_of(notice, StatusCode::kAborted);
  throw Error(ErrorCode::kMismatch,
              "rank " + std::to_string(notice.peer) + " and rank " + std::to_string(setup_.rank) +
                  " passed what must agree and does not: payloads, dtypes, widths or sizes of the result",
              setup_.rank, notice.peer);
}

void CudaEngine::set_back(std::uint32_t epoch) {
  const DeviceScope scope(device_);
  std::vector<std::byte> control(static_cast<std::size_t>(setup_.layout.rows()));
  const std::uint64_t progress = protocol::encode_progress(epoch, epoch);
  for (int phase = 0; phase < protocol::kNumPhases; ++phase) {
    for (int peer = 0; peer < setup_.num_ranks; ++peer)
      std::memcpy(control.data() + setup_.layout.released(phase, peer), &progress, sizeof(progress));
  }
  check(cudaMemcpy(window_.own(), control.data(), control.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  std::vector<std::byte> board(static_cast<std::size_t>(board_bytes_));
  const auto nanoseconds = [](auto duration) {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(duration).count());
  };
  const Board start{.epochs = {epoch, epoch, epoch},
                    .rows_released = epoch,
                    .initial_epoch = setup_.initial_epoch,
                    .deadline_ns = nanoseconds(setup_.deadline),
                    .first_deadline_ns = nanoseconds(setup_.first_round_deadline)};
  std::memcpy(board.data(), &start, sizeof(start));
  std::vector<std::uint32_t> owed(static_cast<std::size_t>(setup_.num_ranks), epoch);
  const auto at = reinterpret_cast<const std::byte*>(common_.owed) - board_.get();
  std::memcpy(board.data() + at, owed.data(), owed.size() * sizeof(std::uint32_t));
  check(cudaMemcpy(board_.get(), board.data(), board.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  for (const RouteBuffers* route : routes_)
    route->clear();
  check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  *common_.host = {};
  told_abort_ = epoch;
}

void CudaEngine::drain() {
  const DeviceScope scope(device_);
  if (streams_known_) check(cudaStreamSynchronize(last_stream_), "cudaStreamSynchronize");
}

void CudaEngine::reset(std::uint32_t epoch) {
  drain();
  set_back(epoch);
}

std::uint32_t CudaEngine::latest_epoch() const {
  const DeviceScope scope(device_);
  if (streams_known_) check(cudaStreamSynchronize(last_stream_), "cudaStreamSynchronize");
  Board board{};
  check(cudaMemcpy(&board, board_.get(), sizeof(board), cudaMemcpyDeviceToHost), "cudaMemcpy");
  const std::uint32_t dispatch = board.epochs[protocol::kDispatchPhase];
  const std::uint32_t combine = board.epochs[protocol::kCombinePhase];
  return protocol::reached(dispatch, combine) ? dispatch : combine;
}

PeerStatistics CudaEngine::statistics() const {
  return {.waited = std::vector<std::chrono::nanoseconds>(static_cast<std::size_t>(setup_.num_ranks)),
          .num_dispatches = num_dispatches_,
          .num_combines = num_combines_};
}

}  // namespace tokenyard::engine::cuda
