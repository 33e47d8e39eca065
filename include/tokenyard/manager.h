// SPDX-License-Identifier: Apache-2.0
// `All2AllManager`: the layer above communications that an inference engine's MoE layers share. One manager serves one
// expert-parallel group: it makes communications when they are first asked for, gives equal requests the same one, lets
// one grow when a layer needs more, and ends them all together. docs/manager.md says what each backend's manager takes.
//
// Thread rule: every function may be called from any thread of the rank; one re-entrant lock guards the manager, also
// while a call waits for other ranks (so a log sink may call accessors). What comes out keeps its own rule: a
// communication, also one that layers share, is used by one thread at a time, and so are the gather calls' results.
// `destroy`, `cleanup`, `set_num_sms` and a growing `initialize` want no round under way on any thread of the rank.
// Collective calls must be made by all ranks in the same order; each function says when it is one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenyard/backends.h"
#include "tokenyard/communication.h"
#include "tokenyard/error.h"
#include "tokenyard/group.h"
#include "tokenyard/params.h"
#include "tokenyard/tensor.h"

namespace tokenyard {

namespace manager {
struct Entry;
class State;
}  // namespace manager

// Who takes part in the gather calls of `all_gather`; the other managers look at none of it.
struct ParallelGroups {
  std::optional<Group> ep{};   // expert parallel; absent: ManagerOptions::group
  std::optional<Group> dp{};   // data parallel; absent: one rank
  std::optional<Group> pcp{};  // (prefill) context parallel; absent: one rank
  int tp_size = 1;             // ranks of tensor parallelism; dp * pcp * tp is the size of `ep`
  bool use_ep = false;         // experts are parallel
};

// What the seeds read from the environment, as fields with the same defaults. docs/manager.md lists every variable,
// also those that have no meaning here.
struct ManagerKnobs {
  std::int64_t high_throughput_buffer_mebibytes = 1024;  // VLLM_DEEPEP_BUFFER_SIZE_MB
  bool high_throughput_intra_host_only = false;          // VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE
  bool one_sided_low_precision_combine = false;          // VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE
};

// The only function of the library that reads the environment. Throws kInvalidArgument naming a variable whose value
// is no number (or, for a switch, neither 0 nor 1).
[[nodiscard]] ManagerKnobs knobs_from_environment();

struct ManagerOptions {
  // All ranks of the expert-parallel group (data * context * tensor parallel, one pipeline stage).
  Group group;
  // Over which communications are made; absent: `group`. Same rank and size as `group`.
  std::optional<Group> data_group{};
  // Address ("127.0.0.1:29500") of the store where ranks meet that join later. Checked and kept; only `elastic` asks.
  std::string store{};
  ParallelGroups parallel{};
  // What requests leave open: top_k, dtype, dispatch_format and invalid_expert_id; for `all_gather` the room that
  // windows are made with. Numbers may stay 0 where requests give them.
  MoeParams params{};
  // The backend's own config; absent: its default with `knobs`. One given here is taken as it is, without `knobs`.
  std::optional<BackendConfig> config{};
  CommunicationOptions communication{};
  ManagerKnobs knobs{};
};

// Arguments of `get_handle`, named as in the seeds. A manager refuses those that it does not take and names those that
// are missing.
struct HandleRequest {
  std::optional<int> max_num_tokens_per_dp_rank{};
  std::optional<int> token_hidden_size{};
  std::optional<int> num_ep_ranks{};
  std::optional<int> num_global_experts{};
  std::optional<int> num_local_experts{};
  std::optional<int> top_k{};  // absent: ManagerOptions::params.top_k
};

// The capacities of `initialize`, each its own maximum over all layers.
struct InitializeRequest {
  int max_num_tokens = 0;
  int top_k = 0;
  int num_experts = 0;
  int hidden_size = 0;
  DispatchFormat dispatch_format = DispatchFormat::kNone;
  std::int64_t extra_payload_bytes_per_token = 0;
};

// What tells communications of `two_sided` apart.
struct CommunicationSizes {
  int max_num_tokens = 0;
  int top_k = 0;
  int num_experts = 0;
  int hidden_size = 0;

