// SPDX-License-Identifier: Apache-2.0
// Rows by expert, cast on the way, weighed and reduced before they go back; two rounds in flight. Requests become
// tasks, one launch for each phase or each half of it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine/cuda/cuda_engine.h"
#include "engine/cuda/expert_buffers.h"
#include "engine/cuda/expert_kernels.h"

namespace tokenyard::engine::cuda {

class ExpertMajorEngine final : public CudaEngine {
 public:
  ExpertMajorEngine(const Setup& setup, fabric::Window& window);
  ExpertMajorEngine(const ExpertMajorEngine&) = delete;
  ExpertMajorEngine& operator=(const ExpertMajorEngine&) = delete;
  ExpertMajorEngine(ExpertMajorEngine&&) = delete;
  ExpertMajorEngine& operator=(ExpertMajorEngine&&) = delete;
  ~ExpertMajorEngine() override;

  void reserve(Round& round) override;
  void check_dispatch() const override;
  void check_combine() const override;
  void plan(const DispatchRequest& request, Round& round) override;
  Status dispatch_send(const DispatchRequest& request, Round& round) override;
  Status dispatch_receive(const DispatchRequest& request, Round& round) override;
  void fill(const DispatchRequest& request, Round& round) override;
  void release(const Round& round) override;
  Status combine_send(const CombineRequest& request, Round& round) override;
  Status combine_receive(const CombineTarget& target, const Round& round) override;
  void release_combine(const Round& round) override;
  void abort_dispatch() override;
  void abort_combine(const Round& round) override;
  void reset(std::uint32_t epoch) override;

 private:
  // Which operations of a phase were sent and not received, as far as the host has enqueued them. Kernels have the same
  // on their board, which counts what captured graphs do, too.
  struct Turns {
    std::int64_t last = 0;
    std::array<bool, kExpertDepth> open{};

    [[nodiscard]] int next_slot() const { return static_cast<int>((last + 1) % kExpertDepth); }

    int take() {
      const int slot = next_slot();
      ++last;
      open[static_cast<std::size_t>(slot)] = true;
      return slot;
    }

    void end(int slot) { open[static_cast<std::size_t>(slot)] = false; }
  };

  [[nodiscard]] ExpertNotice notice(const ExpertRoute& route) const;
  [[nodiscard]] ExpertDispatchTask dispatch_task(const DispatchRequest& request, const Round& round) const;
  void add_rows(const DispatchRequest& request, const Round& round, ExpertDispatchTask& task) const;
  static void add_outputs(const DispatchRequest& request, const Round& round, ExpertDispatchTask& task);
  void launch_dispatch(ExpertDispatchTask& task, const DispatchRequest& request);
  // The last of the dispatch's rows in the window is read by what was enqueued.
  void close(ExpertBuffers& buffers);
  void launch_combine_half(ExpertCombineTask& task, const Stream& stream, int num_sms);
  void keep_stream_order(const Stream& stream);

  ExpertLayout extra_;
  Experts experts_;
  std::int64_t shared_bytes_ = 0;        // of a block of dispatch
  DeviceMemory state_;                   // ExpertBoard
  std::vector<ExpertBuffers*> buffers_;  // of all handles
  Turns dispatches_, combines_;
  std::array<ExpertCombineTask, kExpertDepth> sent_{};  // between the halves of a combine
};

}  // namespace tokenyard::engine::cuda
