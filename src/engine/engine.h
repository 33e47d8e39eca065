// SPDX-License-Identifier: Apache-2.0
// An engine executes rounds: two verbs, each with a send and a receive half, told what to do by a RoundSpec and plain
// requests whose arguments have been checked. Thread rule: one thread at a time.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "tokenyard/communication.h"

#include "engine/round.h"
#include "engine/shared_queues.h"
#include "fabric/window.h"
#include "protocol/host_device.h"
#include "protocol/layout.h"
#include "protocol/round_spec.h"

namespace tokenyard::engine {

// Everything an engine is made of.
struct Setup {
  int rank = 0;
  int num_ranks = 1;
  MoeParams params{};
  protocol::RoundSpec spec{};
  protocol::WindowLayout layout{};
  std::chrono::milliseconds deadline{};
  std::chrono::milliseconds first_round_deadline{};
  int num_threads = 1;
  std::uint32_t initial_epoch = 0;
  // Transport::kQueue: the queues of the group, which outlive the engine, and this communication's number among those
  // that use them.
  SharedQueues* queues = nullptr;
  std::uint32_t queue_user = 0;
};

// Rows of one payload as the caller gave them.
struct PayloadRows {
  const std::byte* data = nullptr;
  std::int64_t row_bytes = 0;  // 0: not given
  std::int64_t stride = 0;     // bytes
};

// Where the receiver writes the rows of a plane. Row r of block b, a source or an expert, is at `at(b, r)`.
struct OutputPlane {
  std::byte* data = nullptr;      // null: nothing to write; rows are shown where they lie, or not at all
  std::int64_t block_stride = 0;  // bytes; 0 for results without blocks
  std::int64_t row_stride = 0;    // bytes
  std::int64_t row_bytes = 0;     // to write of each row
  Dtype dtype{};                  // i32 or i64 for the ids that routing made i32
  bool own = false;               // the communication's own memory, which nobody else writes to

  TOKENYARD_HD constexpr std::byte* at(std::int64_t block, std::int64_t row) const {
    return data + block * block_stride + row * row_stride;
  }
};

// All that a receive half writes besides the round itself.
struct DispatchOutputs {
  std::array<OutputPlane, protocol::kMaxPlanes> planes{};
  std::int64_t rows_shown = 0;      // without blocks: rows of the result, with the tail of num_worst_tokens
  std::int64_t rows_per_block = 0;  // with blocks
  std::int32_t* stats = nullptr;    // [num_ranks, num_stats]; null: nowhere
  std::int64_t num_stats = 0;
  bool count_experts = false;  // Round::rows_per_expert, from ids that came with the rows
  // By expert, where counts stay on the device: the caller's running statistics there, added to when rows are placed.
  std::int32_t* routes_per_expert = nullptr;  // [num_local_experts]
  std::int64_t* waited = nullptr;             // [num_ranks] nanoseconds
};

inline constexpr std::int64_t kNotGiven = -1;

struct DispatchRequest {
  std::int64_t num_tokens = 0;
  // Of a part of a larger call: the index of its first token there, the call's tokens, and its rows for each rank.
  std::int64_t first_token = 0;
  std::int64_t call_tokens = 0;
  std::span<const std::int32_t> call_rows{};                 // [num_ranks]; empty: this is the whole call
  std::array<PayloadRows, protocol::kMaxPlanes> payloads{};  // the ids plane holds Round::wire_ids when routed
  TensorView topk_ids{};                                     // routed placements; not given on replay
  const Round* replay = nullptr;
  // The sender casts rows of params.dtype; the hidden and scale planes then tell what crosses.
  DispatchCast cast = DispatchCast::kNone;
  Dtype weights_dtype = Dtype::kF32;
  std::span<const std::int32_t> stats{};
  std::uint64_t digest = 0;
  // A value that must agree, and how it is called in the error; not compared where a side has kNotGiven.
  std::int64_t agreed = kNotGiven;
  const char* agreed_name = "";
  std::int64_t row_limit = 0;  // final places: rows to keep
  // Every rank: what each rank brings, as the caller says; `agreed` stands for it. Empty: found out. For the send half.
  std::span<const std::int64_t> num_tokens_per_rank{};
  // Final places: the result has that many rows whatever comes, so the host need not know how many do.
  bool fixed_rows = false;
  std::int64_t tokens_per_rank = 0;
  DispatchOutputs outputs{};  // set before the receive half
  // Both halves run in one call, so an engine may do all of it in the second.
  bool in_one_call = false;
  // CUDA.
  const std::int32_t* num_tokens_on_device = nullptr;
  int num_sms = 0;
  Stream stream{};
};

struct CombineRequest {
  // [rows, hidden] or [num_ranks, tokens_per_rank, hidden]; expert major: [num_local_experts, num_ranks * max_tokens,
  // hidden], or the same rows in two dimensions.
  TensorView expert_output{};
  // [rows, top_k] f32 to bring back; expert major: [num_tokens, top_k] f32 to weigh with; or not given.
  TensorView topk_weights{};
  bool in_one_call = false;
  // The dispatch's rows end with this combine, and the peers have not been told: nothing of them is read any more, or
  // these tensors lie among them.
  bool ends_views = false;
  bool reads_views = false;
  int num_sms = 0;
  Stream stream{};
};

struct CombineTarget {
  TensorView output{};
  std::array<TensorView, 2> bias{};
  TensorView topk_weights{};  // [num_tokens, top_k] f32, or not given
  bool in_one_call = false;
  int num_sms = 0;
  Stream stream{};
};

// Elements of a row of expert output, whether it comes in blocks or not.
[[nodiscard]] inline std::int64_t hidden_of(const TensorView& rows) {
  return rows.shape[static_cast<std::size_t>(rows.num_dims - 1)];
}

// Freed the way it was made.
using Memory = std::unique_ptr<std::byte, std::function<void(std::byte*)>>;

class Engine {
 public:
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  Engine(Engine&&) = delete;
  Engine& operator=(Engine&&) = delete;
  virtual ~Engine() = default;