  friend bool operator==(const CommunicationSizes&, const CommunicationSizes&) = default;
};

// What `get_handle` gives; copy it freely. Handles of equal requests are equal. The last copy to go frees the
// communication locally, without waiting for anyone; no manager is needed for that. All ranks have to hold and drop
// their handles alike, for a rank that makes a communication anew waits for the others to do so.
class All2AllHandle final {
 public:
  All2AllHandle() = default;

  [[nodiscard]] bool valid() const { return entry_ != nullptr || state_ != nullptr; }

  // The communication, which lives as long as this handle; for `one_sided` the manager's present one, so ask at each
  // use. Do not destroy it: that is the manager's part. Throws kInvalidState for an empty handle, and what
  // All2AllManager::get_communication throws.
  [[nodiscard]] Communication& get_communication() const;
  // `two_sided`: see All2AllManager::get_communication.
  [[nodiscard]] Communication& get_communication(const CommunicationSizes& sizes) const;

  friend bool operator==(const All2AllHandle&, const All2AllHandle&) = default;

 private:
  friend class manager::State;
  // Shared because layers own the communication together, and because a handle may outlive its manager and must then
  // say so.
  std::shared_ptr<manager::Entry> entry_;
  std::shared_ptr<manager::State> state_;
};

struct GatherOptions {
  bool sequence_parallel = false;  // inputs are split over the whole expert-parallel group
  // Gathered after the others, in order: each [num_tokens, *] of any dtype. A list, also an empty one, is given back as
  // a list.
  std::optional<std::span<const TensorView>> extra_tensors{};
  Stream stream{};
};

// Every rank's rows in rank order. Views, or memory of CommunicationOptions::allocate_output. Views are valid until the
// next dispatch of rows of this width and dtype over the same ranks, or until its combine returns.
struct GatherResult {
  TensorView hidden_states{};
  TensorView topk_weights{};
  TensorView topk_ids{};
  TensorView router_logits{};
  std::optional<std::vector<TensorView>> extra_tensors{};
};

// The tensor-level calls of `all_gather`. Which ranks take part, and how many rows each brings, follows from
// ManagerOptions::parallel and All2AllManager::set_step_num_tokens (docs/manager.md). Every call but
// allocate_combine_input is collective over those ranks. Misuse throws and is announced: ranks that wait for
// this one return kAborted, or throw kPeerFailed when they are making a window.
class GatherCalls final {
 public:
  // hidden_states [num_tokens, row], weights and ids [num_tokens, *] of any dtype: ids are cargo.
  Status dispatch(const TensorView& hidden_states,
                  const TensorView& topk_weights,
                  const TensorView& topk_ids,
                  const GatherOptions& options,
                  GatherResult& result);
  Status dispatch_router_logits(const TensorView& hidden_states,
                                const TensorView& router_logits,
                                const GatherOptions& options,
                                GatherResult& result);
  // [sum of all rows, hidden] of bf16, f16 or f32, summed over ranks: this rank's rows, in fp32 and rank order.
  // `output` becomes memory of the manager, valid until its next combine, or of CommunicationOptions::allocate_output.
  Status combine(const TensorView& hidden_states,
                 TensorView& output,
                 bool sequence_parallel = false,
                 const Stream& stream = {});
  // The same into the caller's [num_tokens, hidden].
  Status combine_into_output(const TensorView& hidden_states,
                             TensorView& output,
                             bool sequence_parallel = false,
                             const Stream& stream = {});
  // Window memory for the next combine's [num_rows, hidden_size], which then copies nothing; valid from this call, also
  // before the dispatch, until the next combine of that width and dtype returns. The same address each time until that
  // window grows. Not defined when ranks bring different numbers of rows, these do not add up to num_rows, or the ranks
  // share no window yet that holds them: bring your own tensor. Not collective (it waits for ranks that still read the
  // last combine's rows; on CUDA the stream of the last call does, so write on that one); never an error before
  // destroy.
  [[nodiscard]] TensorView allocate_combine_input(std::int64_t num_rows,
                                                  std::int64_t hidden_size,
                                                  Dtype dtype,
                                                  bool sequence_parallel = false);

