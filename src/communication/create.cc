// SPDX-License-Identifier: Apache-2.0
// Creation, growth and the end of a communication: all that is collective and not a round.
#include <algorithm>
#include <cstring>
#include <utility>

#include "communication/agreement.h"
#include "communication/core.h"

namespace tokenyard::communication {

Core::Core(Group group,
           const Backend& backend,
           const MoeParams& params,
           const BackendConfig& config,
           CommunicationOptions options)
    : group_(std::move(group)),
      config_(config),
      options_(std::move(options)),
      limits_{.backend = &backend, .params = params, .rank = group_.rank(), .num_ranks = group_.num_ranks()} {}

Core::~Core() {
  tear_down(ErrorCode::kDestroyed);
}

std::unique_ptr<Core> Core::create(const Group& group,
                                   const Backend& backend,
                                   const MoeParams& params,
                                   const BackendConfig& config,
                                   const CommunicationOptions& options) {
  std::unique_ptr<Core> core(new Core(group, backend, params, config, options));
  core->build();
  return core;
}

void Core::log(LogLevel level, const std::string& text) const {
  if (options_.log) options_.log(level, text);
}

// Everything that must agree, in one exchange; a rank whose arguments make no sense says so in its place.
void Core::require_agreement() {
  std::optional<Error> failure;
  std::string text;
  try {
    validate(params());
    if (options_.num_threads < 1) {
      throw Error(ErrorCode::kInvalidArgument,
                  "num_threads is " + std::to_string(options_.num_threads) + "; it must be at least 1");
    }
    if (options_.deadline.count() < 1 || options_.first_round_deadline.count() < 1) {
      throw Error(ErrorCode::kInvalidArgument, "deadlines must be at least 1 ms");
    }
    limits_.plan = plan_checked(*limits_.backend, params(), config_, limits_.num_ranks);
    if (limits_.plan.max_num_sms > 0) sm_budget_ = SmBudget(limits_.plan.max_num_sms);
    Fields fields{{"backend", std::string(info().name)}, {"initial_epoch", std::to_string(options_.initial_epoch)}};
    for (const Fields& more : {fields_of(params()), limits_.backend->fields(config_)}) {
      fields.insert(fields.end(), more.begin(), more.end());
    }
    text = joined(fields);
  } catch (const Error& error) {
    failure = error;
  }
  require_equal(gather_texts(group_, text, failure), limits_.rank);
}

void Core::share_outcome(const std::optional<Error>& failure) const {
  gather_texts(group_, "", failure);
}

void Core::build() {
  require_agreement();
  try {
    make_window();
  } catch (...) {
    tear_down(ErrorCode::kDestroyed);
    throw;
  }
  log(LogLevel::kInfo, std::string(info().name) + ": rank " + std::to_string(limits_.rank) + " of " +
                           std::to_string(limits_.num_ranks) + ", hidden_size " + std::to_string(params().hidden_size) +
                           ", window " + std::to_string(layout_.bytes()) + " bytes");
}

void Core::make_window() {
  layout_ = protocol::WindowLayout::of(limits_.plan.shape);
  std::optional<Error> failure;
  try {
    window_ = fabric::fabrics().front().allocate(layout_.bytes());
  } catch (const Error& error) {
    failure = error;
  }
  share_outcome(failure);
  try {
    window_->connect(group_, std::chrono::duration_cast<std::chrono::milliseconds>(options_.first_round_deadline));
    engine_ = engine::engines().front().make({.rank = limits_.rank,
                                              .num_ranks = limits_.num_ranks,
                                              .params = params(),
                                              .spec = limits_.plan.spec,
                                              .layout = layout_,
                                              .deadline = options_.deadline,
                                              .first_round_deadline = options_.first_round_deadline,
                                              .num_threads = options_.num_threads,
                                              .initial_epoch = options_.initial_epoch},
                                             *window_);
    received_ = std::make_unique<Received>(limits_, layout_, window_->own());
    pool_ = std::make_shared<HandlePool>();
    pool_->core = this;
  } catch (const Error& error) {
    failure = error;
  }
  share_outcome(failure);
}

void Core::tear_down(ErrorCode why) {
  if (pool_ != nullptr) {
    pool_->core = nullptr;
    pool_->gone = why;
  }
  pool_.reset();
  combine_section_of_ = nullptr;
  received_.reset();
  engine_.reset();
  window_.reset();
}

Status Core::reset() {
  require_usable();
  std::uint32_t epoch = engine_->latest_epoch();
  try {
    // The group's own deadline: ranks come here from waits that may last two deadlines longer than this rank's.
    const auto gathered = group_.all_gather(std::as_bytes(std::span(&epoch, 1)));
    for (const Bytes& bytes : gathered) {
      std::uint32_t other = 0;
      std::memcpy(&other, bytes.data(), std::min(bytes.size(), sizeof(other)));
      if (static_cast<std::int32_t>(other - epoch) > 0) epoch = other;
    }
    combine_section_of_ = nullptr;
    for (const auto& route : pool_->routes) {
      route->views_open = false;
      if (route->state != RouteState::kFree) route->state = RouteState::kAborted;
    }
    engine_->reset(epoch + 1);
    group_.barrier();
  } catch (const Error& error) {
    return status_of(error, limits_.rank, Phase::kReset);
  }
  return {};
}

Status Core::destroy() {
  if (std::exchange(destroyed_, true)) return {};
  Status status;
  try {
    // After a fault some rank may be gone for good; the others come within the two deadlines of their last wait.
    if (engine_ == nullptr || engine_->fault().ok()) {
      group_.barrier();
    } else {
      group_.barrier(2 * options_.deadline);
    }
  } catch (const Error& error) {
    status = status_of(error, limits_.rank, Phase::kDestroy);
  }
  tear_down(ErrorCode::kDestroyed);
  return status;
}

void Core::reserve(const MoeParams& wanted, std::int64_t extra) {
  require_usable();
  validate(wanted);
  if (extra < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "extra_payload_bytes_per_token is " + std::to_string(extra) + "; it must not be negative",
                limits_.rank);
  }
  const MoeParams& now = params();
  const std::int64_t bytes_now = dispatch_bytes_per_token(now) + limits_.backend->extra_capacity(config_);
  // An impossible request does not fit either; the exchange below then refuses it on every rank.
  const std::int64_t bytes_wanted = dispatch_bytes_per_token(wanted) + std::min(extra, kMaxWindowBytes);
  const bool same_routing = wanted.top_k == now.top_k && wanted.num_experts == now.num_experts;
  if (same_routing && wanted.max_tokens_per_rank <= now.max_tokens_per_rank && wanted.hidden_size <= now.hidden_size &&
      bytes_wanted <= bytes_now) {
    return;
  }
  const auto busy = [](const auto& route) {
    return route->views_open || route->state == RouteState::kSent || route->state == RouteState::kCombining;
  };
  if (std::ranges::any_of(pool_->routes, busy)) {
    throw Error(ErrorCode::kInvalidState, "a round is open; combine it before growing", limits_.rank);
  }
  Core request(group_, *limits_.backend, wanted, limits_.backend->with_extra_capacity(config_, extra), options_);
  request.require_agreement();

  // The wider rows size combine; dispatch bytes beyond what their format needs are kept as extra room.
  const bool keep_rows =
      wanted.hidden_size < now.hidden_size || (wanted.hidden_size == now.hidden_size && bytes_wanted < bytes_now);
  MoeParams grown = keep_rows ? now : wanted;
  grown.top_k = wanted.top_k;
  grown.num_experts = wanted.num_experts;
  grown.max_tokens_per_rank = std::max(wanted.max_tokens_per_rank, now.max_tokens_per_rank);
  const std::int64_t grown_extra = std::max(bytes_wanted, bytes_now) - dispatch_bytes_per_token(grown);
  const BackendConfig grown_config = limits_.backend->with_extra_capacity(config_, grown_extra);
  // Each alone may fit where the larger of both does not; every rank then throws alike, and the old window stays.
  (void)plan_checked(*limits_.backend, grown, grown_config, limits_.num_ranks);
  config_ = grown_config;
  limits_.params = grown;
  group_.barrier();
  tear_down(ErrorCode::kReplaced);
  group_.barrier();  // never two windows at once
  build();
}

}  // namespace tokenyard::communication
