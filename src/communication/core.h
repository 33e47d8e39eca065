// SPDX-License-Identifier: Apache-2.0
// What a Communication is behind its face: one backend's plan, a window, an engine, and the handles in between.
// Thread rule: one thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tokenyard/communication.h"

#include "communication/arguments.h"
#include "communication/handle.h"
#include "communication/queue_sharing.h"
#include "communication/received.h"
#include "communication/sub_rounds.h"
#include "engine/engine.h"
#include "fabric/window.h"

namespace tokenyard::communication {

class Core {
 public:
  // Collective. `backend` moves tokens.
  static std::unique_ptr<Core> create(const Group& group,
                                      const Backend& backend,
                                      const MoeParams& params,
                                      const BackendConfig& config,
                                      const CommunicationOptions& options);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;
  Core(Core&&) = delete;
  Core& operator=(Core&&) = delete;
  ~Core();

  [[nodiscard]] const BackendInfo& info() const { return limits_.backend->info; }

  [[nodiscard]] const Contract& contract() const { return contract_; }

  // As given at creation or growth; with a byte budget each call has its own besides.
  [[nodiscard]] const MoeParams& params() const {
    return sub_rounds_ ? sub_rounds_->budget().made_with : limits_.params;
  }

  [[nodiscard]] const BackendConfig& config() const { return config_; }

  [[nodiscard]] const Group& group() const { return group_; }

  [[nodiscard]] std::int64_t window_bytes() const {
    return (window_ == nullptr ? 0 : window_->bytes()) + (queues_ == nullptr ? 0 : queues_->layout().bytes());
  }

  [[nodiscard]] int max_sms() const {
    if (engine_ == nullptr) return 0;
    return sm_budget_ ? sm_budget_->max_sms_used() : engine_->max_blocks();
  }

  [[nodiscard]] bool captured() const { return engine_ != nullptr && engine_->recorded(); }

  // `in_one_call`: the receive half follows before the caller's tensors may change.
  Status dispatch_send(const DispatchInput& input,
                       const DispatchOptions& options,
                       DispatchResult& result,
                       bool in_one_call);
  Status dispatch_receive(const DispatchOptions& options, DispatchResult& result);
  Status combine_send(Handle& handle,
                      const CombineInput& input,
                      const CombineOptions& options,
                      const TensorView* output);
  Status combine_receive(Handle& handle, const TensorView& output);
  TensorView combine_input(const Handle& handle, Dtype dtype);
  TensorView combine_input(std::int64_t num_rows, Dtype dtype);

  [[nodiscard]] Status poll() const;
  Status reset();
  Status destroy();
  [[nodiscard]] PeerStatistics statistics() const;
  Layout layout(const TensorView& topk_ids, int num_experts);
  void reserve(const MoeParams& params, std::int64_t extra_payload_bytes_per_token);

  // A handle lets go of its route.
  void give_back(Route& route);

  // Null where the backend's contract has no use for the interface.
  [[nodiscard]] SplitPhases* split_phases() { return &split_phases_; }

  [[nodiscard]] RouteQuery* route_query();
  [[nodiscard]] SmBudget* sm_budget();
  [[nodiscard]] Growth* growth();

 private:
  Core(Group group,
       const Backend& backend,
       const MoeParams& params,
       const BackendConfig& config,
       CommunicationOptions options);

  // create.cc. Collective; on failure nothing local is left and every rank throws.
  void build();
  void make_window();
  void make_queues(std::unique_ptr<fabric::Window> window, const protocol::QueueLayout& layout);
  void make_routes();
  void tear_down(ErrorCode why);
  std::string agreed_text();
  std::vector<std::string> require_agreement();
  void plan_window();
  void require_one_host() const;
  void all_or_none(const std::function<void()>& step) const;
  void set_back_queues(std::uint32_t turn, int faulted_rank);
  [[nodiscard]] Error failure_of(const std::exception& exception) const;
  [[nodiscard]] std::optional<Error> failure_in(const std::function<void()>& step) const;
  void log(LogLevel level, const std::string& text) const;

  // growth.cc
  struct Capacity {
    MoeParams params{};
    BackendConfig config{};
  };

  [[nodiscard]] std::optional<Capacity> capacity_for(const MoeParams& wanted, std::int64_t extra) const;
  void require_no_open_round() const;

  void require_usable() const;
  // For what waits for the device.
  void require_no_capture(const char* call) const;
  [[nodiscard]] bool uses_queues() const;
  [[nodiscard]] bool shares_queues() const;  // with other communications of the group
  // Nothing where there are none.
  [[nodiscard]] engine::SharedQueues::Visit visit_queues() const;
  Route& take_route();
  Route& route_of(const Handle& handle) const;
  // The route that the handle still has; null also for the handle of another communication.
  [[nodiscard]] Route* held_by(const Handle& handle) const;
  void free_route(Route& route);
  void release_views(Route& route);

  // What an operation may use that was asked for `given`.
  [[nodiscard]] int num_sms_of(int given) const {
    return given != 0 || !sm_budget_ ? given : sm_budget_->max_sms_used();
  }

  // Whether all rounds that are not combined are in flight, as many on each rank that makes the same calls, or only
  // those whose result is a view, as each rank likes.
  [[nodiscard]] bool counts_rounds() const;
  [[nodiscard]] bool in_flight(const Route& route) const;
  [[nodiscard]] int free_buffer() const;
  void end_round(Route& route, RouteState state);
  // Runs the checks of an operation; when they throw, tells the peers first.
  template <class Checks, class Announce>
  void announcing_misuse(const Stream& stream, Checks&& checks, Announce&& announce) const;
  [[nodiscard]] Route* oldest_uncombined() const;
  void abort_combine(const Handle& handle);
  void refuse_halves(const Handle& handle) const;
  void check_room() const;
  void require_dispatch_room() const;
  void require_combine_room() const;
  // With a byte budget: the calls that follow are of these shapes. Otherwise nothing changes.
  void enter(const Limits& limits);
  void prepare(const DispatchInput& input, const DispatchOptions& options, Route& route);
  Status receive(Route& route);
  engine::CombineRequest prepare_combine_half(const Handle& handle,
                                              const CombineInput& input,
                                              const CombineOptions& options,
                                              const TensorView* output);
  [[nodiscard]] bool in_received_rows(const TensorView& tensor) const;
  [[nodiscard]] bool holds_combine_section(const Route& route) const;
  [[nodiscard]] bool fits_combine_rows(Dtype dtype) const;
  [[nodiscard]] bool between_combine_halves() const;
  [[nodiscard]] Error with_rank(const Error& error) const;

  Group group_;
  BackendConfig config_;
  CommunicationOptions options_;
  Limits limits_;
  Contract contract_;
  protocol::WindowLayout layout_;
  std::unique_ptr<fabric::Window> window_;
  QueueAgreement queue_agreement_;
  QueueOwner queues_;  // outlives the engine
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<Received> received_;
  std::optional<SubRounds> sub_rounds_;  // made from a byte budget
  // Shared with every handle; see handle.h.
  std::shared_ptr<HandlePool> pool_;
  const Route* combine_section_of_ = nullptr;  // whose expert output is being written to the window
  bool destroyed_ = false;

  SplitPhases split_phases_{*this};
  RouteQuery route_query_{*this};
  Growth growth_{*this};
  std::optional<SmBudget> sm_budget_;
  std::vector<std::int32_t> tokens_per_rank_query_;
  std::vector<std::int32_t> tokens_per_expert_query_;
  std::vector<std::uint8_t> is_token_in_rank_query_;
};

}  // namespace tokenyard::communication
