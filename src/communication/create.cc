// SPDX-License-Identifier: Apache-2.0
// Creation and the end of a communication: what is collective and not a round. Growth is in growth.cc.
#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "communication/agreement.h"
#include "communication/core.h"
#include "system/host.h"

namespace tokenyard::communication {

Core::Core(Group group,
           const Backend& backend,
           const MoeParams& params,
           const BackendConfig& config,
           CommunicationOptions options)
    : group_(std::move(group)),
      config_(config),
      options_(std::move(options)),
      limits_{.backend = &backend,
              .params = params,
              .rank = group_.rank(),
              .num_ranks = group_.num_ranks(),
              .narrower_rows = backend.info.contract.grows} {
  if (byte_budget_of(backend, config) > 0) sub_rounds_.emplace(Budget{.made_with = params, .config = config});
}

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
  if (options_.num_threads < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "num_threads is " + std::to_string(options_.num_threads) + "; it must be at least 1");
  }
  if (options_.deadline.count() < 1 || options_.first_round_deadline.count() < 1) {
    throw Error(ErrorCode::kInvalidArgument, "deadlines must be at least 1 ms");
  }
  plan_window();
  Fields fields{{"backend", std::string(info().name)},
                {"engine", std::string(engine::find_engine(options_.engine).name)},
                {"initial_epoch", std::to_string(options_.initial_epoch)},
                {"allow_mapped_host", std::to_string(static_cast<int>(options_.allow_mapped_host))}};
  for (const Fields& more : {fields_of(params()), limits_.backend->fields(config_)}) {
    fields.insert(fields.end(), more.begin(), more.end());
  }
  return joined(fields);
}

// bad_alloc, length_error: the other ranks must hear of them too.
Error Core::failure_of(const std::exception& exception) const {
  return {ErrorCode::kSystem,
          std::string("rank ").append(std::to_string(limits_.rank)).append(": ").append(exception.what()),
          limits_.rank};
}

std::optional<Error> Core::failure_in(const std::function<void()>& step) const {
  try {
    step();
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& exception) {
    return failure_of(exception);
  }
  return std::nullopt;
}

bool Core::uses_queues() const {
  return limits_.plan.spec.transport == protocol::Transport::kQueue;
}

// On GPUs each communication has queues of its own: graphs and streams decide when its operations run, so turns that
// the host takes would say nothing.
bool Core::shares_queues() const {
  return uses_queues() && engine::find_engine(options_.engine).memory == DeviceKind::kCpu;
}

// Everything that must agree, in one exchange; a rank whose arguments make no sense says so in its place. What ranks
// offer of their queues comes with it, in a line of its own, for it may differ.
std::vector<std::string> Core::require_agreement() {
  std::string text = "\n";
  const std::optional<Error> failure = failure_in([&] {
    const std::string agreed = agreed_text();
    if (uses_queues()) {
      if (shares_queues()) queues_ = queues_of(group_, limits_.plan.shape.queue_bytes);
      text = queue_offer(group_, queues_) + "\n";
    }
    text += agreed;
  });
  std::vector<std::string> texts = gather_texts(group_, text, failure);
  std::vector<std::string> offers;
  for (std::string& each : texts) {
    const std::size_t end = std::min(each.find('\n'), each.size());
    offers.push_back(each.substr(0, end));
    each.erase(0, end + 1);
  }
  require_equal(texts, limits_.rank);
  return offers;
}

void Core::plan_window() {
  if (!sub_rounds_) {
    limits_.plan = plan_checked(*limits_.backend, params(), config_, limits_.num_ranks);
    const bool on_gpu = engine::find_engine(options_.engine).memory == DeviceKind::kCuda;
    if (on_gpu && limits_.plan.gpu_queue_bytes > 0) limits_.plan.shape.queue_bytes = limits_.plan.gpu_queue_bytes;
    // A GPU's line crosses PCIe as two or more parts, each of which the other may see alone.
    limits_.plan.shape.whole_lines = !options_.allow_mapped_host;
    return;
  }
  limits_.plan = plan_of_budget(*limits_.backend, sub_rounds_->budget(), limits_.num_ranks);
  limits_.params.top_k = limits_.params.hidden_size = 1;  // until the first call
  limits_.params.num_experts = std::max(1, limits_.params.num_experts);
}

void Core::require_one_host() const {
  const std::vector<std::string> hosts = gather_texts(group_, system::host_identity());
  const std::string& own = hosts[static_cast<std::size_t>(limits_.rank)];
  const auto other = std::ranges::find_if(hosts, [&own](const std::string& host) { return host != own; });
  if (other == hosts.end()) return;
  const int peer = static_cast<int>(other - hosts.begin());
  throw Error(ErrorCode::kUnsupported,
              "rank " + std::to_string(limits_.rank) + ": rank " + std::to_string(peer) +
                  " is on another host, and intra_host_only refuses peers on other hosts",
              limits_.rank, peer);
}

