// SPDX-License-Identifier: Apache-2.0
// The backends: what each promises (`Contract`, plain data), what each can be told (`...Config`), and the list.
// Everything here is pure and safe from any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "tokenyard/params.h"

namespace tokenyard {

enum class OutputLayout : std::uint8_t {
  kNone,       // nothing is moved
  kEveryRank,  // [sum of tokens, ...]: every rank's rows in rank order
  kCompact,    // [n_recv, ...]: one row per (token, rank), ordered by (source rank, token)
  kRankMajor,  // [num_ranks, tokens_per_rank, ...]: row = token index of the source rank
  // [num_local_experts, num_ranks * max_tokens_per_rank, ...]: an expert's rows from 0 on, by (source rank, token)
  kExpertMajor,
};
enum class IdSpace : std::uint8_t {
  kCargo,   // ids travel like any payload and are not looked at
  kGlobal,  // ids as dispatched; unused rows carry the invalid id
  kLocal,   // this rank's experts count from 0; -1 for other ranks' experts
};
enum class WeightRule : std::uint8_t { kNone, kCaller, kCombine };  // who multiplies by topk_weights
enum class Reduction : std::uint8_t { kNone, kSumOverRanks };
enum class HandleUse : std::uint8_t { kNone, kOnce, kReplay };
enum class Ownership : std::uint8_t { kNone, kView, kViewOrOwned };
enum class CountsOn : std::uint8_t { kNone, kHost, kDevice };

[[nodiscard]] std::string_view name(OutputLayout value);
[[nodiscard]] std::string_view name(IdSpace value);
[[nodiscard]] std::string_view name(WeightRule value);
[[nodiscard]] std::string_view name(Reduction value);
[[nodiscard]] std::string_view name(HandleUse value);
[[nodiscard]] std::string_view name(Ownership value);
[[nodiscard]] std::string_view name(CountsOn value);

// What a backend takes, gives and promises. A DispatchInput member that the contract does not use is refused.
struct Contract {
  OutputLayout output_layout = OutputLayout::kNone;
  IdSpace id_space = IdSpace::kCargo;
  // The id that marks "not an expert here" in the result; -1, or MoeParams::invalid_expert_id for kGlobal.
  bool invalid_id_configurable = false;
  WeightRule weights_applied_by = WeightRule::kNone;
  Reduction combine_reduces = Reduction::kNone;
  CountsOn counts_on = CountsOn::kNone;
  HandleUse handle_use = HandleUse::kNone;
  Ownership output_ownership = Ownership::kNone;
  int max_in_flight = 0;    // operations whose output may be a live view at once
  bool capturable = false;  // without conditions; all_gather is when told the sizes (num_tokens_per_rank)
  int num_experts_multiple_of = 1;
  bool takes_topk_ids = false;
  bool topk_ids_required = false;
  bool takes_router_logits = false;
  bool takes_extra_payloads = false;
  bool takes_eplb_stats = false;
  bool takes_runtime_max_tokens = false;
  bool takes_num_worst_tokens = false;
  bool takes_num_tokens_per_rank = false;
  bool takes_expert_alignment = false;
  bool takes_bias = false;
  bool returns_weights = false;
  bool gives_combine_input = false;       // Communication::combine_input
  bool takes_cast = false;                // DispatchOptions::cast
  bool takes_receive_statistics = false;  // DispatchOptions::{routes_per_expert, wait_per_source}
  // Growth and per-call rows narrower than MoeParams::hidden_size.
  bool grows = false;
  // Communications of one group share their queues: while one is between the halves of a dispatch or combine, the
  // others' are refused. Not on GPUs (Communication::contract says so).
  bool takes_turns = false;
};

// What `AgRsAll2AllManager` does: all-gather, reduce-scatter.
struct AllGatherConfig {
  // Room for DispatchInput::extra_payloads, summed over the tensors of one call.
  std::int64_t extra_payload_bytes_per_token = 1024;
};

// What `DeepEPHTAll2AllManager` does: compact rows, cached handles.
struct HighThroughputConfig {
  int max_num_sms = 20;  // cap of set_num_sms
  // Bytes of the window; 0: sized by MoeParams. With a budget, MoeParams may be left as they are: each call brings its
  // own num_experts, and its tensors the rest (docs/design/0004-byte-budget.md). Looked at are only `dtype`, in which
  // rows of combine cross when dispatch had quantised ones, `invalid_expert_id`, and `num_experts`, for calls that say
  // none; all must be equal on every rank. A call with more tokens than the window has room for goes through it in
  // sub-rounds, with the same result.
  std::int64_t buffer_bytes = 0;
  bool intra_host_only = false;  // creation refuses groups with ranks on several hosts
};

// What `DeepEPLLAll2AllManager` does: expert-major rows, cast on the way, weighted by combine.
struct LowLatencyConfig {
  // Rows of combine cross as 10-bit logarithms, 160 + 8 bytes for 128 values (docs/formats.md: within 2.25 % of each
  // value, or within 2^-32 of the largest of its 128) instead of the dtype of MoeParams.
  bool use_logarithmic_combine = false;
};

// What `FlashInferNVLinkOneSidedManager` does: rank-major rows for a list of payloads.
struct OneSidedConfig {
  std::int64_t extra_payload_bytes_per_token = 0;
  // Entries of DispatchInput::eplb_local_stats; 0: none are taken.
  int eplb_stats_num_experts = 0;
  // Rows of combine cross as f8e4m3 (plain cast, saturating) instead of the expert output's dtype.
  bool use_low_precision_combine = false;
};

// What `FlashInferNVLinkTwoSidedManager` does: rank-major rows through windows whose size does not depend on tokens.
//
// All such communications of a group share one window of queues per rank and take turns, in the same order on all
// ranks. While one has sent a dispatch or combine and not received it, the others' throw kInvalidState, as does a call
// of another thread inside the queues; a round that is open between its phases holds nobody up. Ranks whose orders
// differ get kMismatch, or a fault by the deadline. A fault in one is reported by all, each until its own `reset()`;
// any `reset()` empties the queues, so what another had between two halves ends kAborted: reset each that has an open
// half on any rank. The death of a handle, creation, `destroy` and `poll` are calls of a communication too, so threads
// that use several of one group take turns with these as well. Between the halves of an operation do nothing that waits
// for peers: their send halves may need this rank's receive half to make room.
//
// On GPUs each communication has queues of its own, and nobody takes turns: when an operation runs is up to streams and
// graphs there.
struct TwoSidedConfig {
  // Bytes of the queue from one rank to another in each phase, at least two rows. 0: 256 KiB on the host and 4 MiB on
  // GPUs, or four rows where these are more. A communication shares the group's queues when they hold as much and every
  // rank still has them; otherwise all ranks make new ones, for it and those to come. So make the one with the largest
  // queues first.
  std::int64_t queue_bytes_per_peer = 0;
};

// What `PassThroughAll2AllManager` does: nothing; creation is an error that says why.
struct PassthroughConfig {};

using BackendConfig = std::
    variant<AllGatherConfig, HighThroughputConfig, LowLatencyConfig, OneSidedConfig, TwoSidedConfig, PassthroughConfig>;

struct Support {
  enum class State : std::uint8_t { kUsable, kUnusable, kUndetermined };
  State state = State::kUsable;
  std::string reason;  // empty when usable
};

struct BackendInfo {
  std::string_view name;
  std::string_view seed_class;                // the class of the seed pages; accepted as an alias
  std::span<const std::string_view> aliases;  // the strings that vLLM uses
  std::string_view use_when;                  // one clause for tables
  Contract contract;
  BackendConfig default_config;
  // False for a backend that leaves dispatch and combine to others; creating it throws with the reason.
  bool moves_tokens = true;
  std::string_view unusable_reason;
};

// Every backend of this build, in the order of docs/contracts.md.
[[nodiscard]] std::span<const BackendInfo> backends();

// By name, alias or seed class. Throws kInvalidArgument listing the names; the seed's base class is refused with the
// reason that it is no backend.
[[nodiscard]] const BackendInfo& find_backend(std::string_view name_or_alias);
[[nodiscard]] const BackendInfo& find_backend(const BackendConfig& config);

// Whether the backend works on this machine. No collective work.
[[nodiscard]] Support probe(const BackendInfo& backend);

// The one capacity function: bytes of the window that each rank provides, in host memory; `Communication::window_bytes`
// says it of a GPU's. `two_sided`: with the queues, which all communications of a group have once, or on GPUs each.
// Throws as `validate` does, and kInvalidArgument for sizes beyond kMaxTensorBytes and where a byte budget is too small
// for any call.
[[nodiscard]] std::int64_t window_bytes(const MoeParams& params, const BackendConfig& config, int num_ranks);
// Bytes of the largest dispatch output (all payloads) of one rank.
[[nodiscard]] std::int64_t output_bytes(const MoeParams& params, const BackendConfig& config, int num_ranks);

}  // namespace tokenyard
