// SPDX-License-Identifier: Apache-2.0
// Creation and the end of a communication: what is collective and not a round. Growth is in growth.cc.
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

// Everything that must agree. Makes the plan, and throws when the arguments make no sense.
std::string Core::agreed_text() {
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
  return joined(fields);
}

// In one exchange; a rank whose arguments make no sense says so in its place.
void Core::require_agreement() {
  std::optional<Error> failure;
  std::string text;
  try {
    text = agreed_text();
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

}  // namespace tokenyard::communication
