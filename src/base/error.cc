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
  if (code == StatusCode::kEnqueued) return "enqueued";
  std::string text;
  if (code == StatusCode::kOk) {
    text.append("ok");
    if (missing_rows > 0) text.append(", but ").append(std::to_string(missing_rows)).append(" rows were dropped");
    return text;
  }
  text.append("rank ").append(std::to_string(fault.rank)).append(": ");
  if (code == StatusCode::kOverflow) {
    return text.append("the output is too small, it must hold ")
        .append(std::to_string(needed_rows))
        .append(" rows; repeat the receive half with a larger one");
  }
  text.append(name(code)).append(" in ").append(name(fault.phase));
  text.append(" (epoch ").append(std::to_string(fault.epoch)).append("): ");
  if (fault.peer < 0) {
    text.append("ranks waiting for each other");
  } else {
    text.append("rank ").append(std::to_string(fault.peer));
  }
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(fault.waited).count();
  if (code == StatusCode::kPeerLost) return text.append(" is gone");
  if (code == StatusCode::kAborted) return text.append(" gave up this operation");
  return text.append(" did not answer for ").append(std::to_string(milliseconds)).append(" ms");
}

}  // namespace tokenyard
