// SPDX-License-Identifier: Apache-2.0
// Where one rank's tensors live and how its rounds are timed: host memory and a clock, or a GPU with a stream, its
// events and its graphs. Experts compute on the host, so every tensor has a side in host memory too.
// Thread rule: one thread per rank; the object outlives the rank's communication.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "tokenyard/communication.h"

#include "cli/engine_choice.h"

namespace tokenyard::cli {

class RankDevice {
 public:
  using Phase = std::function<Status()>;

  // The phases work on `stream()`, where they are not done on return.
  struct Round {
    std::function<void()> meet;  // returns when all ranks have called it
    Phase dispatch, combine;
  };

  struct RoundTimes {
    double dispatch_us = 0;
    double combine_us = 0;
    double round_us = 0;
  };

  RankDevice() = default;
  RankDevice(const RankDevice&) = delete;
  RankDevice& operator=(const RankDevice&) = delete;
  RankDevice(RankDevice&&) = delete;
  RankDevice& operator=(RankDevice&&) = delete;
  virtual ~RankDevice() = default;

  [[nodiscard]] virtual CommunicationOptions communication_options(int num_threads) const = 0;
  [[nodiscard]] virtual Stream stream() const = 0;

  // A tensor of the device whose host side is `host`, and holds what that holds. `host` outlives it. Takes device
  // memory, so no rank may be inside an operation: see "Making and freeing" in engine/cuda/memory.h.
  [[nodiscard]] virtual TensorView bring(const TensorView& host) = 0;
  // The host side of a tensor, also of one that the communication gave. On the host the tensor itself.
  [[nodiscard]] virtual TensorView host_side(const TensorView& tensor) = 0;
  // Copies to the host side, and returns it when all is there.
  virtual TensorView load(const TensorView& tensor) = 0;
  // Copies from the host side, before what is put on the stream next.
  virtual void store(const TensorView& tensor) = 0;

  // Returns when all that the phase put on the stream has run. Throws Error when it went wrong.
  virtual void finish(const Communication& communication, const Status& status) = 0;
  // The microseconds of one phase, finished.
  virtual double timed(const Communication& communication, const Phase& phase) = 0;
  // One round, finished. After `capture` it is the captured one, right behind another.
  virtual RoundTimes play(const Communication& communication, const Round& round) = 0;

  // Captures the round for `play` and `train`; no rank may be inside an operation. Throws kUnsupported on the host.
  virtual void capture(const Round& round) = 0;
  // The microseconds of a round in a train of captured ones, finished.
  virtual double train(const Communication& communication, int num_rounds) = 0;
};

// The one of a rank, for the calling thread.
[[nodiscard]] std::unique_ptr<RankDevice> make_rank_device(const EngineChoice& choice, int rank);

}  // namespace tokenyard::cli
