// SPDX-License-Identifier: Apache-2.0
// `Communication`: the one class that moves tokens, whatever the backend.
//
//   dispatch  sends each token of this rank to the ranks that own its experts and gives this rank the rows that other
//             ranks (and itself) sent here;
//   combine   takes one row per received row, already run through this rank's experts, and returns each token's sum
//             over ranks to where the token came from.
//
// Sums are fp32 and in rank order: each rank's row is rounded once to the wire dtype, products and sums round
// separately, then come biases, then one rounding to the output's dtype. So results are bitwise repeatable.
//
// Thread rule: one thread at a time per communication, its handles and results. Different communications, also of
// one group, are independent, but for those of one group where Contract::takes_turns. A round allocates nothing and
// makes no system call besides waiting; with a byte budget only once a few calls as large were made.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "tokenyard/backends.h"
#include "tokenyard/dispatch.h"
#include "tokenyard/error.h"
#include "tokenyard/group.h"
#include "tokenyard/params.h"
#include "tokenyard/tensor.h"

namespace tokenyard {

namespace communication {
class Core;
}  // namespace communication

// kAutomatic is the host engine. kCuda takes tensors in the memory of one device and works on the caller's streams:
// every operation returns kEnqueued, and what goes wrong later, also what is thrown on the host, is found by
// `Communication::poll` and by the next call. All ranks call `dispatch` and `combine`, or all their halves, for the
// same operation. Ids that are no experts are dropped, and counted (PeerStatistics). A rank's communications run in one
// order, the same on all ranks that share a device, or side by side with num_sms that fit the device together.
// docs/cuda_graphs.md tells of streams and what may be captured. A fault names who holds up all, as far as ranks tell
// each other: the call that first sees it asks the peers, for a quarter of the deadline at most. So far
// `high_throughput` has no byte budget; it waits for counts on the host, once and not for the rows, unless
// num_worst_tokens is given, and only such rounds of it may be captured.
enum class EngineKind : std::uint8_t { kAutomatic, kHost, kCuda };

enum class LogLevel : std::uint8_t { kDebug, kInfo };

struct CommunicationOptions {
  EngineKind engine = EngineKind::kAutomatic;  // the same on all ranks
  int device = 0;                              // kCuda: this rank's device, as the CUDA runtime counts
  // kCuda: windows in pinned host memory that all devices map, for devices without peer access to each other, which
  // creation otherwise refuses. Rows then cross PCIe, a tenth of NVLink's rate at best. Equal on all ranks.
  bool allow_mapped_host = false;
  // Every wait is bounded by this; a peer that shows signs of life gets at most twice as long.
  std::chrono::milliseconds deadline{30'000};
  // The deadline of the first operation of each phase, when peers may still be loading or compiling.
  std::chrono::milliseconds first_round_deadline{300'000};
  int num_threads = 1;  // threads per rank that copy and sum; results do not depend on it
  // Memory for outputs that are neither in DispatchOptions::into nor a view of the window (compact and every-rank
  // layouts). When set, such outputs are owned: the library never frees them. Called with bytes > 0.
  std::function<void*(std::int64_t bytes, Device device)> allocate_output{};
  // Called on the creating thread, or inside the call it reports. Debug: sizes and arguments; info: rank, ranks,
  // hidden size, window bytes at creation.
  std::function<void(LogLevel, std::string_view)> log{};
  // The number before the first operation's epoch; equal on all ranks. For tests of wrap-around.
  std::uint32_t initial_epoch = 0;
};

struct Layout {                                         // of `RouteQuery::layout`, valid until the next call
  std::span<const std::int32_t> num_tokens_per_rank;    // [num_ranks]
  std::span<const std::int32_t> num_tokens_per_expert;  // [num_experts], rows (duplicates count once)
  TensorView is_token_in_rank;                          // [num_tokens, num_ranks] u8, 0 or 1
};

// Interfaces that only some backends have; `Communication::get` returns null for the others.

// The two halves of each phase. The send half returns when this rank's input may be reused. With a byte budget and more
// than one sub-round, dispatch_send does all of the exchange, and combine_send is kUnsupported on every rank: combine
// such a handle with Communication::combine.
class SplitPhases final {
 public:
  Status dispatch_send(const DispatchInput& input, const DispatchOptions& options, DispatchResult& result);
  // Looks at `into` and at the statistics only; the rest is as the send half was told. May be repeated with other
  // `into` tensors after kOverflow.
  Status dispatch_receive(const DispatchOptions& options, DispatchResult& result);
  Status combine_send(Handle& handle, const CombineInput& input, const CombineOptions& options);
  Status combine_receive(Handle& handle, TensorView& output);

 private:
  friend class communication::Core;

  explicit SplitPhases(communication::Core& core) : core_(&core) {}

  communication::Core* core_;
};

// What a dispatch of these ids would send where. Local, no communication. CUDA: backends with counts on the host have
// it; ids are copied from the device, so they have been written when it is called.
class RouteQuery final {
 public:
  // `num_experts` as in DispatchOptions.
  Layout layout(const TensorView& topk_ids, int num_experts = 0);

 private:
  friend class communication::Core;

  explicit RouteQuery(communication::Core& core) : core_(&core) {}

  communication::Core* core_;
};

// The share of a GPU that operations use which say no num_sms of their own.
class SmBudget final {
 public:
  // Sets min(n, the cap given at creation); may rise again. Throws kInvalidArgument for n < 1.
  void set_num_sms(int num_sms);

  [[nodiscard]] int num_sms() const { return num_sms_; }

  // Blocks of the GPU that such an operation uses at most; the host engine uses none.
  [[nodiscard]] int max_sms_used() const { return num_sms_ < most_ ? num_sms_ : most_; }

 private:
  friend class communication::Core;

  SmBudget(int cap, int most) : cap_(cap), num_sms_(cap), most_(most) {}

  int cap_;
  int num_sms_;
  int most_;
};

// Growth of a communication that several layers share.
class Growth final {
 public:
  // Collective when anything grows: makes room for `params` and `extra_payload_bytes_per_token` besides what fits
  // already; tokens, combine row and dispatch bytes are each their own maximum. A request within all three returns
  // without collective work, so a rank whose request differs from such a one waits for the group's deadline. The dtype
  // stays. Old handles then fail with kReplaced. Throws on every rank at once, with the old window
  // kept: kMismatch when ranks ask for different sizes; what is wrong with one rank's arguments, or kInvalidState when
  // it has an operation open, on that rank and as kPeerFailed on the others. When making the new window fails, nothing
  // is left but to destroy the communication.
  void reserve(const MoeParams& params, std::int64_t extra_payload_bytes_per_token);

 private:
  friend class communication::Core;

  explicit Growth(communication::Core& core) : core_(&core) {}

  communication::Core* core_;
};

// Waiting as this rank has seen it; names the straggler before it is a fault. With a byte budget each sub-round counts.
struct PeerStatistics {
  std::vector<std::chrono::nanoseconds> waited;  // [num_ranks], since creation
  std::int64_t num_dispatches = 0;
  std::int64_t num_combines = 0;
  // CUDA: ids that name no expert and are neither -1 nor MoeParams::invalid_expert_id, whose picks were dropped; of
  // dispatches that have run. The host engine refuses them instead.
  std::int64_t num_invalid_ids = 0;
};

class Communication final {
 public:
  Communication(Communication&&) noexcept;
  Communication& operator=(Communication&&) noexcept;
  Communication(const Communication&) = delete;
  Communication& operator=(const Communication&) = delete;
  // Frees what is local without waiting for anyone; `destroy` is the polite, collective way.
  ~Communication();

  [[nodiscard]] const BackendInfo& backend() const;
  // The backend's, as this communication's engine keeps it: on CUDA the counts of a capturable round stay on the
  // device.
  [[nodiscard]] const Contract& contract() const;
  [[nodiscard]] const MoeParams& params() const;
  [[nodiscard]] const BackendConfig& config() const;
  [[nodiscard]] int rank() const;
  [[nodiscard]] int num_ranks() const;
  // Of this rank; `two_sided`: with the queues that it shares with others of the group.
  [[nodiscard]] std::int64_t window_bytes() const;
  // CUDA: blocks of an operation that is given no num_sms; 0 on the host engine.
  [[nodiscard]] int max_sms() const;
  // CUDA: whether an operation was captured. A graph may then hold the window's addresses, so it cannot grow any more.
  [[nodiscard]] bool captured() const;

  // Collective and blocking. Bad arguments throw on this rank and make every other rank's dispatch return kAborted
  // naming it; the next dispatch works. kMismatch is thrown on every rank alike.
  Status dispatch(const DispatchInput& input, const DispatchOptions& options, DispatchResult& result);

  // Blocking; waits only for ranks that owe rows. `output` is [num_tokens, hidden] of the caller; bf16, f16 or f32.
  // The handle is used up unless the contract says kReplay. A combine that throws or returns kAborted ends the round.
  Status combine(Handle& handle, const CombineInput& input, const CombineOptions& options, TensorView& output);

  // Memory to write expert output into, in the shape that combine takes: of the window, so that combine copies nothing,
  // or for low_latency ordinary memory. Not defined when there is none (Contract::gives_combine_input, another open
  // handle holds it or is between the halves of its combine, dtype is not of this communication's width, all_gather
  // with unequal sizes, or, with a byte budget, several sub-rounds or rows of u8): bring your own tensor. Valid until
  // the handle's combine returns.
  [[nodiscard]] TensorView combine_input(const Handle& handle, Dtype dtype);
  // all_gather, where rows lie in rank order whatever a dispatch brings: the same memory, [num_rows, hidden_size], also
  // before the dispatch. Valid until the next combine returns. Waits for ranks that still read the last combine's rows
  // (CUDA: the stream of the last operation does); not defined while that combine is between its halves here.
  [[nodiscard]] TensorView combine_input(std::int64_t num_rows, Dtype dtype);

  // The sticky fault, or kOk; where Contract::takes_turns, also another communication's. CUDA: of what has run so far;
  // once also kAborted, and kMismatch as an Error, for an operation that ended so; missing_rows of the combines that
  // ended since it was last asked. Never blocks.
  Status poll() const;
  // Collective, bounded: forgets a sticky fault and every open operation; where Contract::takes_turns, halves that
  // other communications have yet to receive end kAborted.
  Status reset();
  // Collective, bounded, idempotent: waits until no rank needs this rank's window, then frees it.
  Status destroy();

  [[nodiscard]] PeerStatistics statistics() const;

  // SplitPhases, RouteQuery, SmBudget, Growth; null where the backend has none.
  template <class Interface>
  [[nodiscard]] Interface* get() = delete;  // anything else does not compile

 private:
  friend Communication create_communication(const Group&,
                                            const MoeParams&,
                                            const BackendConfig&,
                                            const CommunicationOptions&);
  explicit Communication(std::unique_ptr<communication::Core> core);
  std::unique_ptr<communication::Core> core_;
};

template <>
SplitPhases* Communication::get<SplitPhases>();
template <>
RouteQuery* Communication::get<RouteQuery>();
template <>
SmBudget* Communication::get<SmBudget>();
template <>
Growth* Communication::get<Growth>();

// Collective over the group, same order on all ranks. Compares params and config first and names the first field that
// differs with each rank's value (kMismatch); returns when every window is mapped and zeroed. When one rank fails
// (memory, say), all throw with that rank's reason.
[[nodiscard]] Communication create_communication(const Group& group,
                                                 const MoeParams& params,
                                                 const BackendConfig& config,
                                                 const CommunicationOptions& options = {});
// The backend by name or alias, with its default config.
[[nodiscard]] Communication create_communication(const Group& group,
                                                 const MoeParams& params,
                                                 std::string_view backend,
                                                 const CommunicationOptions& options = {});

}  // namespace tokenyard