// All ranks do it, or all throw with the reason of one that could not.
void Core::all_or_none(const std::function<void()>& step) const {
  gather_texts(group_, "", failure_in(step));
}

void Core::build() {
  const std::vector<std::string> offers = require_agreement();
  if (limits_.plan.one_host) require_one_host();
  try {
    if (uses_queues()) queue_agreement_ = agree_on_queues(group_, offers, queues_);
    make_window();
  } catch (...) {
    tear_down(ErrorCode::kDestroyed);
    throw;
  }
  const std::string rows = sub_rounds_ ? "a byte budget" : "hidden_size " + std::to_string(limits_.params.hidden_size);
  log(LogLevel::kInfo, std::string(info().name) + ": rank " + std::to_string(limits_.rank) + " of " +
                           std::to_string(limits_.num_ranks) + ", " + rows + ", window " +
                           std::to_string(layout_.bytes()) + " bytes" +
                           (options_.allow_mapped_host ? " in mapped host memory" : "") +
                           (queues_ == nullptr ? ""
                                               : ", queues " + std::to_string(queues_->layout().bytes()) + " bytes" +
                                                     (queue_agreement_.share ? " shared" : "")));
}

// New queues where ranks have none in common that this communication could use.
void Core::make_queues(std::unique_ptr<fabric::Window> window, const protocol::QueueLayout& layout) {
  if (window != nullptr) {
    queues_ = std::make_shared<engine::SharedQueues>(queue_agreement_.generation, std::move(window), layout,
                                                     options_.initial_epoch);
  }
  const MoeParams& own = params();
  queues_->join(queue_agreement_.user, "num_experts " + std::to_string(own.num_experts) + ", top_k " +
                                           std::to_string(own.top_k) + ", hidden_size " +
                                           std::to_string(own.hidden_size) + ", max_tokens_per_rank " +
                                           std::to_string(own.max_tokens_per_rank));
}

void Core::make_window() {
  layout_ = protocol::WindowLayout::of(limits_.plan.shape);
  const auto deadline = std::chrono::duration_cast<std::chrono::milliseconds>(options_.first_round_deadline);
  const bool makes_queues = uses_queues() && !queue_agreement_.share;
  const auto queue_layout = protocol::QueueLayout::of(limits_.num_ranks, limits_.plan.shape.queue_bytes);
  std::unique_ptr<fabric::Window> queue_window;
  if (makes_queues) queues_.reset();
  all_or_none([&] {
    const engine::EngineInfo& engine = engine::find_engine(options_.engine);
    const fabric::FabricInfo& fabric = fabric::find_fabric(engine.memory);
    window_ = fabric.allocate({.bytes = layout_.bytes() + engine.extra_window_bytes(limits_.params, layout_),
                               .device = {engine.memory, options_.device},
                               .allow_mapped_host = options_.allow_mapped_host});
    limits_.device = window_->device();
    contract_ = info().contract;
    if (limits_.device.kind == DeviceKind::kCuda && contract_.capturable) contract_.counts_on = CountsOn::kDevice;
    contract_.takes_turns = shares_queues();
    if (makes_queues) {
      queue_window = fabric.allocate({.bytes = queue_layout.bytes(),
                                      .device = {engine.memory, options_.device},
                                      .allow_mapped_host = options_.allow_mapped_host});
    }
  });
  if (makes_queues) all_or_none([&] { queue_window->connect(group_, deadline); });
  all_or_none([&] {
    window_->connect(group_, deadline);
    if (uses_queues()) make_queues(std::move(queue_window), queue_layout);
    engine_ = engine::find_engine(options_.engine)
                  .make({.rank = limits_.rank,
                         .num_ranks = limits_.num_ranks,
                         .params = limits_.params,
                         .spec = limits_.plan.spec,
                         .layout = layout_,
                         .deadline = options_.deadline,
                         .first_round_deadline = options_.first_round_deadline,
                         .num_threads = options_.num_threads,
                         .initial_epoch = options_.initial_epoch,
                         .queues = queues_.get(),
                         .queue_user = queue_agreement_.user},
                        *window_);
    if (limits_.plan.max_num_sms > 0) sm_budget_ = SmBudget(limits_.plan.max_num_sms, engine_->max_blocks());
    received_ = std::make_unique<Received>(limits_, layout_, *engine_);
    pool_ = std::make_shared<HandlePool>();
    pool_->core = this;
    make_routes();
  });
  if (makes_queues && shares_queues()) publish_queues(group_, queues_);
}