 private:
  friend class manager::State;

  explicit GatherCalls(manager::State& state) : state_(&state) {}

  manager::State* state_;
};

class All2AllManager final {
 public:
  All2AllManager(All2AllManager&&) noexcept;
  All2AllManager& operator=(All2AllManager&&) noexcept;
  All2AllManager(const All2AllManager&) = delete;
  All2AllManager& operator=(const All2AllManager&) = delete;
  // Frees what is local without waiting for anyone. Communications that handles own live on; `one_sided` and
  // `two_sided` handles fail with kDestroyed.
  ~All2AllManager();

  [[nodiscard]] const BackendInfo& backend() const;
  [[nodiscard]] const ManagerOptions& options() const;
  [[nodiscard]] int rank() const;
  [[nodiscard]] int num_ranks() const;
  // Whether not all ranks run on one host, as they said at creation.
  [[nodiscard]] bool spans_hosts() const;
  // Whether there is a communication now.
  [[nodiscard]] bool initialized() const;
  // No collective work; the same answer as tokenyard::probe.
  [[nodiscard]] Support probe() const;

  // Collective when no live handle of an equal request exists. Everything that sizes a window makes requests differ;
  // what may change per call does not. The handle of `one_sided` and `two_sided` is the manager itself, whatever the
  // request says. Throws kInvalidArgument for arguments, kUnsupported where there is no handle (with the reason), and
  // what create_communication throws.
  [[nodiscard]] All2AllHandle get_handle(const HandleRequest& request = {});

  // `one_sided`. Collective when anything is larger than what exists, or top_k or num_experts is another; a request
  // that fits returns at once. Growth replaces the window: handles of its dispatches then fail with kReplaced. Ranks
  // that ask for different sizes all get kMismatch and keep the old window; when making the new one fails, the manager
  // is not initialised.
  void initialize(const InitializeRequest& request);
  // `one_sided`: resolve at each use, for a layer may have grown it. kInvalidState before initialize.
  [[nodiscard]] Communication& get_communication();
  // `two_sided`: collective on first use of these sizes.
  [[nodiscard]] Communication& get_communication(const CommunicationSizes& sizes);
  // `one_sided` and `two_sided`: collective destroy of the communications, after which they can be made again. Does
  // nothing when there are none.
  Status cleanup();

  // Sets min(num_sms, the cap given at creation) on every communication that has a budget, later ones too; it may rise
  // again. Nothing to do for the others. Throws kInvalidArgument below 1.
  void set_num_sms(int num_sms);
  // Blocks of the GPU that a call of a communication uses at most: 0 on the host engine. Nothing: not known yet.
  [[nodiscard]] std::optional<int> max_sms_used() const;

  // Rows that each rank of the calls' group brings in this step, for the gather calls; kept until the next list. An
  // empty list takes it back. Local.
  void set_step_num_tokens(std::span<const std::int64_t> num_tokens);

  // GatherCalls for `all_gather`; null for the others.
  template <class Interface>
  [[nodiscard]] Interface* get() = delete;  // anything else does not compile
  // The same, or kUnsupported with what to use instead.
  [[nodiscard]] GatherCalls& gather_calls();

  // Collective, bounded, idempotent: ends every communication. Whatever is used afterwards, handles too, fails with
  // kDestroyed.
  Status destroy();

 private:
  friend All2AllManager create_all2all_manager(std::string_view, const ManagerOptions&);
  friend class manager::State;
  explicit All2AllManager(std::shared_ptr<manager::State> state);
  std::shared_ptr<manager::State> state_;  // shared with handles
};

template <>
GatherCalls* All2AllManager::get<GatherCalls>();

// Collective over ManagerOptions::group. The name is a backend's, one of vLLM's strings or a class name of the seeds.
// Options that must agree are compared, and the first that differs is named with each rank's value (kMismatch); what is
// wrong on one rank is an error on all.
[[nodiscard]] All2AllManager create_all2all_manager(std::string_view name_or_alias, const ManagerOptions& options);

}  // namespace tokenyard
