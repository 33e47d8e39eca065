// SPDX-License-Identifier: Apache-2.0
// Validation of params and the arithmetic of capacities: whatever the values, there is an Error, or a size between
// bounds that are worked out here from the documented row formats, in numbers that do not overflow.
#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "tokenyard/backends.h"
#include "tokenyard/error.h"
#include "tokenyard/group.h"

#include "backends/registry.h"
#include "fuzz/input.h"
#include "fuzz/target.h"
#include "protocol/layout.h"
#include "support/check.h"

namespace tokenyard::fuzz {
namespace {

using support::check;
using support::check_eq;

// 64 bits of mantissa and no wrapping: exact for every size that fits, and large for those that do not.
using Real = long double;

constexpr Real kAddressable = 0x1p56L;

struct Question {
  MoeParams params{};
  BackendConfig config{};
  int num_ranks = 1;
};

MoeParams draw_params(Input& input) {
  MoeParams params{.num_experts = static_cast<int>(1 + input.below(300)),
                   .top_k = static_cast<int>(1 + input.below(kMaxTopK)),
                   .hidden_size = static_cast<int>(1 + input.below(10'000)),
                   .max_tokens_per_rank = static_cast<int>(1 + input.below(10'000))};
  constexpr std::array kDtypes{Dtype::kBf16, Dtype::kF16, Dtype::kF32};
  params.dtype = input.pick(kDtypes);
  params.dispatch_format = static_cast<DispatchFormat>(input.below(6));
  const auto spoiled = input.take<std::uint8_t>();
  if ((spoiled & 0x01U) != 0) params.num_experts = input.hostile<int>();
  if ((spoiled & 0x02U) != 0) params.top_k = input.hostile<int>();
  if ((spoiled & 0x04U) != 0) params.hidden_size = input.hostile<int>();
  if ((spoiled & 0x08U) != 0) params.max_tokens_per_rank = input.hostile<int>();
  if ((spoiled & 0x10U) != 0) params.invalid_expert_id = input.hostile<std::int64_t>();
  if ((spoiled & 0x20U) != 0) params.dtype = static_cast<Dtype>(input.take<std::uint8_t>());
  if ((spoiled & 0x40U) != 0) params.dispatch_format = static_cast<DispatchFormat>(input.take<std::uint8_t>());
  if ((spoiled & 0x80U) != 0) params.invalid_expert_id = params.num_experts;
  return params;
}

BackendConfig draw_config(Input& input) {
  const auto extra = input.hostile<std::int64_t>();
  switch (input.below(6)) {
    case 0:
      return AllGatherConfig{.extra_payload_bytes_per_token = extra};
    case 1:
      return HighThroughputConfig{.max_num_sms = input.hostile<int>()};
    case 2:
      return OneSidedConfig{.extra_payload_bytes_per_token = extra,
                            .eplb_stats_num_experts = input.hostile<int>(),
                            .use_low_precision_combine = input.flip()};
    case 3:
      return LowLatencyConfig{.use_logarithmic_combine = input.flip()};
    case 4:
      return TwoSidedConfig{.queue_bytes_per_peer = extra};
    default:
      return PassthroughConfig{};
  }
}

bool is_valid(const MoeParams& params) {
  const std::int64_t id = params.invalid_expert_id;
  const bool float_dtype = params.dtype == Dtype::kBf16 || params.dtype == Dtype::kF16 || params.dtype == Dtype::kF32;
  return params.num_experts > 0 && params.top_k > 0 && params.top_k <= 64 && params.hidden_size > 0 &&
         params.max_tokens_per_rank > 0 && float_dtype && static_cast<int>(params.dispatch_format) < 6 &&
         (id < 0 || id >= params.num_experts) && id >= -0x8000'0000LL && id <= 0x7FFF'FFFFLL;
}

// The table of params.h, values and scales together.
std::int64_t dispatched_bytes(const MoeParams& params) {
  const std::int64_t hidden = params.hidden_size;
  const std::int64_t element = params.dtype == Dtype::kF32 ? 4 : 2;
  const auto blocks = [&](std::int64_t size) { return hidden / size + (hidden % size == 0 ? 0 : 1); };
  switch (params.dispatch_format) {
    case DispatchFormat::kNone:
      return hidden * element;
    case DispatchFormat::kFp8PerTensor:
      return hidden;
    case DispatchFormat::kFp8Block128:
      return hidden + 4 * blocks(128);
    case DispatchFormat::kMxfp8:
      return hidden + blocks(32);
    case DispatchFormat::kNvfp4:
      return blocks(2) + blocks(16);
    case DispatchFormat::kMxfp4:
      return blocks(2) + blocks(32);
  }
  return -1;
}

struct Needs {
  Real ids_and_weights = 0;  // bytes a row
  Real extra = 0;
  Real logits = 0;
  Real stats = 0;  // entries
  Real weights_back = 0;
};

// What the config asks for besides rows, or nothing when it makes no sense or belongs to nobody who moves tokens.
std::optional<Needs> needs_of(const Question& question) {
  const int top_k = question.params.top_k;
  if (const auto* config = std::get_if<AllGatherConfig>(&question.config)) {
    if (config->extra_payload_bytes_per_token < 0) return std::nullopt;
    return Needs{.ids_and_weights = Real{12} * top_k,
                 .extra = static_cast<Real>(config->extra_payload_bytes_per_token),
                 .logits = Real{4} * question.params.num_experts};
  }
  if (const auto* config = std::get_if<HighThroughputConfig>(&question.config)) {
    if (config->max_num_sms < 1) return std::nullopt;
    return Needs{.ids_and_weights = Real{8} * top_k, .weights_back = Real{4} * top_k};
  }
  if (const auto* config = std::get_if<OneSidedConfig>(&question.config)) {
    const int stats = config->eplb_stats_num_experts;
    if (config->extra_payload_bytes_per_token < 0 || stats < 0 || stats > question.params.num_experts) {
      return std::nullopt;
    }
    return Needs{.ids_and_weights = Real{8} * top_k,
                 .extra = static_cast<Real>(config->extra_payload_bytes_per_token),
                 .stats = static_cast<Real>(stats)};
  }
  return std::nullopt;
}

// The size, or nothing when an Error was thrown.
template <class Function>
std::optional<std::int64_t> size_or_error(Function&& function) {
  try {
    return function();
  } catch (const Error&) {
    return std::nullopt;
  }
}

void check_between(std::int64_t size, Real least, Real most, const std::string& what) {
  check(static_cast<Real>(size) >= least, what + " of " + std::to_string(size) + " is below what the rows take");
  check(static_cast<Real>(size) <= most, what + " of " + std::to_string(size) + " is far above what the rows take");
}

void check_sizes(const Question& question, const Needs& needs) {
  const MoeParams& params = question.params;
  const auto window = size_or_error([&] { return window_bytes(params, question.config, question.num_ranks); });
  const auto output = size_or_error([&] { return output_bytes(params, question.config, question.num_ranks); });
  check_eq(window.has_value(), output.has_value(), "whether both sizes are given");

  const Real ranks = question.num_ranks;
  const Real rows = ranks * params.max_tokens_per_rank;
  const std::int64_t combine_bytes = std::int64_t{params.hidden_size} * (params.dtype == Dtype::kF32 ? 4 : 2);
  const Real row = static_cast<Real>(dispatched_bytes(params)) + needs.ids_and_weights + needs.extra + needs.logits;
  const Real back = static_cast<Real>(combine_bytes) + needs.weights_back;
  // Rounding: up to 16 bytes for each of seven planes and for a combined row and its weights, and lines of 64 bytes for
  // each chunk, which is at least a token.
  const Real rounding = rows * (16 * 9 + 64) + ranks * ranks * 512 + ranks * (8192 + 4 * needs.stats) + 8192;
  const Real least = rows * (row + back) + ranks * 4 * needs.stats;
  if (rows > 0x7FFF'FFFF || least > kAddressable) {
    check(!window, "a window that cannot be had is given as " + std::to_string(window.value_or(0)) + " bytes");
    return;
  }
  if (least + rounding > kAddressable / 2) return;  // near the limit either answer is right
  check(window.has_value(), "a window of about " + std::to_string(static_cast<double>(least)) + " bytes is refused");
  check_between(*window, least, least + rounding, "window_bytes");
  check_between(*output, rows * row, rows * (row + 16 * 7), "output_bytes");
  check(*output <= *window, "the largest output is larger than the window");

  // Fewer tokens never need more.
  Question smaller = question;
  smaller.params.max_tokens_per_rank -= params.max_tokens_per_rank / 2;
  check(window_bytes(smaller.params, smaller.config, smaller.num_ranks) <= *window,
        "fewer tokens need a larger window");
}

void check_bytes_per_token(const MoeParams& params) {
  check_eq(dispatch_bytes_per_token(params), dispatched_bytes(params), "dispatch_bytes_per_token");
  check_eq(value_bytes_per_token(params) + scale_bytes_per_token(params), dispatched_bytes(params),
           "values and scales");
  check(scale_bytes_per_token(params) >= 0, "scale bytes are negative");
}

// What each backend makes of its own default config, and of configs that are not its own.
void check_plans(const Question& question) {
  for (const BackendInfo& info : backends()) {
    Question own = question;
    own.config = info.default_config;
    if (const auto needs = needs_of(own)) check_sizes(own, *needs);
  }
  for (const communication::Backend* backend : registry::all()) {
    if (!backend->info.moves_tokens || backend->info.default_config.index() != question.config.index()) continue;
    try {
      const communication::Plan plan = backend->plan(question.params, question.config, question.num_ranks);
      check_eq(plan.shape.num_ranks, question.num_ranks, "ranks of the plan");
      check_eq(plan.shape.max_tokens, question.params.max_tokens_per_rank, "tokens of the plan");
      check(plan.shape.tokens_per_chunk >= 1 && plan.shape.tokens_per_chunk <= 64, "a chunk has 1 to 64 tokens");
      check(plan.shape.row_capacity > 0 && plan.shape.extra_capacity >= 0 && plan.shape.stats_entries >= 0 &&
                plan.shape.combine_row_bytes > 0 && plan.shape.weights_row_bytes >= 0,
            "a part of the shape is negative");
    } catch (const Error&) {
      check(!needs_of(question) || Real{1} * question.num_ranks * question.params.max_tokens_per_rank > 0x7FFF'FFFF,
            "a plan is refused that makes sense");
    }
  }
}

}  // namespace

void run_target(std::span<const std::byte> bytes) {
  Input input(bytes);
  Question question;
  question.params = draw_params(input);
  question.config = draw_config(input);
  question.num_ranks = input.flip() ? input.hostile<int>() : static_cast<int>(1 + input.below(64));

  std::optional<ErrorCode> refused;
  try {
    validate(question.params);
  } catch (const Error& error) {
    refused = error.code();
  }
  check_eq(!refused, is_valid(question.params), "whether the params are valid");
  if (refused) check(*refused == ErrorCode::kInvalidArgument, "bad params are an invalid argument");

  const auto needs = needs_of(question);
  const bool ranks_fit = question.num_ranks >= 1 && question.num_ranks <= Group::kMaxRanks;
  if (refused || !ranks_fit || !needs) {
    check(!size_or_error([&] { return window_bytes(question.params, question.config, question.num_ranks); }),
          "a window is sized that nobody can make");
    check(!size_or_error([&] { return output_bytes(question.params, question.config, question.num_ranks); }),
          "an output is sized that nobody can make");
  } else {
    check_sizes(question, *needs);
  }
  if (refused) return;
  check_bytes_per_token(question.params);
  if (ranks_fit) check_plans(question);
}

}  // namespace tokenyard::fuzz
