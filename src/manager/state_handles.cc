// SPDX-License-Identifier: Apache-2.0
// What a manager gives out, and how it grows.
#include <algorithm>
#include <string>

#include "backends/registry.h"
#include "communication/agreement.h"
#include "manager/state.h"

namespace tokenyard::manager {
namespace {

using communication::Fields;

// The parts of params that requests give.
template <class Sizes>
MoeParams with_sizes(MoeParams params, const Sizes& sizes) {
  params.max_tokens_per_rank = sizes.max_num_tokens;
  params.top_k = sizes.top_k;
  params.num_experts = sizes.num_experts;
  params.hidden_size = sizes.hidden_size;
  return params;
}

// Whether the window is there; growth that failed leaves none.
bool has_window(const Communication& made) {
  try {
    (void)made.poll();
  } catch (const Error&) {
    return false;
  }
  return true;
}

}  // namespace

void State::require_scheme(Scheme scheme, std::string_view call) const {
  if (strategy_->scheme == scheme) return;
  std::string_view owner;
  for (const Strategy& other : strategies()) {
    if (other.scheme == scheme) owner = other.backend;
  }
  throw Error(ErrorCode::kUnsupported,
              "`" + std::string(info_->name) + "` has no " + std::string(call) + "; `" + std::string(owner) + "` has",
              rank());
}

std::string State::key_of(const Wanted& wanted) const {
  Fields fields = registry::backend_of(wanted.config).fields(wanted.config);
  std::erase_if(fields, [this](const auto& field) {
    return std::ranges::find(strategy_->unkeyed, field.first) != strategy_->unkeyed.end();
  });
  return "group=" + std::to_string(group().nonce()) + "\n" +
         communication::joined(communication::fields_of(wanted.params)) + communication::joined(fields);
}

void State::limit_sms(Communication& communication) const {
  if (!num_sms_) return;
  if (auto* budget = communication.get<SmBudget>(); budget != nullptr) budget->set_num_sms(*num_sms_);
}

std::shared_ptr<Entry> State::make_entry(const Wanted& wanted) {
  // Counted also when it fails, which it does on every rank.
  const std::uint64_t ordinal = ++num_made_;
  log("communication " + std::to_string(ordinal) + " of `" + std::string(info_->name) + "`: " + key_of(wanted));
  auto entry = std::make_shared<Entry>(
      create_communication(group(), wanted.params, wanted.config, options_.communication), ordinal);
  limit_sms(entry->communication);
  return entry;
}

// Others may be making what this rank cannot ask for: it takes its place in their first exchange, and all throw. With
// communications at hand they more likely found theirs and wait for nobody.
void State::fail_together(const Error& error) const {
  if (live().empty()) communication::gather_texts(group(), "", error);
  throw communication::named(error, rank());
}

All2AllHandle State::get_handle(const HandleRequest& request) {
  const std::scoped_lock lock(mutex_);
  require_usable();
  All2AllHandle handle;
  if (strategy_->scheme == Scheme::kGrowing || strategy_->scheme == Scheme::kBySizes) {
    handle.state_ = shared_from_this();
    return handle;
  }
  if (strategy_->scheme != Scheme::kShared) {
    throw Error(ErrorCode::kUnsupported,
                "`" + std::string(info_->name) + "` has no handle: " + std::string(strategy_->no_handle), rank());
  }
  Wanted wanted;
  try {
    check_arguments(*strategy_, request);
    wanted = strategy_->wanted({.request = request,
                                .params = options_.params,
                                .config = config_,
                                .rank = group().rank(),
                                .num_ranks = group().num_ranks()});
  } catch (const Error& error) {
    fail_together(error);
  }
  const std::string key = key_of(wanted);
  handle.entry_ = cache_.find(key);
  if (handle.entry_ == nullptr) {
    handle.entry_ = make_entry(wanted);
    cache_.insert(key, handle.entry_);
  }
  return handle;
}

Wanted State::wanted_for(const InitializeRequest& request) const {
  Wanted wanted{.params = with_sizes(options_.params, request), .config = config_};
  wanted.params.dispatch_format = request.dispatch_format;
  wanted.config = registry::backend_of(config_).with_extra_capacity(config_, request.extra_payload_bytes_per_token);
  return wanted;
}

void State::initialize(const InitializeRequest& request) {
  const std::scoped_lock lock(mutex_);
  require_usable();
  require_scheme(Scheme::kGrowing, "initialize()");
  const Wanted wanted = wanted_for(request);
  if (!owned_.empty()) {
    grow(request, wanted.params);
    return;
  }
  owned_.push_back({.sizes = {}, .entry = make_entry(wanted)});
}

void State::grow(const InitializeRequest& request, const MoeParams& params) {
  Communication& communication = owned_.front().entry->communication;
  try {
    communication.get<Growth>()->reserve(params, request.extra_payload_bytes_per_token);
  } catch (const Error&) {
    if (!has_window(communication)) (void)destroy_owned();
    throw;
  }
}

Communication& State::get_communication() {
  const std::scoped_lock lock(mutex_);
  require_usable();
  require_scheme(Scheme::kGrowing, "get_communication()");
  if (owned_.empty()) {
    throw Error(ErrorCode::kInvalidState,
                "`" + std::string(info_->name) + "` is not initialised; call initialize() first", rank());
  }
  return owned_.front().entry->communication;
}

Communication& State::get_communication(const CommunicationSizes& sizes) {
  const std::scoped_lock lock(mutex_);
  require_usable();
  require_scheme(Scheme::kBySizes, "get_communication(sizes)");
  const auto found = std::ranges::find(owned_, sizes, &Owned::sizes);
  if (found != owned_.end()) return found->entry->communication;
  Wanted wanted{.params = with_sizes(options_.params, sizes), .config = config_};
  // Unused rows keep an id that no rank owns, unless the options name another one.
  if (options_.params.invalid_expert_id == MoeParams{}.invalid_expert_id) {
    wanted.params.invalid_expert_id = sizes.num_experts;
  }
  owned_.push_back({.sizes = sizes, .entry = make_entry(wanted)});
  return owned_.back().entry->communication;
}

void State::set_num_sms(int num_sms) {
  const std::scoped_lock lock(mutex_);
  require_usable();
  if (num_sms < 1) {
    throw Error(ErrorCode::kInvalidArgument, "num_sms is " + std::to_string(num_sms) + "; it must be at least 1",
                rank());
  }
  num_sms_ = num_sms;
  for (const auto& entry : live())
    limit_sms(entry->communication);
}

std::optional<int> State::max_sms_used() const {
  const std::scoped_lock lock(mutex_);
  require_usable();
  int most = 0;
  for (const auto& entry : live()) {
    const auto* budget = entry->communication.get<SmBudget>();
    most = std::max(most, budget == nullptr ? entry->communication.max_sms() : budget->max_sms_used());
  }
  return most;
}

void State::set_step_num_tokens(std::span<const std::int64_t> num_tokens) {
  const std::scoped_lock lock(mutex_);
  require_usable();
  const auto negative = std::ranges::find_if(num_tokens, [](std::int64_t tokens) { return tokens < 0; });
  if (negative != num_tokens.end()) {
    throw Error(ErrorCode::kInvalidArgument,
                "rank " + std::to_string(negative - num_tokens.begin()) + " of the step's list has " +
                    std::to_string(*negative) + " tokens; they must not be negative",
                rank());
  }
  if (gather_ != nullptr) gather_->set_step_num_tokens(num_tokens);
}

}  // namespace tokenyard::manager
