// SPDX-License-Identifier: Apache-2.0
// Streams, timed events and graphs of the thread's current device.
// Thread rule: one thread at a time per object.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <type_traits>

#include "fabric/cuda/driver.h"

namespace tokenyard::cli {

struct DestroyStreamObject {
  void operator()(cudaStream_t stream) const noexcept { static_cast<void>(cudaStreamDestroy(stream)); }

  void operator()(cudaEvent_t event) const noexcept { static_cast<void>(cudaEventDestroy(event)); }

  void operator()(cudaGraph_t graph) const noexcept { static_cast<void>(cudaGraphDestroy(graph)); }

  void operator()(cudaGraphExec_t graph) const noexcept { static_cast<void>(cudaGraphExecDestroy(graph)); }
};

template <class Pointer>
using StreamObject = std::unique_ptr<std::remove_pointer_t<Pointer>, DestroyStreamObject>;

// Does not wait for the legacy stream.
[[nodiscard]] inline StreamObject<cudaStream_t> make_stream() {
  cudaStream_t stream = nullptr;
  fabric::cuda::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return StreamObject<cudaStream_t>(stream);
}

class TimedEvent {
 public:
  TimedEvent() {
    cudaEvent_t event = nullptr;
    fabric::cuda::require(cudaEventCreate(&event), "cudaEventCreate");
    event_.reset(event);
  }

  // In a capture a plain record would only order the graph and never be timed.
  void record(cudaStream_t stream, bool captured = false) {
    const unsigned flags = captured ? cudaEventRecordExternal : cudaEventRecordDefault;
    fabric::cuda::require(cudaEventRecordWithFlags(event_.get(), stream, flags), "cudaEventRecordWithFlags");
  }

  // Both have been reached.
  [[nodiscard]] double microseconds_since(const TimedEvent& start) const {
    float milliseconds = 0;
    fabric::cuda::require(cudaEventElapsedTime(&milliseconds, start.event_.get(), event_.get()),
                          "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e3;
  }

 private:
  StreamObject<cudaEvent_t> event_;
};

// What `work` puts on the stream. Resident on the device on return, so that no launch allocates.
template <class Work>
[[nodiscard]] StreamObject<cudaGraphExec_t> capture_graph(cudaStream_t stream, const Work& work) {
  using fabric::cuda::require;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  cudaGraph_t captured = nullptr;
  try {
    work();
  } catch (...) {
    if (cudaStreamEndCapture(stream, &captured) == cudaSuccess) static_cast<void>(cudaGraphDestroy(captured));
    throw;
  }
  require(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
  const StreamObject<cudaGraph_t> graph(captured);
  cudaGraphExec_t made = nullptr;
  require(cudaGraphInstantiate(&made, graph.get(), 0), "cudaGraphInstantiate");
  StreamObject<cudaGraphExec_t> executable(made);
  require(cudaGraphUpload(made, stream), "cudaGraphUpload");
  require(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return executable;
}

inline void launch(cudaStream_t stream, const StreamObject<cudaGraphExec_t>& graph) {
  fabric::cuda::require(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
}

}  // namespace tokenyard::cli
