// SPDX-License-Identifier: Apache-2.0
// The CUDA engine: kernels that move rows between windows in GPU memory. Everything is enqueued on the caller's stream;
// what goes wrong later is found on a board in host memory. The rules are those of docs/protocol.md, the kernels those
// of docs/design/0005-cuda-engine.md.
// This is what rounds of all placements share: the device, its boards, streams, faults. How rows move is each
// placement's own, in the classes made from this one.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <vector>

#include "engine/cuda/culprit.h"
#include "engine/cuda/memory.h"
#include "engine/cuda/tasks.h"
#include "engine/engine.h"

namespace tokenyard::engine::cuda {

class CudaEngine : public Engine {
 public:
  ~CudaEngine() override;
  CudaEngine(const CudaEngine&) = delete;
  CudaEngine& operator=(const CudaEngine&) = delete;
  CudaEngine(CudaEngine&&) = delete;
  CudaEngine& operator=(CudaEngine&&) = delete;

  [[nodiscard]] Memory allocate(std::int64_t bytes) override;
  void reshape(const MoeParams& params, const protocol::WindowLayout& layout) override;
  void check_dispatch() const override;
  void check_combine() const override;
  Status acquire_combine_section() override;
  [[nodiscard]] Status fault() const override;
  [[nodiscard]] Status poll() override;
  void discard(Round& round) override;
  void turn_to(const Stream& stream) override;
  [[nodiscard]] bool records(const Stream& stream) const override;
  [[nodiscard]] bool recording() const override;

  [[nodiscard]] bool recorded() const override { return recorded_; }

  [[nodiscard]] int max_blocks() const override { return max_blocks_; }

  void drain() override;
  void reset(std::uint32_t epoch) override;
  [[nodiscard]] std::uint32_t latest_epoch() const override;
  [[nodiscard]] PeerStatistics statistics() const override;

 protected:
  CudaEngine(const Setup& setup, fabric::Window& window);

  // The stream on which the next operation goes; operations of one communication are one sequence whatever streams they
  // are on, and so are those of one capture. Between the two the caller orders, by when it launches its graphs.
  cudaStream_t enter(const Stream& stream);
  // Blocks for `work` equal parts: all of them are resident, together with those of other ranks on the device.
  [[nodiscard]] int blocks_for(std::int64_t work, int num_sms) const;

  // Launches overlap (from sm_90 on) where a call has the device for itself: one rank on it, and all its
  // multiprocessors. Blocks that wait for the kernel before then keep nobody from the device that a round waits for.
  [[nodiscard]] bool may_overlap(int num_sms) const { return overlaps_ && num_sms == 0; }

  // Takes the buffers of a new round, which is as new again after a reset.
  void keep(Round& round, std::unique_ptr<RouteBuffers> buffers);

  [[nodiscard]] const Setup& setup() const { return setup_; }

  [[nodiscard]] const fabric::Window& window() const { return window_; }

  [[nodiscard]] const Common& common() const { return common_; }

  [[nodiscard]] int device() const { return device_; }

  // `enter` for what has no stream of its own: that of the operation before, or the one turned to since.
  cudaStream_t last_stream() { return enter({told_on_}); }

  // Makes a route as new, after a round that no combine ended.
  virtual void clear_route(const RouteMemory& route, cudaStream_t stream);

  // Where this rank and its peers tell each other that a wait ran out; at first in the communication's own window.
  void tell_life_in(const LifeLines& lines) { life_ = lines; }

  void count_dispatch() { ++num_dispatches_; }

  void count_combine() { ++num_combines_; }

 private:
  // Sets this communication's own words and boards to the state before epoch + 1. Nothing of it may run.
  void set_back(std::uint32_t epoch);
  void synchronize() const;
  [[nodiscard]] std::int64_t num_invalid_ids() const;
  [[nodiscard]] Status status_of(const Notice& notice, StatusCode code) const;
  // What a wait that ran out comes to, when the peers were asked for whom they wait: within a quarter of the deadline.
  [[nodiscard]] Status blame(Notice notice) const;

  Setup setup_;
  const fabric::Window& window_;
  int device_;
  int max_blocks_;
  bool overlaps_;
  Common common_{};
  DeviceMemory windows_;  // the pointers to them
  DeviceMemory board_;    // Board, arrivals, owed
  std::int64_t board_bytes_ = 0;
  PinnedMemory host_;                   // HostBoard
  std::vector<RouteBuffers*> routes_;   // of all handles
  cudaStream_t last_stream_ = nullptr;  // of the last operation that ran or was recorded
  cudaStream_t told_on_ = nullptr;
  cudaStream_t ran_on_ = nullptr;  // of the last that ran
  bool has_run_ = false;
  bool has_entered_ = false;
  bool recorded_ = false;
  Event order_;
  LifeLines life_;
  mutable Status fault_;    // the first, once somebody was blamed for it
  std::uint64_t told_ = 0;  // phase and epoch of the last notice that poll() gave
  std::int64_t num_dispatches_ = 0;
  std::int64_t num_combines_ = 0;
  std::int64_t invalid_ids_before_ = 0;  // what the board had counted at the last reset
};

std::unique_ptr<Engine> make_cuda_engine(const Setup& setup, fabric::Window& window);
std::int64_t cuda_extra_window_bytes(const MoeParams& params, const protocol::WindowLayout& layout);

inline constexpr EngineInfo kCudaEngine{
    .name = "cuda",
    .description = "kernels on GPUs that reach each other's memory, on the caller's streams",
    .kind = EngineKind::kCuda,
    .memory = DeviceKind::kCuda,
    .extra_window_bytes = cuda_extra_window_bytes,
    .make = make_cuda_engine,
};

}  // namespace tokenyard::engine::cuda
