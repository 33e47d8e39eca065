// SPDX-License-Identifier: Apache-2.0
// What dispatch and combine take and give. Shapes are written [rows, columns]; all views are borrowed.
// Thread rule: plain data and one move-only handle; see communication.h for when they may be used.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tokenyard/tensor.h"

namespace tokenyard {

namespace communication {
class Core;
struct HandlePool;
struct Route;
}  // namespace communication

// cudaStream_t; ignored by the host engine. One that operations ran on lives until an operation has run on another, or
// the communication is destroyed; one that is captured, until the next operation. docs/cuda_graphs.md tells what may be
// captured.
struct Stream {
  void* native = nullptr;
};

// Borrowed until the operation is complete. Rows may be strided (last dimension contiguous). A member that the
// backend's Contract does not use is refused when set.
struct DispatchInput {
  TensorView hidden_states{};        // [num_tokens, row]: params.dtype, or one-byte rows of a quantised format
  TensorView topk_ids{};             // [num_tokens, top_k] i32 or i64; not given on replay
  TensorView topk_weights{};         // [num_tokens, top_k] f32, bf16 or f16
  TensorView hidden_states_scale{};  // [num_tokens, *], row-aligned with hidden_states
  TensorView router_logits{};        // [num_tokens, *]
  TensorView eplb_local_stats{};     // [n] i32, gathered to [num_ranks, n]
  std::span<const TensorView> extra_payloads{};  // each [num_tokens, *] of any dtype, opaque; at most 16
  // CUDA: how many of the tokens there are, in device memory, read when the operation runs; then the tensors' first
  // dimension is the most that it may say. For captured graphs. all_gather: see DispatchOptions::num_tokens_per_rank.
  const std::int32_t* num_tokens_on_device = nullptr;
};

// What the sender turns rows of MoeParams::dtype into: f8e4m3 with a scale for each 128 values (docs/formats.md).
enum class DispatchCast : std::uint8_t {
  kNone,
  kFp8Block128,            // scales f32: largest magnitude / 448
  kFp8Block128PowerOfTwo,  // scales f32: the same, rounded up to a power of two
  kFp8Block128Ue8m0,       // scales e8m0: that power's exponent, four to an aligned 32-bit word
};

class Handle;
struct DispatchResult;

struct DispatchOptions {
  // Use this handle's route again, with new rows and without ids (Contract::handle_use == kReplay). The result gets a
  // handle of its own, for its combine and for further replays.
  const Handle* replay = nullptr;
  // all_gather: rows of each rank, each at most max_tokens_per_rank; checked against what the ranks really send. Empty:
  // taken from the ranks. CUDA: a dispatch that is told waits for nothing on the host and may be captured; one that is
  // not waits there for the other ranks' sizes, bounded by the deadline, and is refused in a capture. With
  // num_tokens_on_device the list has the most that each rank may bring: rows lie at places for that many, counts.*
  // says as much, counts.tokens_per_source_on_device says how many there are, and rows behind them, of the result and
  // of combine's output, are unspecified. Without the list the result has the rows that there are.
  std::span<const std::int64_t> num_tokens_per_rank{};
  // one_sided: tokens_per_rank of the result; own tokens <= it <= max_tokens_per_rank; equal on all ranks.
  std::optional<std::int64_t> runtime_max_tokens_per_rank{};
  // high_throughput: fixed number of result rows; the tail has ids -1 and weights 0. Rows beyond are dropped, counted
  // here and at their origins.
  std::optional<std::int64_t> num_worst_tokens{};
  // high_throughput with HighThroughputConfig::buffer_bytes: the experts that topk_ids count, equal on all ranks; 0:
  // MoeParams::num_experts, or the replayed handle's. Otherwise 0 or MoeParams::num_experts.
  int num_experts = 0;
  int expert_alignment = 1;                 // high_throughput: RowCounts::aligned_rows_per_expert are multiples of it
  int num_sms = 0;                          // 0: SmBudget's where there is one, else all; none on the host engine
  DispatchCast cast = DispatchCast::kNone;  // low_latency; equal on all ranks
  // low_latency: running statistics of the caller, added to by each dispatch. [num_local_experts] i32: routes to each
  // expert (a token that chose it twice counts twice). [num_ranks] i64: nanoseconds waited for each source, on
  // CUDA the longest of the waits that go on side by side. They stop at the largest number of their dtype.
  TensorView routes_per_expert{}, wait_per_source{};
  // The caller's tensors for outputs; a member that is not defined is a view of the window, or comes from
  // CommunicationOptions::allocate_output. A tensor with room for more rows than needed is taken. Too few rows are
  // kOverflow where the number is known only after the exchange, and kInvalidArgument for rank-major results.
  const DispatchResult* into = nullptr;
  Stream stream{};
};

// Counts of one dispatch as this rank sees them. The vectors keep their capacity between rounds. On CUDA, where nothing
// waits for the device (CountsOn::kDevice, or num_worst_tokens), num_rows is -1, the vectors are empty, and the counts
// are on the device.
struct RowCounts {
  std::int64_t num_rows = 0;                    // rows received (compact, every rank), or routed here (rank major)
  std::int64_t tokens_per_rank = 0;             // rank major: rows of each source rank's block
  std::int64_t dropped_rows = 0;                // beyond num_worst_tokens
  std::vector<std::int64_t> rows_per_source;    // [num_ranks], dropped ones too
  std::vector<std::int64_t> tokens_per_source;  // [num_ranks]: tokens each rank dispatched
  // [num_local_experts]: kept rows with at least one route to the expert; an expert chosen twice by a token counts
  // once. Empty where ids are cargo, and on a replay, which carries none.
  std::vector<std::int64_t> rows_per_expert;
  std::vector<std::int64_t> aligned_rows_per_expert;  // rounded up to expert_alignment; 0 stays 0
  // CountsOn::kDevice or num_worst_tokens, and the tokens where num_tokens_on_device was given: [num_ranks] i32, valid
  // until the handle's combine or end; expert major also [num_local_experts] i32.
  TensorView rows_per_source_on_device{}, tokens_per_source_on_device{}, rows_per_expert_on_device{};
};

// What a dispatch returns and its combine consumes. Move-only; it owns the route, never rows. A handle that dies
// unused releases its rows without any collective work. May outlive the communication; using it then throws.
class Handle {
 public:
  Handle() = default;
  Handle(Handle&&) noexcept;
  Handle& operator=(Handle&&) noexcept;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle();

