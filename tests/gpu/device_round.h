// SPDX-License-Identifier: Apache-2.0
// One rank's rounds on a GPU, for checks that look at host memory: inputs and the caller's tensors are copied to the
// device, the phase runs on a stream, and what it gave is copied back. Plugs into RoundPlan::dispatch_with and
// combine_with. Device memory comes from one block that is taken before any round: allocations may synchronise a device
// on which another rank's kernel waits for this one.
// Thread rule: one thread, with the rank's device as its current one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tokenyard/communication.h"

#include "support/round.h"

namespace tokenyard::gpu_tests {

void check_cuda(cudaError_t outcome, const char* what);

// Bytes from the first element to behind the last one.
[[nodiscard]] std::int64_t span_of(const TensorView& view);

// Devices that the tests may use; 0 with the reason where there are none.
[[nodiscard]] int num_devices(std::string& reason);

class DeviceRounds {
 public:
  struct Options {
    int device = 0;
    bool zero_copy = false;  // expert output is copied into combine_input() where there is one
    bool halves = false;     // each phase in two halves, between which what was sent is overwritten
    int num_sms = 0;
    int rounds_in_flight = 1;  // dispatches before the first of their combines
    std::int64_t arena_bytes = std::int64_t{256} << 20;
  };

  explicit DeviceRounds(const Options& options);
  ~DeviceRounds();
  DeviceRounds(const DeviceRounds&) = delete;
  DeviceRounds& operator=(const DeviceRounds&) = delete;
  DeviceRounds(DeviceRounds&&) = delete;
  DeviceRounds& operator=(DeviceRounds&&) = delete;

  Status dispatch(Communication& communication,
                  const DispatchInput& input,
                  const DispatchOptions& options,
                  DispatchResult& result);
  // A receive half once more, after one that overflowed.
  Status receive(Communication& communication, const DispatchOptions& options, DispatchResult& result);
  Status combine(Communication& communication,
                 Handle& handle,
                 const CombineInput& input,
                 const CombineOptions& options,
                 TensorView& output);

  // Copies a result's tensors and counts to the host, which the result then shows. The stream's work is done on return.
  void show(const Communication& communication, const DispatchOptions& options, DispatchResult& result);

  // The plan with both hooks set to this object, which must outlive it.
  [[nodiscard]] support::RoundPlan through_device(support::RoundPlan plan);

  [[nodiscard]] cudaStream_t stream() const { return stream_; }

  [[nodiscard]] int device() const { return options_.device; }

  // The same tensor in device memory, with its gaps; not given stays so. Valid until the next dispatch. As `to_host`.
  TensorView to_device(const TensorView& host);
  // What was enqueued before has run on return, the copy not yet.
  void to_host(const TensorView& host, const TensorView& device) const;
  void synchronize() const;
  // Of the same block, for as long as this object lives.
  [[nodiscard]] std::byte* keep(std::int64_t bytes);

 private:
  Status run_dispatch(Communication& communication,
                      const DispatchInput& input,
                      const DispatchOptions& options,
                      DispatchResult& result) const;
  Status run_combine(Communication& communication,
                     Handle& handle,
                     const CombineInput& input,
                     const CombineOptions& options,
                     TensorView& output) const;
  // Overwrites what the last operation was given to send.
  void spoil_sent() const;
  void bring_counts(const Communication& communication, const DispatchOptions& options, DispatchResult& result);
  TensorView mirror(const TensorView& device);
  DispatchOptions on_device(const DispatchOptions& options);
  void show(TensorView& view);
  std::byte* take(std::int64_t bytes);
  Status outcome(Communication& communication, const Status& status) const;

  Options options_;
  cudaStream_t stream_ = nullptr;
  std::byte* arena_ = nullptr;
  std::int64_t used_ = 0;
  int num_dispatches_ = 0;
  std::int64_t sent_begin_ = 0;  // in the arena
  std::int64_t sent_end_ = 0;
  std::int64_t kept_ = 0;                              // at the block's end
  std::vector<std::unique_ptr<std::byte[]>> mirrors_;  // NOLINT(modernize-avoid-c-arrays): of any size, uninitialised
  std::vector<TensorView> extras_;
  std::vector<std::pair<TensorView, TensorView>> callers_;     // DispatchOptions::into: host, device
  std::vector<std::pair<TensorView, TensorView>> statistics_;  // of DispatchOptions, likewise
  DispatchResult into_;
};

}  // namespace tokenyard::gpu_tests
