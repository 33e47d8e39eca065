// SPDX-License-Identifier: Apache-2.0
// Rows in a space per source, through windows. Requests become tasks, and tasks launches: of small rounds one kind of
// kernel, of large ones another.
#pragma once

#include <cstdint>

#include "engine/cuda/cuda_engine.h"

namespace tokenyard::engine::cuda {

class RankMajorEngine final : public CudaEngine {
 public:
  RankMajorEngine(const Setup& setup, fabric::Window& window);

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

 private:
  [[nodiscard]] bool is_small(const DispatchRequest& request) const;

  struct Halves {
    bool sends = false;
    bool receives = false;
    bool counts = false;  // rows are received for the first time
  };

  void launch_half(const DispatchRequest& request, const Round& round, Halves halves);
  void add_small_lane(const DispatchRequest& request,
                      const protocol::Plane& plane,
                      std::size_t index,
                      SmallLane& lane) const;
  void launch_small_dispatch_half(SmallDispatchTask task, const DispatchRequest& request);
  [[nodiscard]] SmallWork small_work(std::int64_t rows, int lines, int peers, int num_sms) const;
  [[nodiscard]] SmallDispatchTask small_dispatch_task(const DispatchRequest& request, const Round& round) const;
  [[nodiscard]] DispatchTask dispatch_task(const DispatchRequest& request, const Round& round) const;
  void add_lanes(const DispatchRequest& request, const Round& round, DispatchTask& task) const;
  void add_outputs(const DispatchRequest& request, const Round& round, DispatchTask& task) const;
  void launch_dispatch(const DispatchTask& task, const DispatchRequest& request);
  [[nodiscard]] bool in_place(const TensorView& expert_output) const;
  void launch_combine_half(CombineTask task, std::int64_t num_tokens, const Stream& stream, int num_sms);

  SmallLayout small_;
  bool bulk_ = false;  // the device can send in bulk
  bool bulk_combines_ = false;
  CombineTask combine_{};  // between the halves
};

}  // namespace tokenyard::engine::cuda
