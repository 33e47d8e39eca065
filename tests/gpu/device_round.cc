// SPDX-License-Identifier: Apache-2.0
#include "gpu/device_round.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "support/check.h"

namespace tokenyard::gpu_tests {

std::int64_t span_of(const TensorView& view) {
  if (!view.defined() || view.num_elements() == 0) return 0;
  std::int64_t last = 0;
  for (int i = 0; i < view.num_dims; ++i) {
    const auto at = static_cast<std::size_t>(i);
    last += (view.shape[at] - 1) * view.strides[at];
  }
  return (last + 1) * size_of(view.dtype);
}

void check_cuda(cudaError_t outcome, const char* what) {
  support::check(outcome == cudaSuccess, std::string(what) + ": " + cudaGetErrorString(outcome));
}

int num_devices(std::string& reason) {
  int count = 0;
  const cudaError_t outcome = cudaGetDeviceCount(&count);
  if (outcome == cudaSuccess && count > 0) return count;
  reason = outcome == cudaSuccess ? "no CUDA device" : cudaGetErrorString(outcome);
  return 0;
}

namespace {

std::int64_t id_at(const TensorView& ids, std::int64_t row, int slot) {
  const std::byte* at = support::row_of(ids, row);
  return ids.dtype == Dtype::kI64 ? reinterpret_cast<const std::int64_t*>(at)[slot]
                                  : std::int64_t{reinterpret_cast<const std::int32_t*>(at)[slot]};
}

// Not counted on the device; what the ids say, which are checked themselves.
void count_experts(const Communication& communication, int alignment, DispatchResult& result) {
  std::vector<std::int64_t>& counts = result.counts.rows_per_expert;
  std::vector<std::int64_t>& aligned = result.counts.aligned_rows_per_expert;
  counts.clear();
  aligned.clear();
  if (!result.topk_ids.defined()) return;
  const MoeParams& params = communication.params();
  const bool local = communication.contract().id_space == IdSpace::kLocal;
  const std::int64_t first =
      local ? 0 : support::first_expert_of(params, communication.rank(), communication.num_ranks());
  const std::int64_t num = support::num_experts_of(params, communication.rank(), communication.num_ranks());
  counts.assign(static_cast<std::size_t>(num), 0);
  for (std::int64_t row = 0; row < support::num_flat_rows(result.topk_ids); ++row) {
    std::set<std::int64_t> experts;
    for (int slot = 0; slot < params.top_k; ++slot) {
      const std::int64_t id = id_at(result.topk_ids, row, slot);
      if (id >= first && id < first + num) experts.insert(id - first);
    }
    for (const std::int64_t expert : experts)
      ++counts[static_cast<std::size_t>(expert)];
  }
  for (const std::int64_t rows : counts)
    aligned.push_back((rows + alignment - 1) / alignment * alignment);
}

}  // namespace

DeviceRounds::DeviceRounds(const Options& options) : options_(options) {
  check_cuda(cudaSetDevice(options.device), "cudaSetDevice");
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, static_cast<std::size_t>(options.arena_bytes)), "cudaMalloc");
  arena_ = static_cast<std::byte*>(memory);
}

DeviceRounds::~DeviceRounds() {
  static_cast<void>(cudaStreamSynchronize(stream_));
  static_cast<void>(cudaFree(arena_));
  static_cast<void>(cudaStreamDestroy(stream_));
}

std::byte* DeviceRounds::take(std::int64_t bytes) {
  std::byte* memory = arena_ + used_;
  used_ += (bytes + 255) / 256 * 256;
  support::check(used_ + kept_ <= options_.arena_bytes, "the arena of a test is too small");
  return memory;
}

std::byte* DeviceRounds::keep(std::int64_t bytes) {
  kept_ += (bytes + 255) / 256 * 256;
  support::check(used_ + kept_ <= options_.arena_bytes, "the arena of a test is too small");
  return arena_ + options_.arena_bytes - kept_;
}

TensorView DeviceRounds::to_device(const TensorView& host) {
  if (!host.defined()) return host;
  TensorView device = host;
  device.device = {.kind = DeviceKind::kCuda, .index = options_.device};
  const std::int64_t bytes = span_of(host);
  // The same place within 64 bytes, so that alignments are as the test meant them.
  const auto shift = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(host.data) % 64);
  device.data = take(bytes + shift) + shift;
  if (bytes == 0) return device;
  synchronize();  // as in to_host
  check_cuda(cudaMemcpyAsync(device.data, host.data, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream_),
             "cudaMemcpyAsync to the device");
  return device;
}

