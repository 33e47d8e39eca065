// SPDX-License-Identifier: Apache-2.0
#include "gpu/recorded_round.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "support/check.h"
#include "support/reference.h"

namespace tokenyard::gpu_tests {
namespace {

constexpr int kPoison = 0x7F;  // NaN, and ids that no expert has

constexpr std::array kInputs{&DispatchInput::hidden_states, &DispatchInput::topk_ids, &DispatchInput::topk_weights,
                             &DispatchInput::hidden_states_scale, &DispatchInput::router_logits};
constexpr std::array kOutputs{&DispatchResult::hidden_states, &DispatchResult::topk_ids,
                              &DispatchResult::topk_weights,  &DispatchResult::hidden_states_scale,
                              &DispatchResult::router_logits, &DispatchResult::eplb_gathered_stats,
                              &DispatchResult::source_tokens, &DispatchResult::source_ranges};

cudaGraphExec_t instantiated(cudaGraph_t graph) {
  cudaGraphExec_t exec = nullptr;
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return exec;
}

}  // namespace

Graph::Graph(cudaStream_t stream, const std::function<void()>& record) {
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  try {
    record();
  } catch (...) {
    static_cast<void>(cudaStreamEndCapture(stream, &graph));
    static_cast<void>(cudaGetLastError());
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    throw;
  }
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  exec_ = instantiated(graph);
  check_cuda(cudaGraphUpload(exec_, stream), "cudaGraphUpload");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

Graph::~Graph() {
  static_cast<void>(cudaGraphExecDestroy(exec_));
}

void Graph::launch(cudaStream_t stream) const {
  check_cuda(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch");
}

RecordedRound::RecordedRound(DeviceRounds& rounds,
                             Communication& communication,
                             const support::World& like,
                             const support::RoundPlan& plan,
                             std::int64_t most)
    : rounds_(rounds), communication_(communication), world_(like), plan_(plan), most_(most) {
  const support::RankTensors tensors(like, communication.rank(), false);
  const DispatchInput host = tensors.input();
  for (const auto member : kInputs)
    input_.*member = buffer_for(host.*member);
  for (const TensorView& extra : host.extra_payloads)
    extras_.push_back(buffer_for(extra));
  input_.extra_payloads = extras_;
  if (host.eplb_local_stats.defined()) {
    input_.eplb_local_stats = host.eplb_local_stats;
    input_.eplb_local_stats.data = rounds.keep(span_of(host.eplb_local_stats));
    input_.eplb_local_stats.device = input_.hidden_states.device;
  }
  num_tokens_ = reinterpret_cast<std::int32_t*>(rounds.keep(sizeof(std::int32_t)));
  input_.num_tokens_on_device = num_tokens_;
  const std::int64_t hidden = like.spec.params.hidden_size;
  output_ = TensorView(rounds.keep(most * hidden * size_of(plan.output_dtype)), plan.output_dtype, {most, hidden});
  output_.device = input_.hidden_states.device;
  if (communication.contract().output_layout == OutputLayout::kRankMajor) plan_.runtime_max_tokens = most;
}

TensorView RecordedRound::buffer_for(const TensorView& view) {
  if (!view.defined()) return view;
  TensorView buffer = view;
  buffer.shape[0] = most_;
  buffer.data = rounds_.keep(span_of(buffer));
  buffer.device = {.kind = DeviceKind::kCuda, .index = rounds_.device()};
  return buffer;
}

void RecordedRound::copy_out(const TensorView& view, TensorView& copy, cudaStream_t stream) {
  void* memory = copy.data;
  copy = view;
  if (!view.defined()) return;
  const std::int64_t bytes = span_of(view);
  copy.data = memory != nullptr ? memory : rounds_.keep(bytes);
  check_cuda(cudaMemcpyAsync(copy.data, view.data, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, stream),
             "cudaMemcpyAsync of a result");
}

void RecordedRound::record_dispatch(cudaStream_t stream) {
  DispatchOptions options;
  options.runtime_max_tokens_per_rank = plan_.runtime_max_tokens;
  options.num_worst_tokens = plan_.num_worst_tokens;
  options.stream.native = stream;
  const Status status = communication_.dispatch(input_, options, result_);
  support::check(status.code == StatusCode::kEnqueued, "a captured dispatch: " + status.message());
  for (const auto member : kOutputs)
    copy_out(result_.*member, copies_.*member, stream);
  copies_.extra_payloads.resize(result_.extra_payloads.size());
  for (std::size_t i = 0; i < result_.extra_payloads.size(); ++i)
    copy_out(result_.extra_payloads[i], copies_.extra_payloads[i], stream);
  RowCounts& counts = copies_.counts;
  support::check(result_.counts.rows_per_source.empty(), "host counts of a captured dispatch");
  copy_out(result_.counts.rows_per_source_on_device, counts.rows_per_source_on_device, stream);
  copy_out(result_.counts.tokens_per_source_on_device, counts.tokens_per_source_on_device, stream);
  counts.tokens_per_rank = result_.counts.tokens_per_rank;
}

void RecordedRound::record_combine(cudaStream_t stream) {
  if (!expert_output_.defined()) {
    const std::int64_t hidden = world_.spec.params.hidden_size;
    const std::int64_t rows = support::num_flat_rows(result_.hidden_states);
    TensorView view(nullptr, plan_.expert_dtype, {rows, hidden});
    if (result_.hidden_states.num_dims == 3) {
      view = TensorView(nullptr, plan_.expert_dtype,
                        {result_.hidden_states.shape[0], result_.hidden_states.shape[1], hidden});
    }
    view.data = rounds_.keep(span_of(view));
    view.device = output_.device;
    expert_output_ = view;
  }
  CombineOptions options;
  options.stream.native = stream;
  const Status status = communication_.combine(result_.handle, {.expert_output = expert_output_}, options, output_);
  support::check(status.code == StatusCode::kEnqueued, "a captured combine: " + status.message());
}

void RecordedRound::upload(const TensorView& to, const TensorView& from) const {
  if (!to.defined()) return;
  cudaStream_t stream = rounds_.stream();
  check_cuda(cudaMemsetAsync(to.data, kPoison, static_cast<std::size_t>(span_of(to)), stream), "cudaMemsetAsync");
  const std::int64_t bytes = span_of(from);
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(to.data, from.data, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync of an input");
}

// Rows that nobody sent stay NaN: they must not be read.
void RecordedRound::load_expert_output() const {
  const int rank = communication_.rank();
  const auto rows = support::expect_dispatch(world_, rank, support::layout_rule(communication_, plan_)).rows;
  const support::ExpertData data{.seed = plan_.seed, .dtype = plan_.expert_dtype, .specials = plan_.special_values};
  std::vector<std::byte> all(static_cast<std::size_t>(span_of(expert_output_)), std::byte{0xFF});
  for (const support::ExpectedRow& row : rows) {
    const std::vector<std::byte> bytes = support::expert_row(data, row, rank, world_.spec.params.hidden_size);
    std::memcpy(all.data() + static_cast<std::size_t>(row.position) * bytes.size(), bytes.data(), bytes.size());
  }
  check_cuda(cudaMemcpyAsync(expert_output_.data, all.data(), all.size(), cudaMemcpyHostToDevice, rounds_.stream()),
             "cudaMemcpyAsync of expert output");
  rounds_.synchronize();
}

void RecordedRound::load(const support::World& world, std::uint64_t seed) {
  world_ = world;
  plan_.seed = seed;
  const support::RankTensors tensors(world, communication_.rank(), false);
  const DispatchInput host = tensors.input();
  for (const auto member : kInputs)
    upload(input_.*member, host.*member);
  for (std::size_t i = 0; i < extras_.size(); ++i)
    upload(extras_[i], host.extra_payloads[i]);
  upload(input_.eplb_local_stats, host.eplb_local_stats);
  const auto tokens = static_cast<std::int32_t>(world.rank(communication_.rank()).num_tokens);
  cudaStream_t stream = rounds_.stream();
  check_cuda(cudaMemcpyAsync(num_tokens_, &tokens, sizeof(tokens), cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync of the number of tokens");
  check_cuda(cudaMemsetAsync(output_.data, kPoison, static_cast<std::size_t>(span_of(output_)), stream),
             "cudaMemsetAsync");
  if (expert_output_.defined()) load_expert_output();
  rounds_.synchronize();
}

void RecordedRound::check_tail() const {
  const std::int64_t tokens = world_.rank(communication_.rank()).num_tokens;
  std::vector<std::byte> rows(static_cast<std::size_t>(span_of(output_)));
  TensorView host = output_;
  host.data = rows.data();
  rounds_.to_host(host, output_);
  rounds_.synchronize();
  const auto tail = rows.begin() + tokens * output_.strides[0] * size_of(output_.dtype);
  support::check(std::all_of(tail, rows.end(), [](std::byte byte) { return byte == std::byte{kPoison}; }),
                 "combine wrote to rows beyond num_tokens_on_device");
}

support::RoundPlan RecordedRound::plan_of_replay() {
  support::RoundPlan plan = plan_;
  plan.dispatch_with = [this](Communication& communication, const DispatchInput&, const DispatchOptions&,
                              DispatchResult& result) {
    for (const auto member : kOutputs)
      result.*member = copies_.*member;
    result.extra_payloads = copies_.extra_payloads;
    result.counts = copies_.counts;
    rounds_.show(communication, {}, result);
    return Status{};
  };
  plan.combine_with = [this](Communication&, Handle&, const CombineInput&, const CombineOptions&, TensorView& output) {
    TensorView rows = output_;
    rows.shape[0] = output.shape[0];
    rounds_.to_host(output, rows);
    rounds_.synchronize();
    return Status{};
  };
  return plan;
}

void RecordedRound::check() {
  rounds_.synchronize();
  support::check_ok(communication_.poll(), "poll after a replay");
  const support::RoundPlan plan = plan_of_replay();
  DispatchResult shown;
  support::check_ok(plan.dispatch_with(communication_, {}, {}, shown), "what a replay left");
  support::check_result(communication_, world_, plan, shown, true);
  support::combine_and_check(communication_, world_, plan, shown, shown.handle);
  check_tail();
}

void RecordedRound::check_dispatch() {
  rounds_.synchronize();
  support::check_ok(communication_.poll(), "poll after a replay");
  DispatchResult shown;
  const support::RoundPlan plan = plan_of_replay();
  support::check_ok(plan.dispatch_with(communication_, {}, {}, shown), "what a replay left");
  support::check_result(communication_, world_, plan, shown);
}

}  // namespace tokenyard::gpu_tests
