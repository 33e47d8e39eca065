// SPDX-License-Identifier: Apache-2.0
// The CUDA engine: kernels that move rows between windows in GPU memory. Everything is enqueued on the caller's stream;
// what goes wrong later is found on a board in host memory. The rules are those of docs/protocol.md, the kernels those
// of docs/design/0005-cuda-engine.md.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <vector>

#include "engine/cuda/memory.h"
#include "engine/cuda/tasks.h"
#include "engine/engine.h"

namespace tokenyard::engine::cuda {

class CudaEngine final : public Engine {
 public:
  CudaEngine(const Setup& setup, fabric::Window& window);
  ~CudaEngine() override;
  CudaEngine(const CudaEngine&) = delete;
  CudaEngine& operator=(const CudaEngine&) = delete;
  CudaEngine(CudaEngine&&) = delete;
  CudaEngine& operator=(CudaEngine&&) = delete;

  void reserve(Round& round) override;
  [[nodiscard]] Memory allocate(std::int64_t bytes) override;
  void reshape(const MoeParams& params, const protocol::WindowLayout& layout) override;
  void check_dispatch() const override;
  void check_combine() const override;
  void plan(const DispatchRequest& request, Round& round) override;
  Status dispatch_send(const DispatchRequest& request, Round& round) override;
  Status dispatch_receive(const DispatchRequest& request, Round& round) override;
  void fill(const DispatchRequest& request, Round& round) override;
  void release(const Round& round) override;
  void release_combine(const Round& round) override;
  Status combine_send(const CombineRequest& request, Round& round) override;
  Status combine_receive(const CombineTarget& target, const Round& round) override;
  void abort_dispatch() override;
  void abort_combine(const Round& round) override;
  Status acquire_combine_section() override;
  [[nodiscard]] Status fault() const override;
  [[nodiscard]] Status poll() override;
  void drain() override;
  void reset(std::uint32_t epoch) override;
  [[nodiscard]] std::uint32_t latest_epoch() const override;
  [[nodiscard]] PeerStatistics statistics() const override;

 private:
  // Sets this communication's own words and boards to the state before epoch + 1. Nothing of it may run.
  void set_back(std::uint32_t epoch);
  // The stream on which the next operation goes; operations of one communication are one sequence whatever streams they
  // are on.
  cudaStream_t enter(const Stream& stream);
  [[nodiscard]] int blocks_for(std::int64_t work, int num_sms) const;
  [[nodiscard]] bool is_small(const DispatchRequest& request) const;
  [[nodiscard]] SmallDispatchTask small_dispatch_task(const DispatchRequest& request, const Round& round) const;
  [[nodiscard]] Ids ids_of(const DispatchRequest& request, const Round& round) const;
  [[nodiscard]] DispatchTask dispatch_task(const DispatchRequest& request, const Round& round) const;
  void add_lanes(const DispatchRequest& request, const Round& round, DispatchTask& task) const;
  void add_outputs(const DispatchRequest& request, const Round& round, DispatchTask& task) const;
  void launch_dispatch(const DispatchTask& task, const DispatchRequest& request);
  [[nodiscard]] bool in_place(const TensorView& expert_output) const;
  void launch_combine_half(const CombineTask& task, const Stream& stream, int num_sms);
  [[nodiscard]] Status status_of(const Notice& notice, StatusCode code) const;

  Setup setup_;
  const fabric::Window& window_;
  int device_;
  int max_blocks_;
  bool bulk_ = false;  // the device can send in bulk
  Common common_{};
  SmallLayout small_{};
  DeviceMemory windows_;  // the pointers to them
  DeviceMemory board_;    // Board, arrivals, owed
  std::int64_t board_bytes_ = 0;
  PinnedMemory host_;                  // HostBoard
  std::vector<RouteBuffers*> routes_;  // of all handles
  cudaStream_t last_stream_ = nullptr;
  bool streams_known_ = false;
  Event order_;
  CombineTask combine_{};   // between the halves
  std::uint64_t told_ = 0;  // phase and epoch of the last notice that poll() gave
  std::int64_t num_dispatches_ = 0;
  std::int64_t num_combines_ = 0;
};

std::unique_ptr<Engine> make_cuda_engine(const Setup& setup, fabric::Window& window);

inline constexpr EngineInfo kCudaEngine{
    .name = "cuda",
    .description = "kernels on GPUs that reach each other's memory, on the caller's streams",
    .kind = EngineKind::kCuda,
    .memory = DeviceKind::kCuda,
    .extra_window_bytes = [](const protocol::WindowLayout& layout) { return SmallLayout::of(layout).bytes(); },
    .make = make_cuda_engine,
};

}  // namespace tokenyard::engine::cuda
