// SPDX-License-Identifier: Apache-2.0
// Growth: what a request needs is worked out and agreed on first, so that until all ranks go ahead none has changed.
#include <algorithm>
#include <utility>

#include "communication/agreement.h"
#include "communication/core.h"

namespace tokenyard::communication {

// What the communication becomes so that the request fits and so does all that fitted before; nothing when it fits
// already. The wider rows size combine; dispatch bytes beyond what their format needs are kept as extra room.
std::optional<Core::Capacity> Core::capacity_for(const MoeParams& wanted, std::int64_t extra) const {
  validate(wanted);
  if (extra < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "extra_payload_bytes_per_token is " + std::to_string(extra) + "; it must not be negative");
  }
  const MoeParams& now = params();
  if (wanted.dtype != now.dtype) {
    throw Error(ErrorCode::kInvalidArgument, "dtype is " + std::string(name(wanted.dtype)) +
                                                 " and this communication's " + std::string(name(now.dtype)) +
                                                 "; growth keeps it");
  }
  const std::int64_t bytes_now = dispatch_bytes_per_token(now) + limits_.backend->extra_capacity(config_);
  // An impossible request does not fit either; agreed_text() then refuses it, with its own numbers.
  const std::int64_t bytes_wanted = dispatch_bytes_per_token(wanted) + std::min(extra, kMaxWindowBytes);
  const bool same_routing = wanted.top_k == now.top_k && wanted.num_experts == now.num_experts;
  if (same_routing && wanted.max_tokens_per_rank <= now.max_tokens_per_rank && wanted.hidden_size <= now.hidden_size &&
      bytes_wanted <= bytes_now) {
    return std::nullopt;
  }
  const bool keep_rows =
      wanted.hidden_size < now.hidden_size || (wanted.hidden_size == now.hidden_size && bytes_wanted < bytes_now);
  Capacity grown{.params = keep_rows ? now : wanted, .config = config_};
  grown.params.top_k = wanted.top_k;
  grown.params.num_experts = wanted.num_experts;
  grown.params.max_tokens_per_rank = std::max(wanted.max_tokens_per_rank, now.max_tokens_per_rank);
  const std::int64_t grown_extra = std::max(bytes_wanted, bytes_now) - dispatch_bytes_per_token(grown.params);
  grown.config = limits_.backend->with_extra_capacity(config_, grown_extra);
  return grown;
}

void Core::require_no_open_round() const {
  require_no_capture("growing");
  if (engine_->recorded()) {
    throw Error(ErrorCode::kInvalidState,
                "this communication was captured in a CUDA graph, which holds the addresses of its window; grow before "
                "the first capture, or make another communication");
  }
  const auto busy = [](const auto& route) {
    return route->views_open || route->state == RouteState::kSent || route->state == RouteState::kCombining;
  };
  if (std::ranges::none_of(pool_->routes, busy)) return;
  throw Error(ErrorCode::kInvalidState, "a round is open; combine it before growing");
}

void Core::reserve(const MoeParams& wanted, std::int64_t extra) {
  require_usable();
  std::optional<Capacity> grown;
  std::string text;
  const std::optional<Error> failure = failure_in([&] {
    grown = capacity_for(wanted, extra);
    if (!grown) return;
    require_no_open_round();
    // What was asked for must make sense and agree. What is to be made must make sense too: each of two shapes may fit
    // where the larger of both does not.
    const BackendConfig config = limits_.backend->with_extra_capacity(config_, extra);
    text = Core(group_, *limits_.backend, wanted, config, options_).agreed_text();
    (void)Core(group_, *limits_.backend, grown->params, grown->config, options_).agreed_text();
  });
  if (!failure && !grown) return;
  require_equal(gather_texts(group_, text, failure), limits_.rank);

  // All have come, so nobody uses the old windows any more.
  limits_.params = grown->params;
  config_ = grown->config;
  tear_down(ErrorCode::kReplaced);
  group_.barrier();  // never two windows at once
  build();
}

}  // namespace tokenyard::communication
