// SPDX-License-Identifier: Apache-2.0
// Rows at final places, through windows. A dispatch is one launch, which first settles where rows go and then moves
// them; where the host waits for the counts it is two, so that it may learn how many come in between. A route belongs
// to its handle and is not used up, so that handles replay and combine again.
#pragma once

#include <cstdint>

#include "engine/cuda/compact_tasks.h"
#include "engine/cuda/cuda_engine.h"

namespace tokenyard::engine::cuda {

class CompactEngine final : public CudaEngine {
 public:
  CompactEngine(const Setup& setup, fabric::Window& window);

  void reserve(Round& round) override;
  void plan(const DispatchRequest& request, Round& round) override;
  void query(const DispatchRequest& request, Round& round) override;
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
  [[nodiscard]] Status poll() override;
  void reset(std::uint32_t epoch) override;

 private:
  [[nodiscard]] std::int64_t chunk_stride() const;
  [[nodiscard]] CompactRoute route_of(const Round& round) const;
  [[nodiscard]] CountTask count_task(const DispatchRequest& request) const;
  void launch_counts(const DispatchRequest& request, const Round& round);
  // Returns when the first launch has told its counts, or has ended.
  [[nodiscard]] bool wait_for_counts(const Stream& stream) const;
  void take_counts(Round& round) const;
  [[nodiscard]] MoveTask move_task(const DispatchRequest& request, const Round& round) const;
  void add_outputs(const DispatchRequest& request, Round& round, MoveTask& task) const;
  void launch_rows(const MoveTask& task, const DispatchRequest& request);
  [[nodiscard]] bool in_place(const TensorView& expert_output) const;
  void launch_combine(const CompactCombineTask& task, const Round& round, const Stream& stream, int num_sms);

  int num_local_experts_;
  bool bulk_moves_ = false;  // what the device can
  bool bulk_combines_ = false;
  CompactHeaders headers_;
  DeviceMemory masks_;        // [num_ranks, chunk_stride] tagged units
  DeviceMemory expert_rows_;  // [num_experts]
  PinnedMemory told_;         // ToldCounts and lists
  std::uint32_t ticket_ = 0;
  // Of the last dispatch, as every rank counts them: what a replay names.
  std::uint32_t dispatch_epoch_;
  std::uint64_t told_missing_ = 0;  // rows that poll() has told of
  bool combined_ = false;           // since the last dispatch
  CompactCombineTask combine_{};    // between the halves
};

}  // namespace tokenyard::engine::cuda