// A copy of pageable memory that waits for a round inside of the driver keeps other ranks' calls waiting, and the round
// waits for those ranks.
void DeviceRounds::to_host(const TensorView& host, const TensorView& device) const {
  const std::int64_t bytes = span_of(device);
  if (bytes == 0) return;
  synchronize();
  check_cuda(cudaMemcpyAsync(host.data, device.data, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, stream_),
             "cudaMemcpyAsync to the host");
}

void DeviceRounds::synchronize() const {
  check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

TensorView DeviceRounds::mirror(const TensorView& device) {
  if (!device.defined()) return device;
  mirrors_.push_back(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(span_of(device)) + 1));
  TensorView host = device;
  host.device = {};
  host.data = mirrors_.back().get();
  to_host(host, device);
  return host;
}

// What a phase came to: everything has run when this returns.
Status DeviceRounds::outcome(Communication& communication, const Status& status) const {
  if (!status.ok()) return status;
  support::check(status.code == StatusCode::kEnqueued, "a phase on a GPU is enqueued");
  synchronize();
  return communication.poll();
}

Status DeviceRounds::run_dispatch(Communication& communication,
                                  const DispatchInput& input,
                                  const DispatchOptions& options,
                                  DispatchResult& result) const {
  if (!options_.halves) return communication.dispatch(input, options, result);
  auto* split = communication.get<SplitPhases>();
  const Status sent = split->dispatch_send(input, options, result);
  if (!sent.ok()) return sent;
  spoil_sent();
  return split->dispatch_receive(options, result);
}

Status DeviceRounds::run_combine(Communication& communication,
                                 Handle& handle,
                                 const CombineInput& input,
                                 const CombineOptions& options,
                                 TensorView& output) const {
  if (!options_.halves) return communication.combine(handle, input, options, output);
  auto* split = communication.get<SplitPhases>();
  const Status sent = split->combine_send(handle, input, options);
  if (!sent.ok()) return sent;
  spoil_sent();
  return split->combine_receive(handle, output);
}

void DeviceRounds::spoil_sent() const {
  check_cuda(cudaMemsetAsync(arena_ + sent_begin_, 0xFF, static_cast<std::size_t>(sent_end_ - sent_begin_), stream_),
             "cudaMemsetAsync");
}

// Where counts stay on the device.
void DeviceRounds::bring_counts(const Communication& communication,
                                const DispatchOptions& options,
                                DispatchResult& result) {
  RowCounts& counts = result.counts;
  if (!counts.rows_per_source_on_device.defined()) return synchronize();
  const TensorView rows = mirror(counts.rows_per_source_on_device);
  const TensorView tokens = mirror(counts.tokens_per_source_on_device);
  const TensorView by_expert = mirror(counts.rows_per_expert_on_device);
  synchronize();
  std::int64_t all = 0;
  for (int source = 0; source < communication.num_ranks(); ++source) {
    counts.rows_per_source.push_back(rows.as<std::int32_t>()[source]);
    counts.tokens_per_source.push_back(tokens.as<std::int32_t>()[source]);
    all += counts.rows_per_source.back();
  }
  counts.num_rows = std::min(all, options.num_worst_tokens.value_or(all));
  counts.dropped_rows = all - counts.num_rows;
  if (!by_expert.defined()) return count_experts(communication, options.expert_alignment, result);
  const auto* begin = by_expert.as<std::int32_t>();
  counts.rows_per_expert.assign(begin, begin + by_expert.num_elements());
  counts.aligned_rows_per_expert = counts.rows_per_expert;
}

DispatchOptions DeviceRounds::on_device(const DispatchOptions& options) {
  DispatchOptions with_stream = options;
  with_stream.stream.native = stream_;
  with_stream.num_sms = options_.num_sms;
  callers_.clear();
  statistics_.clear();
  into_ = {};
  for (TensorView* view : {&with_stream.routes_per_expert, &with_stream.wait_per_source}) {
    if (!view->defined()) continue;
    statistics_.emplace_back(*view, to_device(*view));
    *view = statistics_.back().second;
  }
  if (options.into == nullptr) return with_stream;
  const auto bring = [&](const TensorView& host) {
    if (!host.defined()) return host;
    callers_.emplace_back(host, to_device(host));
    return callers_.back().second;
  };
  into_.hidden_states = bring(options.into->hidden_states);
  into_.hidden_states_scale = bring(options.into->hidden_states_scale);
  into_.topk_ids = bring(options.into->topk_ids);
  into_.topk_weights = bring(options.into->topk_weights);
  into_.router_logits = bring(options.into->router_logits);
  for (const TensorView& extra : options.into->extra_payloads)
    into_.extra_payloads.push_back(bring(extra));
  with_stream.into = &into_;
  return with_stream;
}

