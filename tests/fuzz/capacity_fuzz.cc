// SPDX-License-Identifier: Apache-2.0
// Validation of params and the arithmetic of capacities: whatever the values, there is an Error, or a size between
// bounds that are worked out here from the documented row formats, in numbers that do not overflow.
#include <algorithm>
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

// What the contract's tables say that a config asks for. Sizes are without any rounding.
struct Needs {
  Real row = 0;         // bytes of all that is dispatched of a token
  Real back = 0;        // bytes of a row of combine, with weights that go with it
  Real stats = 0;       // entries
  Real depth = 1;       // rounds that may be open at once
  Real experts = 1;     // times that a result has room for every row
  Real queue = 0;       // bytes of a queue; 0: rows have places of their own
  Real queue_most = 0;  // what it may be when rounded up
};

constexpr Real kRowRounding = 16 * 9;  // up to 16 bytes for each of seven planes, a combined row and its weights

Real blocks_of(std::int64_t values, std::int64_t size) {
  const std::int64_t blocks = values / size + (values % size == 0 ? 0 : 1);
  return static_cast<Real>(blocks);
}

Real combine_bytes(const MoeParams& params) {
  return Real{1} * params.hidden_size * (params.dtype == Dtype::kF32 ? 4 : 2);
}

std::optional<Needs> needs_of(const AllGatherConfig& config, const MoeParams& params) {
  if (config.extra_payload_bytes_per_token < 0) return std::nullopt;
  const Real logits = Real{4} * params.num_experts;
  const auto extra = static_cast<Real>(config.extra_payload_bytes_per_token);
  return Needs{.row = static_cast<Real>(dispatched_bytes(params)) + Real{12} * params.top_k + logits + extra,
               .back = combine_bytes(params)};
}

std::optional<Needs> needs_of(const HighThroughputConfig& config, const MoeParams& params) {
  if (config.max_num_sms < 1) return std::nullopt;
  return Needs{.row = static_cast<Real>(dispatched_bytes(params)) + Real{8} * params.top_k,
               .back = combine_bytes(params) + Real{4} * params.top_k};
}

std::optional<Needs> needs_of(const OneSidedConfig& config, const MoeParams& params) {
  const int stats = config.eplb_stats_num_experts;
  if (config.extra_payload_bytes_per_token < 0 || stats < 0 || stats > params.num_experts) return std::nullopt;
  const auto extra = static_cast<Real>(config.extra_payload_bytes_per_token);
  return Needs{.row = static_cast<Real>(dispatched_bytes(params)) + Real{8} * params.top_k + extra,
               .back = combine_bytes(params),
               .stats = static_cast<Real>(stats)};
}

// Rows as they are, or cast to f8e4m3 with an f32 scale for 128 values, whichever takes more. Logarithms take 168 bytes
// for 128 values, and 8 and ten bits a value for fewer.
std::optional<Needs> needs_of(const LowLatencyConfig& config, const MoeParams& params) {
  const Real cast = params.hidden_size + 4 * blocks_of(params.hidden_size, 128);
  const int rest = params.hidden_size % 128;
  const int whole = params.hidden_size / 128;
  const Real logarithms = Real{168} * whole + (rest == 0 ? Real{0} : 8 + blocks_of(std::int64_t{10} * rest, 8));
  const Real weights = Real{4} * params.top_k;
  return Needs{.row = std::max(static_cast<Real>(dispatched_bytes(params)), cast) + 2 * weights,
               .back = (config.use_logarithmic_combine ? logarithms : combine_bytes(params)) + weights,
               .depth = 2,
               .experts = static_cast<Real>(params.num_experts)};
}

std::optional<Needs> needs_of(const TwoSidedConfig& config, const MoeParams& params) {
  if (params.num_experts % 4 != 0 || config.queue_bytes_per_peer < 0) return std::nullopt;
  Needs needs{.row = static_cast<Real>(dispatched_bytes(params)) + Real{8} * params.top_k,
              .back = combine_bytes(params),
              .stats = static_cast<Real>(params.num_experts)};
  const Real entry = 16 + std::max(needs.row, needs.back);
  needs.queue = static_cast<Real>(config.queue_bytes_per_peer);
  needs.queue_most = needs.queue;
  if (config.queue_bytes_per_peer == 0) {
    needs.queue = std::max(Real{256 * 1024}, 4 * entry);
    needs.queue_most = std::max(Real{256 * 1024}, 4 * (entry + kRowRounding + 64));
  } else if (needs.queue < 2 * (entry + kRowRounding + 64)) {
    return std::nullopt;  // too small, or so near that rounding decides: see is_near
  }
  return needs;
}

std::optional<Needs> needs_of(const PassthroughConfig&, const MoeParams&) {
  return std::nullopt;
}

// Nothing when the config makes no sense or belongs to nobody who moves tokens.
std::optional<Needs> needs_of(const Question& question) {
  auto needs = std::visit([&](const auto& config) { return needs_of(config, question.params); }, question.config);
  if (needs && needs->experts > 1) {
    needs->experts = blocks_of(question.params.num_experts, std::max(question.num_ranks, 1));
  }
  return needs;
}

// A queue that holds two rows or does not, by how rows are rounded up.
bool is_near(const Question& question) {
  const auto* config = std::get_if<TwoSidedConfig>(&question.config);
  if (config == nullptr || config->queue_bytes_per_peer <= 0) return false;
  const MoeParams& params = question.params;
  const Real row =
      std::max(static_cast<Real>(dispatched_bytes(params)) + Real{8} * params.top_k, combine_bytes(params));
  const auto queue = static_cast<Real>(config->queue_bytes_per_peer);
  return queue >= 2 * (16 + row) && queue < 2 * (16 + row + kRowRounding + 64);
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
  const bool queued = needs.queue > 0;
  const Real places = queued ? 0 : needs.depth * rows;
  const Real lines = ranks * ranks * 512 + ranks * (8192 + 4 * needs.stats) + 16'384;
  const Real least = places * (needs.row + needs.back) + 2 * ranks * needs.queue + ranks * 4 * needs.stats;
  // A line of 64 bytes for each chunk, which is at least a token.
  const Real most = least + places * (kRowRounding + 64) + 2 * ranks * (needs.queue_most - needs.queue + 128) + lines;
  const Real least_output = needs.experts * rows * needs.row;
  const Real most_output = needs.experts * (rows * (needs.row + kRowRounding + 4) + ranks * 8);
  if (rows > 0x7FFF'FFFF || least > kAddressable || least_output > kAddressable) {
    check(!window, "a window that cannot be had is given as " + std::to_string(window.value_or(0)) + " bytes");
    return;
  }
  if (std::max(most, most_output) > kAddressable) return;  // near the limit either answer is right
  check(window.has_value(), "a window of about " + std::to_string(static_cast<double>(least)) + " bytes is refused");
  check_between(*window, least, most, "window_bytes");
  check_between(*output, least_output, most_output, "output_bytes");
  check(queued || needs.experts > 1 || *output <= *window, "the largest output is larger than the window");

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
      check(!needs_of(question) || is_near(question) ||
                Real{1} * question.num_ranks * question.params.max_tokens_per_rank > 0x7FFF'FFFF,
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

  if (!refused && is_near(question)) return;
  const auto needs = refused ? std::nullopt : needs_of(question);
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