  // Makes room in a new round, for all that an operation may keep in it.
  virtual void reserve(Round& round) = 0;
  // Memory that tensors of this engine's rounds may be in; never inside a round.
  [[nodiscard]] virtual Memory allocate(std::int64_t bytes) = 0;
  // What the operations that follow move: rows of other sizes in the same sections. Both halves of an operation, on
  // every rank, are called with the same shapes.
  virtual void reshape(const MoeParams& params, const protocol::WindowLayout& layout) = 0;
  // Throw kInvalidState when the window has no place for the rows of the next dispatch, or another operation has the
  // queues that this one needs.
  virtual void check_dispatch() const = 0;
  virtual void check_combine() const = 0;
  // Works out where this rank's tokens go. Local; throws kInvalidArgument for ids that are no experts.
  virtual void plan(const DispatchRequest& request, Round& round) = 0;

  // The same into the round's vectors, which have been reserved; ids of a device are written already.
  virtual void query(const DispatchRequest& request, Round& round) { plan(request, round); }

  // The caller's rows may be reused when it returns. The round then says where its rows will lie and, at final places,
  // how many there are: all that outputs are chosen by. Throws kMismatch when ranks disagree.
  virtual Status dispatch_send(const DispatchRequest& request, Round& round) = 0;
  // Waits for the rows and writes request.outputs.
  virtual Status dispatch_receive(const DispatchRequest& request, Round& round) = 0;
  // What dispatch_receive ends with, for rows that are here already: writes request.outputs.
  virtual void fill(const DispatchRequest& request, Round& round) = 0;
  // Nothing of the round's received rows will be read any more.
  virtual void release(const Round& round) = 0;
  // Both throw kMismatch when ranks disagree.
  virtual Status combine_send(const CombineRequest& request, Round& round) = 0;
  virtual Status combine_receive(const CombineTarget& target, const Round& round) = 0;
  // The receive half of the round's combine will not be called.
  virtual void release_combine(const Round& round) = 0;

  // Takes part in the next dispatch, or in the combine of `round`, by telling the peers that this rank gives it up.
  virtual void abort_dispatch() = 0;
  virtual void abort_combine(const Round& round) = 0;

  // The round ended, with or without a combine, and nothing asks for its route any more.
  virtual void discard(Round& /*round*/) {}

  // CUDA. Blocks of an operation whose request names no number.
  [[nodiscard]] virtual int max_blocks() const { return 0; }

  // The stream of what is told without one, until the next operation.
  virtual void turn_to(const Stream& /*stream*/) {}

  // Whether what goes on the stream is only recorded, for a graph that runs later; whether that is so of the stream of
  // the last operation; whether anything was, so that graphs hold addresses of this engine.
  [[nodiscard]] virtual bool records(const Stream& /*stream*/) const { return false; }

  [[nodiscard]] virtual bool recording() const { return false; }

  [[nodiscard]] virtual bool recorded() const { return false; }

  // Waits until no peer reads this rank's combine section any more, so that it may be written.
  virtual Status acquire_combine_section() = 0;

  // The sticky fault, also one of another communication on the same queues; kOk when there is none.
  [[nodiscard]] virtual Status fault() const = 0;
  // The fault, or what else has happened to an operation that returned before it ran. Throws kMismatch.
  [[nodiscard]] virtual Status poll() = 0;
  // Returns when nothing of this engine runs any more.
  virtual void drain() = 0;
  // Forgets faults and open operations. Between two barriers of the group, with no rank inside an operation; `epoch`
  // is agreed and ahead of every rank's epochs. Queues have been set back before.
  virtual void reset(std::uint32_t epoch) = 0;
  [[nodiscard]] virtual std::uint32_t latest_epoch() const = 0;

  [[nodiscard]] virtual PeerStatistics statistics() const = 0;
};

struct EngineInfo {
  std::string_view name;
  std::string_view description;
  EngineKind kind;
  DeviceKind memory;  // of its windows and tensors
  // What it needs of a window behind the layout, for encodings of its own.
  std::int64_t (*extra_window_bytes)(const MoeParams& params, const protocol::WindowLayout& layout);
  std::unique_ptr<Engine> (*make)(const Setup& setup, fabric::Window& window);
};

// Every engine of this build, in order of preference.
[[nodiscard]] std::span<const EngineInfo> engines();
// Throws kUnsupported when this build has none of that kind; kAutomatic: the first.
[[nodiscard]] const EngineInfo& find_engine(EngineKind kind);

}  // namespace tokenyard::engine
