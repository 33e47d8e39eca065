// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/cuda_engine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "engine/cuda/compact_engine.h"
#include "engine/cuda/compact_headers.h"
#include "engine/cuda/every_rank_engine.h"
#include "engine/cuda/expert_layout.h"
#include "engine/cuda/expert_major_engine.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/queued_engine.h"
#include "engine/cuda/rank_major_engine.h"
#include "protocol/stamp.h"

namespace tokenyard::engine::cuda {
namespace {

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

struct Capture {
  bool going_on = false;  // also when it has failed and is yet to be ended
  unsigned long long id = 0;
};

Capture capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  Capture capture;
  // The default stream says so by an error when another stream, which it would wait for, is captured; it never is.
  if (cudaStreamGetCaptureInfo(stream, &status, &capture.id) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  capture.going_on = status != cudaStreamCaptureStatusNone;
  return capture;
}

}  // namespace

std::unique_ptr<Engine> make_cuda_engine(const Setup& setup, fabric::Window& window) {
  if (setup.spec.placement == protocol::Placement::kRankMajor) {
    if (setup.spec.transport == protocol::Transport::kQueue) return std::make_unique<QueuedEngine>(setup, window);
    return std::make_unique<RankMajorEngine>(setup, window);
  }
  if (setup.spec.placement == protocol::Placement::kEveryRank) return std::make_unique<EveryRankEngine>(setup, window);
  if (setup.spec.placement == protocol::Placement::kCompact && setup.spec.transport == protocol::Transport::kWindow) {
    return std::make_unique<CompactEngine>(setup, window);
  }
  if (setup.spec.placement == protocol::Placement::kExpertMajor) {
    return std::make_unique<ExpertMajorEngine>(setup, window);
  }
  throw Error(ErrorCode::kUnsupported, "the CUDA engine moves compact rows through windows, and not through queues",
              setup.rank);
}

std::int64_t cuda_extra_window_bytes(const MoeParams& params, const protocol::WindowLayout& layout) {
  if (layout.shape().placement == protocol::Placement::kExpertMajor) {
    return ExpertLayout::of(layout, params.top_k, params.num_experts).bytes();
  }
  return SmallLayout::of(layout).bytes(layout) + CompactHeaders::of(layout, params.num_experts).bytes();
}

CudaEngine::CudaEngine(const Setup& setup, fabric::Window& window)
    : setup_(setup), window_(window), device_(window.device().index) {
  const DeviceScope scope(device_);
  const std::int64_t ranks = setup.num_ranks;
  std::vector<std::byte*> pointers(static_cast<std::size_t>(ranks));
  std::array<std::byte*, kNearRanks> near{};
  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    pointers[static_cast<std::size_t>(rank)] = window.peer(rank);
    if (rank < kNearRanks) near[static_cast<std::size_t>(rank)] = window.peer(rank);
    if (window.peer(rank) != nullptr) continue;
    throw Error(
        ErrorCode::kUnsupported,
        "the CUDA engine needs load/store reach to every rank's window, and has none to rank " + std::to_string(rank),
        setup.rank, rank);
  }
  windows_ = make_device_memory(device_, ranks * static_cast<std::int64_t>(sizeof(std::byte*)));
  copy_now(windows_.get(), pointers.data(), pointers.size() * sizeof(std::byte*), cudaMemcpyHostToDevice);
  const std::int64_t board = protocol::align_up(sizeof(Board), 8);
  const std::int64_t chunks = ranks * setup.layout.max_chunks() + 1;
  board_bytes_ = board + (chunks + ranks) * 4;
  board_ = make_device_memory(device_, board_bytes_);
  host_ = make_pinned_memory(device_, sizeof(HostBoard));
  order_ = make_event(device_);
  common_ = {.rank = setup.rank,
             .num_ranks = setup.num_ranks,
             .board = reinterpret_cast<Board*>(board_.get()),
             .near = near,
             .windows = reinterpret_cast<std::byte* const*>(windows_.get()),
             .host = reinterpret_cast<HostBoard*>(host_.get()),
             .arrivals = reinterpret_cast<std::uint32_t*>(board_.get() + board),
             .owed = reinterpret_cast<std::uint32_t*>(board_.get() + board) + chunks,
             .layout = setup.layout};
  int processors = 1;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device_), "cudaDeviceGetAttribute");
  // All blocks of all ranks on the device are resident: blocks wait for each other.
  max_blocks_ = std::clamp(processors / window.ranks_on_device(), 1, kMaxBlocks);
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_), "cudaDeviceGetAttribute");
  overlaps_ = major >= 9 && window.ranks_on_device() == 1;
  load_notices();
  load_find_culprit();
  tell_life_in({common_.windows, setup.layout.life(0), setup.rank, setup.num_ranks});
  set_back(setup.initial_epoch);
}

