// SPDX-License-Identifier: Apache-2.0
// What an All2AllManager is behind its face. Shared with handles, which may outlive the manager.
// Thread rule: any thread; every function but `create` takes the lock.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tokenyard/manager.h"

#include "manager/entry.h"
#include "manager/gather_state.h"
#include "manager/strategy.h"

namespace tokenyard::manager {

class State final : public std::enable_shared_from_this<State> {
 public:
  // Collective. A rank that found no strategy brings its `failure`.
  static All2AllManager create(const Strategy* strategy,
                               const ManagerOptions& options,
                               const std::optional<Error>& failure = std::nullopt);
  // The manager goes: frees what is local.
  void abandon();

  [[nodiscard]] const BackendInfo& info() const { return *info_; }

  [[nodiscard]] const ManagerOptions& options() const { return options_; }

  [[nodiscard]] bool spans_hosts() const { return spans_hosts_; }

  [[nodiscard]] bool initialized() const;

  All2AllHandle get_handle(const HandleRequest& request);
  void initialize(const InitializeRequest& request);
  Communication& get_communication();
  Communication& get_communication(const CommunicationSizes& sizes);
  Status cleanup();
  Status destroy();
  void set_num_sms(int num_sms);
  [[nodiscard]] std::optional<int> max_sms_used() const;
  void set_step_num_tokens(std::span<const std::int64_t> num_tokens);

  [[nodiscard]] GatherCalls* gather_calls() { return gather_ == nullptr ? nullptr : &gather_calls_; }

  // Runs one gather call under the lock.
  template <class Call>
  auto gathering(Call&& call) {
    const std::scoped_lock lock(mutex_);
    require_usable();
    return call(*gather_);
  }

 private:
  State(const Strategy& strategy, const ManagerOptions& options, const BackendConfig& config);

  // A communication that the manager owns, and the request that it answers (kBySizes).
  struct Owned {
    CommunicationSizes sizes{};
    std::shared_ptr<Entry> entry;
  };

  // Where communications are made.
  [[nodiscard]] const Group& group() const { return options_.data_group ? *options_.data_group : options_.group; }

  [[nodiscard]] int rank() const { return options_.group.rank(); }

  void require_usable() const;
  void require_scheme(Scheme scheme, std::string_view call) const;
  [[nodiscard]] std::string key_of(const Wanted& wanted) const;
  [[nodiscard]] std::vector<std::shared_ptr<Entry>> live() const;
  std::shared_ptr<Entry> make_entry(const Wanted& wanted);
  void limit_sms(Communication& communication) const;
  [[noreturn]] void fail_together(const Error& error) const;
  [[nodiscard]] Wanted wanted_for(const InitializeRequest& request) const;
  void grow(const InitializeRequest& request, const MoeParams& params);
  Status destroy_owned();
  Status destroy_shared();
  void log(const std::string& text) const;

  const Strategy* strategy_;
  const BackendInfo* info_;
  ManagerOptions options_;
  BackendConfig config_;
  bool spans_hosts_ = false;

  mutable std::recursive_mutex mutex_;
  bool destroyed_ = false;
  std::uint64_t num_made_ = 0;
  std::optional<int> num_sms_;
  HandleCache cache_;         // kShared
  std::vector<Owned> owned_;  // kGrowing, kBySizes
  // Ended ones: small, and whoever still holds a reference is told kDestroyed.
  std::vector<std::shared_ptr<Entry>> retired_;
  std::unique_ptr<GatherState> gather_;  // kGather
  GatherCalls gather_calls_{*this};
};

}  // namespace tokenyard::manager