  // Whether a dispatch filled it (it may be used up since).
  [[nodiscard]] bool valid() const { return route_ != nullptr; }

 private:
  friend class communication::Core;
  Handle(std::shared_ptr<communication::HandlePool> pool, communication::Route* route);
  // Shared because a handle may outlive its communication and must then still be safe to destroy.
  std::shared_ptr<communication::HandlePool> pool_;
  communication::Route* route_ = nullptr;
  std::uint64_t turn_ = 0;  // of the route, which another handle gets once this one is used up
};

// Reuse one object for round after round: nothing is then allocated. A handle still in it when the next dispatch
// begins dies first. Views are valid until combine(handle) is issued or the handle dies.
struct DispatchResult {
  TensorView hidden_states{};
  TensorView hidden_states_scale{};
  TensorView topk_ids{};  // in the dtype given; the id for "no expert here" is the contract's
  TensorView topk_weights{};
  TensorView router_logits{};
  TensorView eplb_gathered_stats{};  // [num_ranks, n] i32
  std::vector<TensorView> extra_payloads{};
  // Expert major: [num_local_experts, num_ranks * max_tokens_per_rank] i32, the token index that each row has at its
  // source; and [num_local_experts, num_ranks, 2] i32, {first row, rows} of each source rank. With CountsOn::kDevice in
  // device memory, as RowCounts says; so are the statistics of DispatchOptions then.
  TensorView source_tokens{}, source_ranges{};
  RowCounts counts{};
  Handle handle{};
};

struct CombineInput {
  // One row per row of the dispatch result, in its order and layout (rank major also as [num_ranks *
  // tokens_per_rank, hidden]): bf16, f16 or f32, weighted and reduced over this rank's experts. Each row is rounded
  // once to the wire dtype: MoeParams::dtype, or f8e4m3 with OneSidedConfig::use_low_precision_combine. low_latency
  // instead takes [num_local_experts, num_ranks * max_tokens_per_rank, hidden] as the experts gave it; combine weighs
  // and reduces it over this rank's experts, in k order, before that rounding. Must not overlap the output: with a byte
  // budget parts of it are read after parts of the output were written.
  TensorView expert_output{};
  // high_throughput: [n_recv, top_k] f32 to bring back to their tokens. low_latency: [num_tokens, top_k] f32, the
  // weights of this rank's tokens, unless they were given at dispatch.
  TensorView topk_weights{};
  std::array<TensorView, 2> bias{};  // high_throughput: [num_tokens, hidden] of the output's dtype, added in order
};

struct CombineOptions {
  // Where CombineInput::topk_weights of all ranks come back to: [num_tokens, top_k] f32.
  TensorView topk_weights_output{};
  int num_sms = 0;
  Stream stream{};
};

}  // namespace tokenyard