CudaEngine::~CudaEngine() {
  // Kernels end by their deadlines; they use what is freed next.
  try {
    const DeviceScope scope(device_);
    synchronize();
  } catch (const Error&) {  // which whoever uses the device hears of
  }
}

void CudaEngine::keep(Round& round, std::unique_ptr<RouteBuffers> buffers) {
  routes_.push_back(buffers.get());
  round.memory = std::move(buffers);
}

int CudaEngine::blocks_for(std::int64_t work, int num_sms) const {
  const int most = num_sms > 0 ? std::min(num_sms, max_blocks_) : max_blocks_;
  return static_cast<int>(std::clamp<std::int64_t>(work, 1, most));
}

Memory CudaEngine::allocate(std::int64_t bytes) {
  DeviceMemory memory = make_device_memory(device_, bytes);
  const FreeDevice free = memory.get_deleter();
  return {memory.release(), [free](std::byte* address) { free(address); }};
}

void CudaEngine::reshape(const MoeParams& params, const protocol::WindowLayout& layout) {
  setup_.params = params;
  setup_.layout = common_.layout = layout;
}

void CudaEngine::check_dispatch() const {}  // at most one operation is in flight, which the caller checks

void CudaEngine::check_combine() const {}

cudaStream_t CudaEngine::enter(const Stream& stream) {
  auto* native = static_cast<cudaStream_t>(stream.native);
  const Capture capture = capture_of(native);
  const auto put_behind = [&](cudaStream_t before) {
    check(cudaEventRecord(order_.get(), before), "cudaEventRecord");
    check(cudaStreamWaitEvent(native, order_.get(), 0), "cudaStreamWaitEvent");
  };
  if (capture.going_on) {
    recorded_ = true;
    // Another branch of the same capture.
    const bool other = has_entered_ && native != last_stream_;
    if (other && capture_of(last_stream_).going_on && capture_of(last_stream_).id == capture.id) {
      put_behind(last_stream_);
    }
  } else {
    if (has_run_ && native != ran_on_) {
      if (capture_of(ran_on_).going_on) {
        throw Error(ErrorCode::kInvalidState,
                    "the stream that this communication last ran on is being captured, so nothing can be ordered "
                    "behind it; end the capture, or stay on that stream",
                    setup_.rank);
      }
      put_behind(ran_on_);
    }
    has_run_ = true;
    ran_on_ = native;
  }
  has_entered_ = true;
  return last_stream_ = told_on_ = native;
}

// At once, and on the stream of the round: a graph that holds a round without a combine is then whole.
void CudaEngine::discard(Round& round) {
  auto* buffers = dynamic_cast<RouteBuffers*>(round.memory.get());
  if (buffers == nullptr || !std::exchange(buffers->in_use, false)) return;
  const DeviceScope scope(device_);
  clear_route(buffers->view(), last_stream());
}

void CudaEngine::clear_route(const RouteMemory& route, cudaStream_t stream) {
  launch_clear(common_, route, stream);
}

void CudaEngine::turn_to(const Stream& stream) {
  told_on_ = static_cast<cudaStream_t>(stream.native);
}

bool CudaEngine::records(const Stream& stream) const {
  const DeviceScope scope(device_);
  return capture_of(static_cast<cudaStream_t>(stream.native)).going_on;
}

bool CudaEngine::recording() const {
  const DeviceScope scope(device_);
  return (has_entered_ && capture_of(last_stream_).going_on) || (has_run_ && capture_of(ran_on_).going_on);
}

