// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "tokenyard/error.h"

#include "cli/cuda/devices.h"
#include "cli/cuda/stream_objects.h"
#include "cli/rank_device.h"
#include "cli/rounds.h"
#include "engine/cuda/memory.h"

namespace tokenyard::cli {
namespace {

using engine::cuda::DeviceMemory;
using engine::cuda::make_device_memory;
using fabric::cuda::require;

// Bytes from the first element to behind the last one.
std::int64_t span_of(const TensorView& view) {
  if (view.num_elements() == 0) return 0;
  std::int64_t last = 0;
  for (int i = 0; i < view.num_dims; ++i) {
    const auto at = static_cast<std::size_t>(i);
    last += (view.shape[at] - 1) * view.strides[at];
  }
  return (last + 1) * size_of(view.dtype);
}

int made_current(int device) {
  require(cudaSetDevice(device), "cudaSetDevice", "of device " + std::to_string(device));
  return device;
}

class CudaRankDevice final : public RankDevice {
 public:
  CudaRankDevice(int device, bool mapped_host)
      : device_(made_current(device)), mapped_host_(mapped_host), stream_(make_stream()) {}

  ~CudaRankDevice() override { static_cast<void>(cudaStreamSynchronize(stream_.get())); }

  CudaRankDevice(const CudaRankDevice&) = delete;
  CudaRankDevice& operator=(const CudaRankDevice&) = delete;
  CudaRankDevice(CudaRankDevice&&) = delete;
  CudaRankDevice& operator=(CudaRankDevice&&) = delete;

  [[nodiscard]] CommunicationOptions communication_options(int num_threads) const override {
    CommunicationOptions options = round_options(num_threads);
    options.engine = EngineKind::kCuda;
    options.device = device_;
    options.allow_mapped_host = mapped_host_;
    return options;
  }

  [[nodiscard]] Stream stream() const override { return {.native = stream_.get()}; }

  [[nodiscard]] TensorView bring(const TensorView& host) override {
    if (!host.defined()) return host;
    // A tensor without rows has an address too, by which its host side is found.
    memory_.push_back(make_device_memory(device_, std::max<std::int64_t>(span_of(host), 1)));
    TensorView tensor = host;
    tensor.data = memory_.back().get();
    tensor.device = {.kind = DeviceKind::kCuda, .index = device_};
    brought_[tensor.data] = host.as<std::byte>();
    store(tensor);
    synchronize();
    return tensor;
  }

  [[nodiscard]] TensorView host_side(const TensorView& tensor) override {
    if (!tensor.defined() || tensor.device.kind == DeviceKind::kCpu) return tensor;
    TensorView host = tensor;
    host.device = {};
    const auto brought = brought_.find(tensor.data);
    if (brought != brought_.end()) {
      host.data = brought->second;
      return host;
    }
    std::vector<std::byte>& mirror = mirrors_[tensor.data];
    mirror.resize(std::max(mirror.size(), static_cast<std::size_t>(span_of(tensor))));
    host.data = mirror.data();
    return host;
  }

  TensorView load(const TensorView& tensor) override {
    const TensorView host = host_side(tensor);
    copy(host, tensor);
    synchronize();
    return host;
  }

  void store(const TensorView& tensor) override { copy(tensor, host_side(tensor)); }

  void finish(const Communication& communication, const Status& status) override {
    require_ok(status);
    synchronize();
    require_ok(communication.poll());
  }

  double timed(const Communication& communication, const Phase& phase) override {
    start_.record(stream_.get());
    const Status status = phase();
    end_.record(stream_.get());
    finish(communication, status);
    return end_.microseconds_since(start_);
  }

  // Ranks meet once: in a model, too, nothing but the device's own order stands between the phases. Captured rounds
  // follow another one, whose end the devices reach together; the hosts' launches differ by more than small rounds
  // take.
  RoundTimes play(const Communication& communication, const Round& round) override {
    round.meet();
    if (timed_graph_ != nullptr) {
      launch(stream_.get(), graph_);
      launch(stream_.get(), timed_graph_);
    } else {
      put_on_stream(round, false);
    }
    finish(communication, {});
    return {.dispatch_us = between_.microseconds_since(start_),
            .combine_us = end_.microseconds_since(between_),
            .round_us = end_.microseconds_since(start_)};
  }

  void capture(const Round& round) override {
    timed_graph_ = capture_graph(stream_.get(), [&] { put_on_stream(round, true); });
    graph_ = capture_graph(stream_.get(), [&] {
      require_ok(round.dispatch());
      require_ok(round.combine());
    });
  }

  double train(const Communication& communication, int num_rounds) override {
    start_.record(stream_.get());
    for (int i = 0; i < num_rounds; ++i)
      launch(stream_.get(), graph_);
    end_.record(stream_.get());
    finish(communication, {});
    return end_.microseconds_since(start_) / num_rounds;
  }

 private:
  void put_on_stream(const Round& round, bool captured) {
    start_.record(stream_.get(), captured);
    require_ok(round.dispatch());
    between_.record(stream_.get(), captured);
    require_ok(round.combine());
    end_.record(stream_.get(), captured);
  }

  void copy(const TensorView& to, const TensorView& from) {
    const auto bytes = static_cast<std::size_t>(span_of(to));
    if (bytes == 0 || to.data == from.data) return;
    require(cudaMemcpyAsync(to.data, from.data, bytes, cudaMemcpyDefault, stream_.get()), "cudaMemcpyAsync",
            "of " + std::to_string(bytes) + " bytes");
  }

  void synchronize() { require(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"); }

  int device_;
  bool mapped_host_;
  StreamObject<cudaStream_t> stream_;
  std::vector<DeviceMemory> memory_;
  std::map<const void*, std::byte*> brought_;              // host sides, by address on the device
  std::map<const void*, std::vector<std::byte>> mirrors_;  // of tensors that others made
  TimedEvent start_, between_, end_;
  StreamObject<cudaGraphExec_t> timed_graph_, graph_;  // with events around the phases, and without
};

}  // namespace

std::unique_ptr<RankDevice> make_cuda_rank_device(int device, bool mapped_host) {
  return std::make_unique<CudaRankDevice>(device, mapped_host);
}

}  // namespace tokenyard::cli
