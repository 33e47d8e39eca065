// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "tokenyard/error.h"

#include "communication/arguments.h"
#include "protocol/block_cast.h"
#include "protocol/digest.h"

namespace tokenyard::communication {
namespace {

[[noreturn]] void refuse(ErrorCode code, const std::string& message) {
  throw Error(code, message);
}

[[noreturn]] void refuse(const std::string& message) {
  refuse(ErrorCode::kInvalidArgument, message);
}

std::string quoted(const Limits& limits) {
  return std::string("`").append(limits.backend->info.name).append("`");
}

void refuse_unless(bool taken, bool given, const Limits& limits, std::string_view what) {
  if (given && !taken) refuse(quoted(limits) + " takes no " + std::string(what) + "; leave it out");
}

void add_payload(const Limits& limits, Route& route, int plane, const TensorView& tensor, std::string_view what) {
  if (!tensor.defined()) return;
  check_rows(limits, tensor, what, route.request.num_tokens);
  if (tensor.num_dims > 3) refuse(std::string(what) + " is " + tensor.describe() + "; at most 3 dimensions travel");
  const auto at = static_cast<std::size_t>(plane);
  route.request.payloads[at] = {static_cast<const std::byte*>(tensor.data), tensor.row_bytes(),
                                tensor.row_stride_bytes()};
  PayloadKind& kind = route.kinds[at];
  kind.dtype = tensor.dtype;
  kind.num_inner = tensor.num_dims - 1;
  for (int i = 0; i < kind.num_inner; ++i) {
    kind.inner[static_cast<std::size_t>(i)] = tensor.shape[static_cast<std::size_t>(i) + 1];
  }
}

void check_hidden_states(const Limits& limits, const DispatchInput& input) {
  const TensorView& rows = input.hidden_states;
  if (!rows.defined()) refuse("hidden_states is not given");
  if (rows.num_dims != 2) refuse("hidden_states is " + rows.describe() + "; it must be [num_tokens, row]");
  if (rows.shape[0] > limits.params.max_tokens_per_rank) {
    refuse(ErrorCode::kCapacity, "hidden_states has " + std::to_string(rows.shape[0]) +
                                     " tokens and max_tokens_per_rank is " +
                                     std::to_string(limits.params.max_tokens_per_rank));
  }
  const bool narrower = limits.backend->info.contract.grows;
  const auto check_width = [&](std::int64_t right, std::string_view unit) {
    const std::int64_t width = rows.shape[1];
    if (width == right || (narrower && width > 0 && width < right)) return;
    refuse("hidden_states is " + rows.describe() + "; rows of " + std::to_string(right) + " " + std::string(unit) +
           (narrower ? " at most" : "") + " are expected");
  };
  if (rows.dtype == limits.params.dtype) {
    check_width(limits.params.hidden_size, "elements");
  } else if (!protocol::is_quantised(rows.dtype)) {
    refuse("hidden_states is " + rows.describe() + "; its dtype must be " + std::string(name(limits.params.dtype)) +
           ", or f8e4m3, f8e5m2 or u8 for quantised rows");
  } else if (limits.params.dispatch_format != DispatchFormat::kNone) {
    check_width(value_bytes_per_token(limits.params),
                "bytes (" + std::string(name(limits.params.dispatch_format)) + ")");
    if (!narrower && scale_bytes_per_token(limits.params) > 0 && !input.hidden_states_scale.defined()) {
      refuse("hidden_states_scale is not given and " + std::string(name(limits.params.dispatch_format)) +
             " rows have " + std::to_string(scale_bytes_per_token(limits.params)) + " bytes of scales");
    }
  }
}

void check_scale(const Limits& limits, const DispatchInput& input) {
  const TensorView& scale = input.hidden_states_scale;
  if (!scale.defined()) return;
  if (scale.num_dims != 2) refuse("hidden_states_scale is " + scale.describe() + "; it must be [num_tokens, *]");
  const std::int64_t right = scale_bytes_per_token(limits.params);
  const bool exact =
      protocol::is_quantised(input.hidden_states.dtype) && right > 0 && !limits.backend->info.contract.grows;
  if (exact && scale.row_bytes() != right) {
    refuse("hidden_states_scale is " + scale.describe() + ", " + std::to_string(scale.row_bytes()) + " bytes a row; " +
           std::string(name(limits.params.dispatch_format)) + " rows of hidden_size " +
           std::to_string(limits.params.hidden_size) + " have " + std::to_string(right));
  }
}

void check_routing(const Limits& limits, const DispatchInput& input, bool replay) {
  const Contract& contract = limits.backend->info.contract;
  const auto check_shape = [&](const TensorView& tensor, std::string_view what) {
    if (!tensor.defined()) return;
    if (tensor.num_dims != 2 || tensor.shape[1] != limits.params.top_k) {
      refuse(std::string(what) + " is " + tensor.describe() +
             "; it must be [num_tokens, top_k = " + std::to_string(limits.params.top_k) + "]");
    }
  };
  check_shape(input.topk_ids, "topk_ids");
  check_shape(input.topk_weights, "topk_weights");
  if (input.topk_ids.defined() && input.topk_ids.dtype != Dtype::kI32 && input.topk_ids.dtype != Dtype::kI64) {
    refuse("topk_ids is " + input.topk_ids.describe() + "; its dtype must be i32 or i64");
  }
  if (input.topk_weights.defined() && !protocol::is_wide_float(input.topk_weights.dtype)) {
    refuse("topk_weights is " + input.topk_weights.describe() + "; its dtype must be f32, bf16 or f16");
  }
  if (replay && (input.topk_ids.defined() || input.topk_weights.defined())) {
    refuse("a replay takes its route from the handle; leave topk_ids and topk_weights out");
  }
  if (!replay && contract.topk_ids_required && !input.topk_ids.defined()) refuse("topk_ids is not given");
}

void check_extras(const DispatchInput& input) {
  const auto count = static_cast<std::int64_t>(input.extra_payloads.size());
  if (count > protocol::kMaxExtraPayloads) {
    refuse(std::to_string(count) + " extra payloads; at most " + std::to_string(protocol::kMaxExtraPayloads) +
           " travel with one dispatch");
  }
  for (const TensorView& extra : input.extra_payloads) {
    if (!extra.defined()) refuse("an extra payload is not given; leave it out of the list");
  }
}

// Values, scales and extras of one row against what the communication was made for. Where it grows, rows and extras
// share their room.
void check_capacity(const Limits& limits, const DispatchInput& input) {
  if (limits.plan.shape.budget_bytes > 0) return;  // the window was laid out for these rows
  const std::int64_t row = input.hidden_states.row_bytes() + input.hidden_states_scale.row_bytes();
  const std::int64_t row_room = dispatch_bytes_per_token(limits.params);
  const std::int64_t extra_room = limits.plan.shape.extra_capacity;
  std::int64_t extra = 0;
  for (const TensorView& tensor : input.extra_payloads)
    extra += tensor.row_bytes();
  const bool fits = limits.backend->info.contract.grows ? row + extra <= row_room + extra_room
                                                        : row <= row_room && extra <= extra_room;
  if (fits) return;
  refuse(ErrorCode::kCapacity, "a dispatched row takes " + std::to_string(row) + " bytes with its scales and " +
                                   std::to_string(extra) + " bytes of extra payloads; there is room for " +
                                   std::to_string(row_room) + " (hidden_size, dtype and dispatch_format) and " +
                                   std::to_string(extra_room) + " (extra_payload_bytes_per_token)");
}

void check_logits(const Limits& limits, const DispatchInput& input) {
  const TensorView& logits = input.router_logits;
  if (!logits.defined()) return;
  const std::int64_t most = static_cast<std::int64_t>(limits.params.num_experts) * 4;
  if (logits.num_dims == 2 && logits.row_bytes() <= most) return;
  refuse("router_logits is " + logits.describe() + "; it must be [num_tokens, *] with at most " + std::to_string(most) +
         " bytes a row (an f32 for each expert)");
}

void check_stats(const Limits& limits, const DispatchInput& input) {
  const TensorView& stats = input.eplb_local_stats;
  if (!stats.defined()) return;
  const std::int64_t room = limits.plan.shape.stats_entries;
  if (stats.num_dims != 1 || stats.dtype != Dtype::kI32 || !stats.contiguous()) {
    refuse("eplb_local_stats is " + stats.describe() + "; it must be a contiguous i32[n]");
  }
  if (stats.shape[0] > room) {
    refuse(ErrorCode::kCapacity, "eplb_local_stats has " + std::to_string(stats.shape[0]) +
                                     " entries and eplb_stats_num_experts is " + std::to_string(room));
  }
  if (limits.plan.stats_cover_all && stats.shape[0] != room) {
    refuse("eplb_local_stats has " + std::to_string(stats.shape[0]) + " entries; " + quoted(limits) +
           " takes statistics of all " + std::to_string(room) + " experts");
  }
  check_rows(limits, stats, "eplb_local_stats", stats.shape[0]);
}

// Ids that routing turns into i32 may have another dtype on every rank.
std::uint64_t digest_of(const Route& route, bool routed) {
  protocol::Digest digest;
  for (std::size_t i = 0; i < route.request.payloads.size(); ++i) {
    const bool any_dtype = routed && i == protocol::kIdsPlane;
    digest.add(static_cast<std::uint64_t>(route.request.payloads[i].row_bytes));
    digest.add(any_dtype ? 0 : static_cast<std::uint64_t>(route.kinds[i].dtype));
  }
  digest.add(static_cast<std::uint64_t>(route.num_extras));
  digest.add(static_cast<std::uint64_t>(route.num_stats));
  digest.add(route.request.replay == nullptr ? 0 : (std::uint64_t{1} << 32) | route.request.replay->route_epoch);
  return digest.value();
}

void check_tokens_per_rank(const Limits& limits, const DispatchOptions& options, std::int64_t own_tokens) {
  const auto list = options.num_tokens_per_rank;
  if (list.empty()) return;
  if (static_cast<int>(list.size()) != limits.num_ranks) {
    refuse("num_tokens_per_rank has " + std::to_string(list.size()) + " entries and there are " +
           std::to_string(limits.num_ranks) + " ranks");
  }
  const std::int64_t own = list[static_cast<std::size_t>(limits.rank)];
  if (own != own_tokens) {
    refuse("num_tokens_per_rank says " + std::to_string(own) + " for this rank and hidden_states has " +
           std::to_string(own_tokens) + " rows");
  }
  const std::int64_t most = limits.params.max_tokens_per_rank;
  const auto wrong = std::ranges::find_if(list, [most](std::int64_t tokens) { return tokens < 0 || tokens > most; });
  if (wrong == list.end()) return;
  refuse("num_tokens_per_rank says " + std::to_string(*wrong) + " for rank " + std::to_string(wrong - list.begin()) +
         "; it must be in [0, max_tokens_per_rank = " + std::to_string(most) + "]");
}

// Values of which an error names both sides; a list of them as a digest.
void set_agreed(const Limits& limits, const DispatchOptions& options, Route& route) {
  engine::DispatchRequest& request = route.request;
  if (limits.plan.spec.placement == protocol::Placement::kRankMajor) {
    request.tokens_per_rank = options.runtime_max_tokens_per_rank.value_or(limits.params.max_tokens_per_rank);
    request.agreed = request.tokens_per_rank;
    request.agreed_name = "runtime_max_tokens_per_rank";
    return;
  }
  if (limits.plan.shape.budget_bytes > 0) {
    request.agreed = limits.params.num_experts;
    request.agreed_name = "num_experts";
    return;
  }
  request.num_tokens_per_rank = options.num_tokens_per_rank;
  if (options.num_tokens_per_rank.empty()) return;
  protocol::Digest digest;
  for (const std::int64_t tokens : options.num_tokens_per_rank)
    digest.add(static_cast<std::uint64_t>(tokens));
  request.agreed = protocol::as_agreed(digest);
  request.agreed_name = "num_tokens_per_rank (digests)";
}

void check_runtime_max(const Limits& limits, const DispatchOptions& options, std::int64_t own_tokens) {
  if (!options.runtime_max_tokens_per_rank) return;
  const std::int64_t value = *options.runtime_max_tokens_per_rank;
  if (value >= own_tokens && value <= limits.params.max_tokens_per_rank) return;
  refuse("runtime_max_tokens_per_rank is " + std::to_string(value) + "; it must be at least this rank's " +
         std::to_string(own_tokens) +
         " tokens and at most max_tokens_per_rank = " + std::to_string(limits.params.max_tokens_per_rank));
}

// e8m0 scales cross in whole 32-bit words; the last one ends in zeros.
constexpr std::int64_t kWordOfScales = 4;

// What the sender's cast makes of the rows: they, and the scales it adds, are what crosses.
void plan_cast(const DispatchInput& input, const DispatchOptions& options, Route& route) {
  route.request.cast = options.cast;
  if (options.cast == DispatchCast::kNone) return;
  const bool ue8m0 = options.cast == DispatchCast::kFp8Block128Ue8m0;
  const protocol::RowBytes bytes = protocol::cast_row_bytes(options.cast, input.hidden_states.shape[1]);
  route.request.payloads[protocol::kHiddenPlane].row_bytes = bytes.values;
  route.request.payloads[protocol::kScalePlane].row_bytes =
      ue8m0 ? protocol::align_up(bytes.scales, kWordOfScales) : bytes.scales;
  route.kinds[protocol::kHiddenPlane].dtype = Dtype::kF8e4m3;
  route.kinds[protocol::kScalePlane] = {
      .dtype = ue8m0 ? Dtype::kE8m0 : Dtype::kF32,
      .num_inner = 1,
      .inner = {protocol::ceil_div(input.hidden_states.shape[1], protocol::kCastBlock), 0}};
}

void set_blocks(const Limits& limits, Route& route) {
  route.num_blocks = 0;
  route.rows_per_block = 0;
  if (limits.plan.spec.placement == protocol::Placement::kRankMajor) {
    route.num_blocks = limits.num_ranks;
    route.rows_per_block = route.request.tokens_per_rank;
  } else if (protocol::by_expert(limits.plan.spec.placement)) {
    route.num_blocks = num_local_experts(limits.params, limits.rank, limits.num_ranks);
    route.rows_per_block = limits.plan.shape.num_ranks * limits.plan.shape.max_tokens;
  }
}

void plan_payload_planes(const Limits& limits, Route& route) {
  std::array<std::int64_t, protocol::kMaxPlanes> row_bytes{};
  for (std::size_t i = 0; i < row_bytes.size(); ++i)
    row_bytes[i] = route.request.payloads[i].row_bytes;
  const bool spaces = protocol::space_per_source(limits.plan.shape.placement);
  const std::int64_t rows = limits.plan.shape.max_tokens * (spaces ? 1 : limits.plan.shape.num_ranks);
  route.round.planes = protocol::plan_planes(row_bytes, rows);
}

}  // namespace

void check_statistics(const Limits& limits, const DispatchOptions& options) {
  const int experts = num_local_experts(limits.params, limits.rank, limits.num_ranks);
  check_list(limits, options.routes_per_expert, "routes_per_expert", Dtype::kI32, experts);
  check_list(limits, options.wait_per_source, "wait_per_source", Dtype::kI64, limits.num_ranks);
}

void check_dispatch_options(const Limits& limits, const DispatchInput& input, const DispatchOptions& options) {
  const Contract& contract = limits.backend->info.contract;
  refuse_unless(contract.takes_topk_ids, input.topk_ids.defined(), limits, "topk_ids");
  refuse_unless(contract.takes_router_logits, input.router_logits.defined(), limits, "router_logits");
  refuse_unless(contract.takes_eplb_stats, input.eplb_local_stats.defined(), limits, "eplb_local_stats");
  refuse_unless(contract.takes_extra_payloads, !input.extra_payloads.empty(), limits, "extra_payloads");
  refuse_unless(contract.handle_use == HandleUse::kReplay, options.replay != nullptr, limits, "handle to replay");
  refuse_unless(contract.takes_runtime_max_tokens, options.runtime_max_tokens_per_rank.has_value(), limits,
                "runtime_max_tokens_per_rank");
  refuse_unless(contract.takes_num_worst_tokens, options.num_worst_tokens.has_value(), limits, "num_worst_tokens");
  refuse_unless(contract.takes_num_tokens_per_rank, !options.num_tokens_per_rank.empty(), limits,
                "num_tokens_per_rank");
  refuse_unless(contract.takes_expert_alignment, options.expert_alignment != 1, limits, "expert_alignment");
  refuse_unless(contract.takes_cast, options.cast != DispatchCast::kNone, limits, "cast");
  refuse_unless(contract.takes_receive_statistics,
                options.routes_per_expert.defined() || options.wait_per_source.defined(), limits,
                "routes_per_expert and wait_per_source");
  if (options.cast > DispatchCast::kFp8Block128Ue8m0) {
    refuse("cast is " + std::to_string(static_cast<int>(options.cast)) + "; it must be one of DispatchCast's names");
  }
  check_num_experts(limits, options.num_experts);
  const bool castable = input.hidden_states.dtype == limits.params.dtype && !input.hidden_states_scale.defined();
  if (options.cast != DispatchCast::kNone && !castable) {
    refuse("hidden_states is " + input.hidden_states.describe() + "; a cast takes rows of " +
           std::string(name(limits.params.dtype)) + " and no hidden_states_scale");
  }
  check_statistics(limits, options);
  if (input.num_tokens_on_device != nullptr && limits.device.kind != DeviceKind::kCuda) {
    refuse(
        "num_tokens_on_device is given, and this communication's rows are in host memory; the first dimension of "
        "hidden_states says how many there are");
  }
  if (options.expert_alignment < 1) {
    refuse("expert_alignment is " + std::to_string(options.expert_alignment) + "; it must be at least 1");
  }
  if (options.num_sms < 0) refuse("num_sms is " + std::to_string(options.num_sms) + "; it must not be negative");
  if (options.num_worst_tokens) {
    const std::int64_t most = std::int64_t{limits.num_ranks} * limits.params.max_tokens_per_rank;
    if (*options.num_worst_tokens < 0 || *options.num_worst_tokens > most) {
      refuse("num_worst_tokens is " + std::to_string(*options.num_worst_tokens) + "; it must be in [0, " +
             std::to_string(most) + "], the rows that all ranks can send");
    }
  }
}

void prepare_dispatch(const Limits& limits,
                      const DispatchInput& input,
                      const DispatchOptions& options,
                      const engine::Round* replay,
                      Route& route) {
  check_dispatch_options(limits, input, options);
  check_hidden_states(limits, input);
  check_scale(limits, input);
  check_routing(limits, input, replay != nullptr);
  check_extras(input);
  check_logits(limits, input);
  check_capacity(limits, input);
  check_stats(limits, input);

  route.request = {};
  route.request.replay = replay;
  route.kinds = {};
  route.request.num_tokens = input.hidden_states.shape[0];
  route.request.num_tokens_on_device = input.num_tokens_on_device;
  route.num_extras = static_cast<int>(input.extra_payloads.size());
  route.num_stats = input.eplb_local_stats.num_rows();
  route.has_ids = input.topk_ids.defined();
  check_tokens_per_rank(limits, options, route.request.num_tokens);
  check_runtime_max(limits, options, route.request.num_tokens);

  add_payload(limits, route, protocol::kHiddenPlane, input.hidden_states, "hidden_states");
  add_payload(limits, route, protocol::kScalePlane, input.hidden_states_scale, "hidden_states_scale");
  add_payload(limits, route, protocol::kIdsPlane, input.topk_ids, "topk_ids");
  add_payload(limits, route, protocol::kWeightsPlane, input.topk_weights, "topk_weights");
  add_payload(limits, route, protocol::kLogitsPlane, input.router_logits, "router_logits");
  for (int i = 0; i < route.num_extras; ++i) {
    add_payload(limits, route, protocol::kFirstExtraPlane + i, input.extra_payloads[static_cast<std::size_t>(i)],
                "one of extra_payloads");
  }
  if (route.num_stats > 0) {
    route.request.stats = {input.eplb_local_stats.as<const std::int32_t>(), static_cast<std::size_t>(route.num_stats)};
  }
  if (route.has_ids && protocol::routed(limits.plan.spec.placement)) {
    // Ids cross as i32, from the round's own copy; the dtype given is kept for the result.
    route.request.topk_ids = input.topk_ids;
    const std::int64_t bytes = limits.params.top_k * static_cast<std::int64_t>(sizeof(std::int32_t));
    route.request.payloads[protocol::kIdsPlane] = {reinterpret_cast<const std::byte*>(route.round.wire_ids.data()),
                                                   bytes, bytes};
  }
  route.request.weights_dtype = input.topk_weights.dtype;
  route.round.experts.has_weights = input.topk_weights.defined();
  plan_cast(input, options, route);
  plan_payload_planes(limits, route);
  set_agreed(limits, options, route);
  set_blocks(limits, route);
  route.request.digest = digest_of(route, protocol::routed(limits.plan.spec.placement));
  const std::int64_t all_rows = std::int64_t{limits.num_ranks} * limits.params.max_tokens_per_rank;
  route.request.row_limit = options.num_worst_tokens.value_or(all_rows);
  route.num_worst_tokens = options.num_worst_tokens;
  route.expert_alignment = options.expert_alignment;
}

}  // namespace tokenyard::communication