// Not the device, for that breaks captures of other threads; the caller waits for its graphs.
void CudaEngine::synchronize() const {
  if (has_run_) check(cudaStreamSynchronize(ran_on_), "cudaStreamSynchronize");
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
  if (notice.kind == NoticeKind::kNone || !fault_.ok()) return fault_;
  if (recording()) return status_of(notice, StatusCode::kTimeout);
  fault_ = blame(notice);
  return fault_;
}

Status CudaEngine::blame(Notice notice) const {
  try {
    const DeviceScope scope(device_);
    const auto grace = std::chrono::nanoseconds(setup_.deadline) / 4;
    launch_find_culprit(life_,
                        {.peer = notice.peer,
                         .phase = notice.phase,
                         .epoch = notice.epoch,
                         .grace_ns = static_cast<std::uint64_t>(grace.count())},
                        &common_.host->culprit, cudaStreamPerThread);
    check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  } catch (const Error&) {
    return status_of(notice, StatusCode::kTimeout);  // on a device in such a state the awaited rank must do
  }
  notice.peer = common_.host->culprit;
  // Whom others accuse blames nobody.
  const bool nobody = notice.peer == kNoCulprit || notice.peer == setup_.rank;
  return status_of(notice, nobody ? StatusCode::kAborted : StatusCode::kTimeout);
}

Status CudaEngine::poll() {
  const Status status = fault();
  if (!status.ok()) return status;
  const Notice notice = read_notice(common_.host->aborted);
  const std::uint64_t operation = static_cast<std::uint64_t>(notice.phase) << 32 | notice.epoch;
  if (notice.kind == NoticeKind::kNone || operation == told_) return {};
  told_ = operation;
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
  copy_now(window_.own(), control.data(), control.size(), cudaMemcpyHostToDevice);
  std::vector<std::byte> board(static_cast<std::size_t>(board_bytes_));
  const auto nanoseconds = [](auto duration) {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(duration).count());
  };
  Board start{.epochs = {epoch, epoch, epoch},
              .rows_released = epoch,
              .initial_epoch = setup_.initial_epoch,
              .deadline_ns = nanoseconds(setup_.deadline),
              .first_deadline_ns = nanoseconds(setup_.first_round_deadline)};
  for (auto& of_phase : start.block_epochs)
    of_phase.fill(epoch);
  std::memcpy(board.data(), &start, sizeof(start));
  std::vector<std::uint32_t> owed(static_cast<std::size_t>(setup_.num_ranks), epoch);
  const auto at = reinterpret_cast<const std::byte*>(common_.owed) - board_.get();
  std::memcpy(board.data() + at, owed.data(), owed.size() * sizeof(std::uint32_t));
  copy_now(board_.get(), board.data(), board.size(), cudaMemcpyHostToDevice);
  for (const RouteBuffers* route : routes_)
    route->clear();
  invalid_ids_before_ = num_invalid_ids();
  *common_.host = {};
  fault_ = {};
  told_ = 0;
}

void CudaEngine::drain() {
  const DeviceScope scope(device_);
  synchronize();
}

void CudaEngine::reset(std::uint32_t epoch) {
  drain();
  set_back(epoch);
}

std::uint32_t CudaEngine::latest_epoch() const {
  const DeviceScope scope(device_);
  synchronize();
  Board board{};
  copy_now(&board, board_.get(), sizeof(board), cudaMemcpyDeviceToHost);
  const std::uint32_t dispatch = board.epochs[protocol::kDispatchPhase];
  const std::uint32_t combine = board.epochs[protocol::kCombinePhase];
  return protocol::reached(dispatch, combine) ? dispatch : combine;
}

// The device may store the count at any time.
std::int64_t CudaEngine::num_invalid_ids() const {
  const std::atomic_ref<std::uint64_t> word(common_.host->invalid_ids);
  return invalid_ids_before_ + static_cast<std::int64_t>(word.load(std::memory_order_relaxed));
}

PeerStatistics CudaEngine::statistics() const {
  return {.waited = std::vector<std::chrono::nanoseconds>(static_cast<std::size_t>(setup_.num_ranks)),
          .num_dispatches = num_dispatches_,
          .num_combines = num_combines_,
          .num_invalid_ids = num_invalid_ids()};
}

}  // namespace tokenyard::engine::cuda
