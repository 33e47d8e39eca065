// SPDX-License-Identifier: Apache-2.0
// What Unix and TCP stream sockets have in common. Every socket made in this folder is non-blocking and
// close-on-exec; every wait has a deadline; a peer that has gone is an outcome, not an exception and not a signal.
// Thread rule: one thread at a time per socket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "system/deadline.h"
#include "system/file_descriptor.h"

namespace tokenyard::system {

enum class IoOutcome : std::uint8_t { kDone, kTimedOut, kClosed };

// What one attempt to connect or to listen gave. `error` is the errno of a failure that may pass (nobody listens yet,
// the address is still taken); failures that cannot pass throw.
struct SocketAttempt {
  FileDescriptor socket;
  int error = 0;
};

// One non-blocking step. `closed`: the peer has gone, or is out of reach for good.
struct Transfer {
  std::size_t bytes = 0;
  bool closed = false;
};

// True when `fd` has one of `events` or an error or hang-up that the next call will report; false at the deadline.
[[nodiscard]] bool wait_for(int fd, short events, const Deadline& deadline);

[[nodiscard]] Transfer send_some(int fd, std::span<const std::byte> bytes);
[[nodiscard]] Transfer receive_some(int fd, std::span<std::byte> bytes);
// After kTimedOut or kClosed an unknown part has been moved.
[[nodiscard]] IoOutcome send_all(int fd, std::span<const std::byte> bytes, const Deadline& deadline);
[[nodiscard]] IoOutcome receive_all(int fd, std::span<std::byte> bytes, const Deadline& deadline);

// A waiting connection, or an invalid descriptor and 0 when there is none; an error (EMFILE, ENOMEM, ...) means that
// one may be waiting but cannot be taken now.
[[nodiscard]] SocketAttempt accept_some(int listener);

// Starts a non-blocking connect and waits for its end; returns 0 or an errno (ETIMEDOUT at the deadline).
[[nodiscard]] int finish_connect(int fd, int connect_errno, const Deadline& deadline);

}  // namespace tokenyard::system
