// SPDX-License-Identifier: Apache-2.0
// The device memory of one handle of expert-major rounds.
#pragma once

#include "engine/cuda/expert_tasks.h"
#include "engine/cuda/memory.h"

namespace tokenyard::engine::cuda {

class ExpertBuffers final : public RoundMemory {
 public:
  ExpertBuffers(int device, const protocol::WindowLayout& layout, const Experts& experts);

  [[nodiscard]] const ExpertRoute& view() const { return view_; }

  // As new. No kernel may use it.
  void clear();
  // The same of what an operation looks at first, in the order of the stream.
  void clear_state(cudaStream_t stream) const;

  bool in_use = false;    // a dispatch was enqueued, and no combine that ends it
  bool closed = false;    // nothing of the dispatch's rows will be read in the window any more
  int dispatch_slot = 0;  // of the operations that were last enqueued
  int combine_slot = 0;

 private:
  DeviceMemory memory_;
  std::int64_t bytes_ = 0;
  ExpertRoute view_{};
};

}  // namespace tokenyard::engine::cuda
