// SPDX-License-Identifier: Apache-2.0
// How Tokenyard reports what went wrong.
//
// Two channels, chosen by who can act on the news:
//   * set-up and misuse throw `Error`: the caller's code has to change;
//   * the data path returns `Status`: a peer was late, lost or gave up, which correct code must expect.
// Thread rule: every type here is a value; share copies freely.
#pragma once

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tokenyard {

enum class ErrorCode : std::uint8_t {
  kInvalidArgument,  // a value, shape, stride, dtype or device this call does not take
  kMismatch,         // ranks passed arguments that must agree, and they do not
  kCapacity,         // larger than what the communication was created for
  kInvalidState,     // the call is right, its moment is not: a used handle, too many open operations
  kDestroyed,        // the communication was destroyed
  kReplaced,         // growth replaced the window that a handle belonged to
  kUnsupported,      // this backend, engine or machine cannot do it; the message says why
  kTimeout,          // a collective set-up call waited past its deadline
  kPeerLost,         // a rank left or died during a collective set-up call
  kPeerFailed,       // another rank failed during a collective set-up call; the message holds its reason
  kSystem,           // the operating system refused; the message holds its reason
};

// "invalid_argument", "mismatch", ...
[[nodiscard]] std::string_view name(ErrorCode code);

// `rank` is the rank that throws and `peer` the rank it is about; -1 where there is none.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, int rank = -1, int peer = -1)
      : std::runtime_error(message), code_(code), rank_(rank), peer_(peer) {}

  [[nodiscard]] ErrorCode code() const { return code_; }

  [[nodiscard]] int rank() const { return rank_; }

  [[nodiscard]] int peer() const { return peer_; }

 private:
  ErrorCode code_;
  int rank_;
  int peer_;
};

// What a rank was doing when a fault was seen.
enum class Phase : std::uint8_t { kNone, kDispatch, kCombine, kReset, kDestroy };

[[nodiscard]] std::string_view name(Phase phase);

enum class StatusCode : std::uint8_t {
  kOk,
  kEnqueued,  // CUDA: the work is on the stream; faults come from poll() and from the next call
  kTimeout,   // `fault.peer` did not answer within the deadline; sticky until the collective reset()
  kPeerLost,  // `fault.peer` is known to be gone; sticky until the collective reset()
  kOverflow,  // the caller's output holds fewer than `needed_rows` rows; the rows wait in the window
  kAborted,   // `fault.peer` announced that it gives up this operation; the next one works
};

[[nodiscard]] std::string_view name(StatusCode code);

// Who is at fault and where it was noticed. `peer` is the culprit, which may be a rank that `rank` was not
// itself waiting for: a chain of waiting ranks is followed to its end.
struct FaultRecord {
  int rank = -1;
  int peer = -1;
  Phase phase = Phase::kNone;
  std::uint32_t epoch = 0;
  std::chrono::nanoseconds waited{0};
};

// The outcome of a data-path call. Trivially copyable, so returning it allocates nothing.
struct [[nodiscard]] Status {
  StatusCode code = StatusCode::kOk;
  FaultRecord fault{};
  std::int64_t needed_rows = 0;   // kOverflow: rows the caller's output must hold
  std::int64_t missing_rows = 0;  // combine: rows of this rank's tokens that a receiver had dropped

  [[nodiscard]] bool ok() const { return code == StatusCode::kOk || code == StatusCode::kEnqueued; }

  // One sentence: "rank 0: timeout in dispatch (epoch 7): rank 1 did not answer for 200 ms".
  [[nodiscard]] std::string message() const;
};

}  // namespace tokenyard
