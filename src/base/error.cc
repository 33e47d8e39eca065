// SPDX-License-Identifier: Apache-2.0
#include "tokenyard/error.h"

namespace tokenyard {

std::string_view name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kMismatch:
      return "mismatch";
    case ErrorCode::kCapacity:
      return "capacity";
    case ErrorCode::kInvalidState:
      return "invalid_state";
    case ErrorCode::kDestroyed:
      return "destroyed";
    case ErrorCode::kReplaced:
      return "replaced";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kTimeout:
      return "timeout";
    case ErrorCode::kPeerLost:
      return "peer_lost";
    case ErrorCode::kPeerFailed:
      return "peer_failed";
    case ErrorCode::kSystem:
      return "system";
  }
  return "unknown";
}

std::string_view name(Phase phase) {
  switch (phase) {
    case Phase::kNone:
      return "none";
    case Phase::kDispatch:
      return "dispatch";
    case Phase::kCombine:
      return "combine";
    case Phase::kReset:
      return "reset";
    case Phase::kDestroy:
      return "destroy";
  }
  return "unknown";
}

std::string_view name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kEnqueued:
      return "enqueued";
    case StatusCode::kTimeout:
      return "timeout";
    case StatusCode::kPeerLost:
      return "peer_lost";
    case StatusCode::kOverflow:
      return "overflow";
    case StatusCode::kAborted:
      return "aborted";
  }
  return "unknown";
}

std::string Status::message() const {
  if (code == StatusCode::kOk) {
    return missing_rows == 0 ? "ok"
                             : "ok, but " + std::to_string(missing_rows) + " rows were dropped by their receivers";
  }
  if (code == StatusCode::kEnqueued) return "enqueued";
  if (code == StatusCode::kOverflow) {
    return "rank " + std::to_string(fault.rank) + ": the output is too small, it must hold " +
           std::to_string(needed_rows) + " rows; repeat the receive half with a larger one";
  }
  std::string text = "rank " + std::to_string(fault.rank) + ": " + std::string(name(code)) + " in " +
                     std::string(name(fault.phase)) + " (epoch " + std::to_string(fault.epoch) + "): ";
  const std::string peer = fault.peer < 0 ? "ranks waiting for each other" : "rank " + std::to_string(fault.peer);
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(fault.waited).count();
  switch (code) {
    case StatusCode::kTimeout:
      return text + peer + " did not answer for " + std::to_string(milliseconds) + " ms";
    case StatusCode::kPeerLost:
      return text + peer + " is gone";
    default:
      return text + peer + " gave up this operation";
  }
}

}  // namespace tokenyard
