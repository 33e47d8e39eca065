// SPDX-License-Identifier: Apache-2.0
// Rounds that are captured in a CUDA graph and replayed: tensors at addresses that stay, loaded before each replay with
// other rows, ids and numbers of tokens, and looked at after it as a round that ran at once is.
// Thread rule: one thread, with the rank's device as its current one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "tokenyard/communication.h"

#include "gpu/device_round.h"
#include "support/round.h"
#include "support/world.h"

namespace tokenyard::gpu_tests {

// What `record` puts on the stream, which runs with each launch. Captures of other threads may go on meanwhile.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& record);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  Graph(Graph&&) = delete;
  Graph& operator=(Graph&&) = delete;

  void launch(cudaStream_t stream) const;

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// One round of up to `most` tokens a rank: whatever `like` has besides is fixed.
class RecordedRound {
 public:
  RecordedRound(DeviceRounds& rounds,
                Communication& communication,
                const support::World& like,
                const support::RoundPlan& plan,
                std::int64_t most);

  // On a stream that is being captured. The handle is then used up, or left in `result`.
  void record_dispatch(cudaStream_t stream);
  void record_combine(cudaStream_t stream);

  void record(cudaStream_t stream) {
    record_dispatch(stream);
    record_combine(stream);
  }

  // What the next replay reads, and poison where it writes. Has happened on return.
  void load(const support::World& world, std::uint64_t seed);
  // What the replay left, against the reference; waits for the stream. Rows of the output beyond the tokens that there
  // were are as before.
  void check();
  // The same of a dispatch that no combine followed.
  void check_dispatch();

  [[nodiscard]] DispatchResult& result() { return result_; }

 private:
  [[nodiscard]] TensorView buffer_for(const TensorView& view);
  void upload(const TensorView& to, const TensorView& from) const;
  void copy_out(const TensorView& view, TensorView& copy, cudaStream_t stream);
  void load_expert_output() const;
  void check_tail() const;
  [[nodiscard]] support::RoundPlan plan_of_replay();

  DeviceRounds& rounds_;
  Communication& communication_;
  support::World world_;
  support::RoundPlan plan_;
  std::int64_t most_;
  DispatchInput input_;
  std::vector<TensorView> extras_;
  std::int32_t* num_tokens_ = nullptr;
  TensorView expert_output_, output_;
  DispatchResult result_;
  DispatchResult copies_;  // of what the dispatch showed, made between the phases
};

}  // namespace tokenyard::gpu_tests
