// SPDX-License-Identifier: Apache-2.0
// Rows in a space per source, through bounded queues in GPU memory (docs/protocol.md, "Queues on GPUs"). The spaces are
// this rank's own memory; window and queues do not grow with the tokens.
// Every communication has queues of its own here: graphs and streams decide when an operation runs, so the order in
// which the host took turns would mean nothing.
#pragma once

#include <cstdint>

#include "engine/cuda/cuda_engine.h"
#include "engine/cuda/queued_tasks.h"

namespace tokenyard::engine::cuda {

class QueuedEngine final : public CudaEngine {
 public:
  QueuedEngine(const Setup& setup, fabric::Window& window);

  void reserve(Round& round) override;
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
  void reset(std::uint32_t epoch) override;

 protected:
  void clear_route(const RouteMemory& route, cudaStream_t stream) override;

 private:
  void make_state();
  // For entries with so many bytes of rows.
  [[nodiscard]] QueueTask queue_for(std::int64_t row_bytes) const;
  [[nodiscard]] QueuedDispatchTask dispatch_task(const DispatchRequest& request, const Round& round) const;
  void launch_dispatch(QueuedDispatchTask& task, const DispatchRequest& request, const Round& round);
  void launch_combine_half(const QueuedCombineTask& task, const Stream& stream, int num_sms);

  DeviceMemory queue_windows_;  // the pointers to them
  DeviceMemory state_;          // QueueBoard, states of items
  std::int64_t state_bytes_ = 0;
  DeviceMemory landing_;  // spaces, then statistics
  DeviceMemory sums_;
  QueueTask queue_;
  QueuedCombineTask combine_{};  // between the halves
};

}  // namespace tokenyard::engine::cuda
