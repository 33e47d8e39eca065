// SPDX-License-Identifier: Apache-2.0
// One rank's part of a world in device memory, with rounds of experts that give back what they are given: what each
// token must come back as is known beforehand, and compared on the device, so that rounds follow each other without
// waiting.
// Thread rule: one thread, with the rank's device as its current one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "tokenyard/communication.h"

#include "gpu/device_round.h"
#include "support/world.h"

namespace tokenyard::gpu_tests {

class DeviceWorld {
 public:
  // Rank-major results of `tokens_per_rank`. Rows of bf16; memory is `rounds`'.
  DeviceWorld(DeviceRounds& rounds, const support::World& world, int rank, std::int64_t tokens_per_rank);

  // Both are enqueued; anything else fails.
  void dispatch(Communication& communication, cudaStream_t stream, int num_sms = 0);
  void combine(Communication& communication, cudaStream_t stream, int num_sms = 0);

  void round(Communication& communication, cudaStream_t stream, int num_sms = 0) {
    dispatch(communication, stream, num_sms);
    combine(communication, stream, num_sms);
  }

  // The round of the last dispatch ends without a combine.
  void drop() { result_.handle = Handle(); }

  // Fails when an output of a round, of all since the last call, was wrong; waits for the stream.
  void check_outputs(cudaStream_t stream);

  [[nodiscard]] DispatchResult& result() { return result_; }

 private:
  std::int64_t tokens_per_rank_;
  DispatchInput input_;
  TensorView output_;
  std::byte* expected_ = nullptr;
  std::int64_t output_bytes_ = 0;
  unsigned long long* differences_ = nullptr;
  DispatchResult result_;
};

}  // namespace tokenyard::gpu_tests