// On a GPU memory is not made inside a round, where it would wait for kernels that wait for this rank.
void Core::make_routes() {
  if (limits_.device.kind == DeviceKind::kCpu) return;
  // Handles that replay are kept.
  constexpr int kKeptRoutes = 8;
  const int routes = info().contract.max_in_flight + 1 +
                     (info().contract.handle_use == HandleUse::kReplay && !sub_rounds_ ? kKeptRoutes : 0);
  std::vector<Route*> made;
  made.reserve(static_cast<std::size_t>(routes));
  for (int i = 0; i < routes; ++i)
    made.push_back(&take_route());
  pool_->free.assign(made.begin(), made.end());
}

void Core::tear_down(ErrorCode why) {
  if (pool_ != nullptr) {
    pool_->core = nullptr;
    pool_->gone = why;
    // Handles that live on need nothing of it, and on a GPU giving memory back is no affair of theirs.
    for (const auto& route : pool_->routes)
      route->round.memory.reset();
  }
  pool_.reset();
  combine_section_of_ = nullptr;
  received_.reset();
  engine_.reset();
  if (queues_ != nullptr) queues_->leave(queue_agreement_.user);
  queues_.reset();
  window_.reset();
}

namespace {

// What a rank brings to a reset.
struct Standing {
  std::uint32_t epoch = 0;
  std::uint32_t turn = 0;
  std::uint32_t faulted = 0;  // the queues
};

}  // namespace

// A fault of the queues that only some ranks have seen becomes every rank's, so that all agree on which of their
// communications have yet to be reset.
void Core::set_back_queues(std::uint32_t turn, int faulted_rank) {
  if (faulted_rank >= 0) {
    queues_->fail(
        {.code = StatusCode::kAborted, .fault = {.rank = limits_.rank, .peer = faulted_rank, .phase = Phase::kReset}});
  }
  queues_->set_back(turn);
}

Status Core::reset() {
  require_usable();
  require_no_capture("reset()");
  const auto visit = visit_queues();
  Standing agreed{.epoch = engine_->latest_epoch()};
  if (queues_ != nullptr) {
    agreed.turn = queues_->latest_turn();
    agreed.faulted = queues_->faulted() ? 1 : 0;
  }
  int faulted_rank = -1;
  try {
    // The group's own deadline: ranks come here from waits that may last two deadlines longer than this rank's.
    const auto gathered = group_.all_gather(std::as_bytes(std::span(&agreed, 1)));
    for (std::size_t rank = 0; rank < gathered.size(); ++rank) {
      Standing other;
      std::memcpy(&other, gathered[rank].data(), std::min(gathered[rank].size(), sizeof(other)));
      if (protocol::reached(other.epoch, agreed.epoch)) agreed.epoch = other.epoch;
      if (protocol::reached(other.turn, agreed.turn)) agreed.turn = other.turn;
      if (other.faulted != 0 && faulted_rank < 0) faulted_rank = static_cast<int>(rank);
    }
    combine_section_of_ = nullptr;
    for (const auto& route : pool_->routes) {
      route->views_open = false;
      if (route->state != RouteState::kFree) route->state = RouteState::kAborted;
    }
    if (queues_ != nullptr) set_back_queues(agreed.turn + 1, faulted_rank);
    engine_->reset(agreed.epoch + 1);
    group_.barrier();
  } catch (const Error& error) {
    return status_of(error, limits_.rank, Phase::kReset);
  }
  return {};
}

Status Core::destroy() {
  require_no_capture("destroy()");
  if (std::exchange(destroyed_, true)) return {};
  Status status;
  try {
    if (engine_ != nullptr) engine_->drain();
  } catch (const Error& error) {
    status = status_of(error, limits_.rank, Phase::kDestroy);  // the peers wait for this rank all the same
  }
  bool met = true;
  try {
    // After a fault some rank may be gone for good; the others come within the two deadlines of their last wait.
    if (engine_ == nullptr || engine_->fault().ok()) {
      group_.barrier();
    } else {
      group_.barrier(2 * options_.deadline);
    }
  } catch (const Error& error) {
    status = status_of(error, limits_.rank, Phase::kDestroy);
    met = false;
  }
  tear_down(ErrorCode::kDestroyed);
  if (!met || limits_.device.kind == DeviceKind::kCpu) return status;
  // Giving memory back waits for the device, where another rank's next kernel could already wait for this rank. All
  // ranks meet, also those that share no device with another: who meets must not depend on the rank.
  try {
    group_.barrier();
  } catch (const Error& error) {
    status = status_of(error, limits_.rank, Phase::kDestroy);
  }
  return status;
}

}  // namespace tokenyard::communication