Status DeviceRounds::dispatch(Communication& communication,
                              const DispatchInput& input,
                              const DispatchOptions& options,
                              DispatchResult& result) {
  if (num_dispatches_++ % options_.rounds_in_flight == 0) {
    used_ = 0;
    mirrors_.clear();
  }
  sent_begin_ = used_;
  extras_.clear();
  DispatchInput brought = input;
  for (TensorView* view : {&brought.hidden_states, &brought.topk_ids, &brought.topk_weights,
                           &brought.hidden_states_scale, &brought.router_logits, &brought.eplb_local_stats})
    *view = to_device(*view);
  for (const TensorView& extra : input.extra_payloads)
    extras_.push_back(to_device(extra));
  brought.extra_payloads = extras_;
  sent_end_ = used_;
  const DispatchOptions with_stream = on_device(options);
  const Status status = outcome(communication, run_dispatch(communication, brought, with_stream, result));
  if (status.code == StatusCode::kOk) show(communication, options, result);
  return status;
}

Status DeviceRounds::receive(Communication& communication, const DispatchOptions& options, DispatchResult& result) {
  const DispatchOptions with_stream = on_device(options);
  const Status status = outcome(communication, communication.get<SplitPhases>()->dispatch_receive(with_stream, result));
  if (status.code == StatusCode::kOk) show(communication, options, result);
  return status;
}

void DeviceRounds::show(TensorView& view) {
  for (const auto& [host, device] : callers_) {
    if (view.data != device.data) continue;
    to_host(host, device);
    view.data = host.data;
    view.device = {};
    return;
  }
  view = mirror(view);
}

void DeviceRounds::show(const Communication& communication, const DispatchOptions& options, DispatchResult& result) {
  for (const auto& [host, device] : statistics_)
    to_host(host, device);
  for (TensorView* view :
       {&result.hidden_states, &result.hidden_states_scale, &result.topk_ids, &result.topk_weights,
        &result.router_logits, &result.eplb_gathered_stats, &result.source_tokens, &result.source_ranges})
    show(*view);
  for (TensorView& extra : result.extra_payloads)
    show(extra);
  bring_counts(communication, options, result);
}

Status DeviceRounds::combine(Communication& communication,
                             Handle& handle,
                             const CombineInput& input,
                             const CombineOptions& options,
                             TensorView& output) {
  CombineInput brought = input;
  sent_begin_ = used_;
  TensorView window;
  if (options_.zero_copy) window = communication.combine_input(handle, input.expert_output.dtype);
  if (window.defined()) {
    const std::int64_t bytes = support::last_dim_bytes(window);
    for (std::int64_t row = 0; row < support::num_flat_rows(window); ++row) {
      check_cuda(cudaMemcpyAsync(support::row_of(window, row), support::row_of(input.expert_output, row),
                                 static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream_),
                 "cudaMemcpyAsync of expert output");
    }
    brought.expert_output = window;
  } else {
    brought.expert_output = to_device(input.expert_output);
  }
  brought.topk_weights = to_device(input.topk_weights);
  sent_end_ = used_;
  for (TensorView& bias : brought.bias)
    bias = to_device(bias);
  CombineOptions with_stream = options;
  with_stream.stream.native = stream_;
  with_stream.num_sms = options_.num_sms;
  TensorView output_on_device = to_device(output);
  with_stream.topk_weights_output = to_device(options.topk_weights_output);
  const Status status =
      outcome(communication, run_combine(communication, handle, brought, with_stream, output_on_device));
  if (status.code != StatusCode::kOk) return status;
  to_host(output, output_on_device);
  to_host(options.topk_weights_output, with_stream.topk_weights_output);
  synchronize();
  return status;
}

support::RoundPlan DeviceRounds::through_device(support::RoundPlan plan) {
  plan.dispatch_with = [this](Communication& communication, const DispatchInput& input, const DispatchOptions& options,
                              DispatchResult& result) { return dispatch(communication, input, options, result); };
  plan.combine_with = [this](Communication& communication, Handle& handle, const CombineInput& input,
                             const CombineOptions& options,
                             TensorView& output) { return combine(communication, handle, input, options, output); };
  return plan;
}

}  // namespace tokenyard::gpu_tests
