// SPDX-License-Identifier: Apache-2.0
// Every rank's rows to all ranks (`all_gather`). Where the caller says how many rows each rank brings, nothing waits on
// the host, and a round may be captured. Otherwise dispatch_send waits for the ranks' headers.
#pragma once

#include <cstdint>

#include "engine/cuda/cuda_engine.h"
#include "engine/cuda/every_rank_tasks.h"

namespace tokenyard::engine::cuda {

class EveryRankEngine final : public CudaEngine {
 public:
  EveryRankEngine(const Setup& setup, fabric::Window& window);

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
  Status acquire_combine_section() override;

 private:
  [[nodiscard]] Announcement announcement(const DispatchRequest& request, const Round& round) const;
  [[nodiscard]] EveryRankDispatchTask dispatch_task(const DispatchRequest& request, const Round& round) const;
  // Writes the result, all or none of which is the caller's where it says so.
  void add_outputs(const DispatchRequest& request, const Round& round, EveryRankDispatchTask& task) const;
  void launch_dispatch(EveryRankDispatchTask& task, const DispatchRequest& request);
  // Throws kInvalidState.
  void refuse_capture(const Stream& stream);
  // From what the ranks' headers say. Throws kMismatch.
  Status learn_sizes(const DispatchRequest& request, Round& round);
  void wait_for_sizes(cudaStream_t stream) const;
  [[nodiscard]] SizesState sizes_state() const;
  [[nodiscard]] bool in_place(const TensorView& expert_output) const;
  void launch_combine(const EveryRankCombineTask& task, const Stream& stream, int num_sms);

  PinnedMemory sizes_;  // HostSizes
  bool bulk_ = false;   // the device can send in bulk
  bool bulk_combines_ = false;
  // Nobody reads the rows of the last combine any more: all ranks were heard of since, in a dispatch after it.
  bool section_free_ = true;
  EveryRankCombineTask combine_{};  // between the halves
};

}  // namespace tokenyard::engine::cuda
