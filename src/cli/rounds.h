// SPDX-License-Identifier: Apache-2.0
// What `run` and `bench` share of playing a round: a status becomes an error, time becomes microseconds, and experts
// get memory to write to. Thread rule: one thread per rank.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include "tokenyard/communication.h"
#include "tokenyard/error.h"

#include "cli/rank_device.h"

namespace tokenyard::cli {

using Clock = std::chrono::steady_clock;

inline void require_ok(const Status& status) {
  if (!status.ok()) throw Error(ErrorCode::kPeerFailed, status.message(), status.fault.rank, status.fault.peer);
}

[[nodiscard]] inline double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// Ranks wait for each other outside of operations, so these need little time.
[[nodiscard]] inline CommunicationOptions round_options(int num_threads) {
  constexpr std::chrono::milliseconds kDeadline{60'000};
  CommunicationOptions options;
  options.deadline = kDeadline;
  options.first_round_deadline = kDeadline;
  options.num_threads = num_threads;
  return options;
}

// Where experts write: the communication's own memory where it gives some, else memory of the same shape, kept from
// round to round. On the device; experts write to its host side. Called when no rank is inside an operation.
class ExpertMemory {
 public:
  [[nodiscard]] TensorView view(RankDevice& device, Communication& communication, const DispatchResult& received) {
    const MoeParams& params = communication.params();
    const TensorView given = communication.combine_input(received.handle, params.dtype);
    if (given.defined()) return given;
    const auto num_dims = static_cast<std::size_t>(received.hidden_states.num_dims);
    std::array<std::int64_t, kMaxDims> shape = received.hidden_states.shape;
    shape[num_dims - 1] = params.hidden_size;
    const auto elements = std::accumulate(shape.begin(), shape.begin() + num_dims, std::int64_t{1}, std::multiplies{});
    const auto bytes = static_cast<std::size_t>(elements * size_of(params.dtype));
    if (!own_on_device_.defined() || bytes > own_.size()) {
      own_.resize(bytes);
      own_on_device_ = device.bring({own_.data(), Dtype::kU8, {static_cast<std::int64_t>(own_.size())}});
    }
    TensorView own(own_on_device_.data, params.dtype, std::span<const std::int64_t>(shape.data(), num_dims));
    own.device = own_on_device_.device;
    return own;
  }

 private:
  std::vector<std::byte> own_;
  TensorView own_on_device_;
};

}  // namespace tokenyard::cli
