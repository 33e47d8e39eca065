// SPDX-License-Identifier: Apache-2.0
// One entry a manager, in the order of the seeds.
#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "tokenyard/error.h"

#include "manager/strategy.h"

namespace tokenyard::manager {
namespace {

constexpr std::array kArguments{
    Argument{"max_num_tokens_per_dp_rank", &HandleRequest::max_num_tokens_per_dp_rank},
    Argument{"token_hidden_size", &HandleRequest::token_hidden_size},
    Argument{"num_ep_ranks", &HandleRequest::num_ep_ranks},
    Argument{"num_global_experts", &HandleRequest::num_global_experts},
    Argument{"num_local_experts", &HandleRequest::num_local_experts},
    Argument{"top_k", &HandleRequest::top_k},
};

void require_equal(std::string_view what, int given, int right, std::string_view because) {
  if (given == right) return;
  throw Error(ErrorCode::kInvalidArgument, std::string(what) + " is " + std::to_string(given) + "; it must be " +
                                               std::to_string(right) + ", " + std::string(because));
}

// Arguments were checked to be there.
Wanted low_latency(const Asked& asked) {
  const HandleRequest& request = asked.request;
  Wanted wanted{.params = asked.params, .config = asked.config};
  wanted.params.max_tokens_per_rank = request.max_num_tokens_per_dp_rank.value_or(0);
  wanted.params.hidden_size = request.token_hidden_size.value_or(0);
  wanted.params.num_experts = request.num_global_experts.value_or(0);
  wanted.params.top_k = request.top_k.value_or(asked.params.top_k);
  if (wanted.params.top_k == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "top_k is not known: give it to get_handle, or set ManagerOptions::params.top_k for all requests");
  }
  require_equal("num_ep_ranks", request.num_ep_ranks.value_or(0), asked.num_ranks, "the size of the manager's group");
  validate(wanted.params);
  require_equal("num_local_experts", request.num_local_experts.value_or(0),
                num_local_experts(wanted.params, asked.rank, asked.num_ranks),
                "this rank's share of num_global_experts = " + std::to_string(wanted.params.num_experts));
  return wanted;
}

Wanted high_throughput(const Asked& asked) {
  return {.params = asked.params, .config = asked.config};
}

// The window is made from bytes alone; shapes are then each call's own.
BackendConfig high_throughput_knobs(const BackendConfig& config, const ManagerKnobs& knobs) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() >> 20;
  const std::int64_t mebibytes = knobs.high_throughput_buffer_mebibytes;
  if (mebibytes < 1 || mebibytes > kMost) {
    throw Error(ErrorCode::kInvalidArgument, "ManagerKnobs::high_throughput_buffer_mebibytes is " +
                                                 std::to_string(mebibytes) + "; it must be in [1, " +
                                                 std::to_string(kMost) + "]");
  }
  HighThroughputConfig own = std::get<HighThroughputConfig>(config);
  own.buffer_bytes = mebibytes << 20;
  own.intra_host_only = knobs.high_throughput_intra_host_only;
  return own;
}

BackendConfig one_sided_knobs(const BackendConfig& config, const ManagerKnobs& knobs) {
  OneSidedConfig own = std::get<OneSidedConfig>(config);
  own.use_low_precision_combine = knobs.one_sided_low_precision_combine;
  return own;
}

constexpr std::array<std::string_view, 5> kLowLatencyRequired{
    "max_num_tokens_per_dp_rank", "token_hidden_size", "num_ep_ranks", "num_global_experts", "num_local_experts"};
constexpr std::array<std::string_view, 1> kTopK{"top_k"};
constexpr std::array<std::string_view, 1> kHighThroughputUnkeyed{"HighThroughputConfig::max_num_sms"};

constexpr std::array kStrategies{
    Strategy{.backend = "all_gather",
             .scheme = Scheme::kGather,
             .no_handle = "it gathers whole tensors; use get<GatherCalls>()"},
    Strategy{.backend = "high_throughput",
             .scheme = Scheme::kShared,
             .refusal = "leave it out: the window is sized by ManagerKnobs::high_throughput_buffer_mebibytes",
             .wanted = high_throughput,
             .unkeyed = kHighThroughputUnkeyed,
             .with_knobs = high_throughput_knobs},
    Strategy{.backend = "low_latency",
             .scheme = Scheme::kShared,
             .required = kLowLatencyRequired,
             .optional = kTopK,
             .wanted = low_latency},
    Strategy{.backend = "one_sided", .scheme = Scheme::kGrowing, .with_knobs = one_sided_knobs},
    Strategy{.backend = "two_sided", .scheme = Scheme::kBySizes},
    Strategy{.backend = "passthrough", .no_handle = "the MoE backend dispatches and combines tokens itself"},
};

bool holds(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

}  // namespace

std::span<const Argument> handle_arguments() {
  return kArguments;
}

std::span<const Strategy> strategies() {
  return kStrategies;
}

const Strategy& strategy_of(const BackendInfo& backend) {
  const auto found = std::ranges::find(kStrategies, backend.name, &Strategy::backend);
  if (found != kStrategies.end()) return *found;
  throw Error(ErrorCode::kUnsupported,
              "`" + std::string(backend.name) + "` has no manager; make its communications with create_communication");
}

void check_arguments(const Strategy& strategy, const HandleRequest& request) {
  const std::string prefix = "get_handle of `" + std::string(strategy.backend) + "` ";
  for (const Argument& argument : kArguments) {
    const bool given = (request.*argument.member).has_value();
    if (given && !holds(strategy.required, argument.name) && !holds(strategy.optional, argument.name)) {
      throw Error(ErrorCode::kInvalidArgument,
                  prefix + "takes no " + std::string(argument.name) + "; " + std::string(strategy.refusal));
    }
    if (!given && holds(strategy.required, argument.name)) {
      throw Error(ErrorCode::kInvalidArgument, prefix + "needs " + std::string(argument.name));
    }
  }
}

}  // namespace tokenyard::manager
