// SPDX-License-Identifier: Apache-2.0
// A manager's beginning and end.
#include "manager/state.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "backends/registry.h"
#include "communication/agreement.h"
#include "system/host.h"
#include "system/tcp_socket.h"

namespace tokenyard::manager {
namespace {

using communication::Fields;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void check_groups(const ManagerOptions& options, Scheme scheme) {
  const Group& group = options.group;
  if (options.data_group &&
      (options.data_group->rank() != group.rank() || options.data_group->num_ranks() != group.num_ranks())) {
    refuse("data_group says rank " + std::to_string(options.data_group->rank()) + " of " +
           std::to_string(options.data_group->num_ranks()) + " and group rank " + std::to_string(group.rank()) +
           " of " + std::to_string(group.num_ranks()) + "; they must have the same ranks");
  }
  if (!options.store.empty()) (void)system::parse_tcp_address(options.store);
  if (scheme == Scheme::kGather) GatherPlan::check(options.parallel, group);
}

BackendConfig config_of(const Strategy& strategy, const BackendInfo& info, const ManagerOptions& options) {
  if (!options.config) {
    return strategy.with_knobs == nullptr ? info.default_config
                                          : strategy.with_knobs(info.default_config, options.knobs);
  }
  if (options.config->index() != info.default_config.index()) {
    refuse("ManagerOptions::config is of `" + std::string(find_backend(*options.config).name) +
           "` and the manager of `" + std::string(info.name) + "`");
  }
  return *options.config;
}

// Everything that ranks must agree on.
std::string agreed_text(const BackendInfo& info, const ManagerOptions& options, const BackendConfig& config) {
  const auto size_of_group = [](const std::optional<Group>& group) {
    return std::to_string(group ? group->num_ranks() : 1);
  };
  Fields fields{{"manager", std::string(info.name)}};
  const Fields parallel{{"ParallelGroups::dp ranks", size_of_group(options.parallel.dp)},
                        {"ParallelGroups::pcp ranks", size_of_group(options.parallel.pcp)},
                        {"ParallelGroups::tp_size", std::to_string(options.parallel.tp_size)},
                        {"ParallelGroups::use_ep", options.parallel.use_ep ? "true" : "false"},
                        {"ManagerOptions::store", options.store}};
  for (const Fields& more :
       {communication::fields_of(options.params), registry::backend_of(config).fields(config), parallel}) {
    fields.insert(fields.end(), more.begin(), more.end());
  }
  return communication::joined(fields);
}

Status first_bad(const Status& one, const Status& other) {
  return one.ok() ? other : one;
}

}  // namespace

State::State(const Strategy& strategy, const ManagerOptions& options, const BackendConfig& config)
    : strategy_(&strategy), info_(&find_backend(strategy.backend)), options_(options), config_(config) {
  if (strategy.scheme != Scheme::kGather) return;
  gather_ = std::make_unique<GatherState>(GatherPlan(options.parallel, options.group),
                                          RoomOptions{.params = options.params,
                                                      .config = std::get<AllGatherConfig>(config),
                                                      .communication = options.communication});
}

All2AllManager State::create(const Strategy* strategy,
                             const ManagerOptions& options,
                             const std::optional<Error>& failure) {
  std::optional<Error> reason = failure;
  std::shared_ptr<State> state;
  std::string text;
  try {
    if (!reason) {
      check_groups(options, strategy->scheme);
      const BackendInfo& info = find_backend(strategy->backend);
      const BackendConfig config = config_of(*strategy, info, options);
      state.reset(new State(*strategy, options, config));
      text = agreed_text(info, options, config);
    }
  } catch (const Error& error) {
    reason = error;
  }
  // The host's name goes in front, because it may differ.
  std::vector<std::string> texts =
      communication::gather_texts(options.group, system::host_identity() + "\n" + text, reason);
  std::vector<std::string> hosts;
  for (std::string& each : texts) {
    const std::size_t end = std::min(each.find('\n'), each.size());
    hosts.push_back(each.substr(0, end));
    each.erase(0, end + 1);
  }
  communication::require_equal(texts, options.group.rank());
  state->spans_hosts_ = std::ranges::adjacent_find(hosts, std::ranges::not_equal_to{}) != hosts.end();
  state->log("manager of `" + std::string(state->info_->name) + "`: rank " + std::to_string(options.group.rank()) +
             " of " + std::to_string(options.group.num_ranks()));
  return All2AllManager(std::move(state));
}

void State::abandon() {
  const std::scoped_lock lock(mutex_);
  destroyed_ = true;
  owned_.clear();
  retired_.clear();
  if (gather_ != nullptr) gather_->abandon();
}

void State::log(const std::string& text) const {
  if (options_.communication.log) options_.communication.log(LogLevel::kDebug, text);
}

void State::require_usable() const {
  if (destroyed_) throw Error(ErrorCode::kDestroyed, "this manager was destroyed", rank());
}

bool State::initialized() const {
  const std::scoped_lock lock(mutex_);
  if (destroyed_) return false;
  return gather_ != nullptr ? gather_->initialized() : !live().empty();
}

std::vector<std::shared_ptr<Entry>> State::live() const {
  std::vector<std::shared_ptr<Entry>> entries = cache_.live();
  for (const Owned& owned : owned_)
    entries.push_back(owned.entry);
  return entries;
}

Status State::destroy_owned() {
  Status status;
  for (const Owned& owned : owned_) {
    status = first_bad(status, owned.entry->communication.destroy());
    retired_.push_back(owned.entry);
  }
  owned_.clear();
  return status;
}

// A rank may have dropped a communication that others still have: it takes part in that one's end by a barrier.
Status State::destroy_shared() {
  const std::vector<std::shared_ptr<Entry>> own = cache_.live();
  std::map<std::uint64_t, std::shared_ptr<Entry>> everyones;
  std::string ordinals;
  for (const auto& entry : own)
    ordinals += std::to_string(entry->ordinal) + " ";
  Status status;
  try {
    for (const std::string& text : communication::gather_texts(group(), ordinals)) {
      std::istringstream stream(text);
      for (std::uint64_t ordinal = 0; stream >> ordinal;)
        everyones.try_emplace(ordinal);
    }
  } catch (const Error& error) {
    status = communication::status_of(error, rank(), Phase::kDestroy);
  }
  for (const auto& entry : own)
    everyones[entry->ordinal] = entry;
  for (const auto& [ordinal, entry] : everyones) {
    if (entry != nullptr) {
      status = first_bad(status, entry->communication.destroy());
      continue;
    }
    try {
      group().barrier();
    } catch (const Error& error) {
      status = first_bad(status, communication::status_of(error, rank(), Phase::kDestroy));
    }
  }
  return status;
}

Status State::cleanup() {
  const std::scoped_lock lock(mutex_);
  require_usable();
  if (strategy_->scheme != Scheme::kGrowing && strategy_->scheme != Scheme::kBySizes) {
    throw Error(ErrorCode::kUnsupported,
                "`" + std::string(info_->name) + "` has nothing to clean up; destroy() ends its communications",
                rank());
  }
  return destroy_owned();
}

Status State::destroy() {
  const std::scoped_lock lock(mutex_);
  if (std::exchange(destroyed_, true)) return {};
  Status status = destroy_owned();
  if (gather_ != nullptr) status = first_bad(status, gather_->destroy());
  if (strategy_->scheme == Scheme::kShared) status = first_bad(status, destroy_shared());
  return status;
}

}  // namespace tokenyard::manager
