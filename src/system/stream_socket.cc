// SPDX-License-Identifier: Apache-2.0
#include "system/stream_socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <string>

#include "system/system_error.h"

namespace tokenyard::system {

namespace {

bool would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

bool peer_gone(int error) {
  return error == EPIPE || error == ECONNRESET || error == ECONNABORTED || error == ETIMEDOUT ||
         error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN;
}

Transfer transfer_result(ssize_t moved, const char* what) {
  if (moved >= 0) return {.bytes = static_cast<std::size_t>(moved)};
  if (would_block(errno)) return {};
  if (peer_gone(errno)) return {.closed = true};
  throw system_error(what, errno);
}

}  // namespace

bool wait_for(int fd, short events, const Deadline& deadline) {
  pollfd entry{.fd = fd, .events = events, .revents = 0};
  while (true) {
    const int ready = ::poll(&entry, 1, deadline.poll_timeout());
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw system_error("poll of a socket failed", errno);
    if (deadline.expired()) return false;
  }
}

Transfer send_some(int fd, std::span<const std::byte> bytes) {
  return transfer_result(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT), "send failed");
}

Transfer receive_some(int fd, std::span<std::byte> bytes) {
  if (bytes.empty()) return {};
  const ssize_t got = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (got == 0) return {.closed = true};
  return transfer_result(got, "recv failed");
}

IoOutcome send_all(int fd, std::span<const std::byte> bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const Transfer step = send_some(fd, bytes);
    if (step.closed) return IoOutcome::kClosed;
    bytes = bytes.subspan(step.bytes);
    if (step.bytes == 0 && !wait_for(fd, POLLOUT, deadline)) return IoOutcome::kTimedOut;
  }
  return IoOutcome::kDone;
}

IoOutcome receive_all(int fd, std::span<std::byte> bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const Transfer step = receive_some(fd, bytes);
    if (step.closed) return IoOutcome::kClosed;
    bytes = bytes.subspan(step.bytes);
    if (step.bytes == 0 && !wait_for(fd, POLLIN, deadline)) return IoOutcome::kTimedOut;
  }
  return IoOutcome::kDone;
}

SocketAttempt accept_some(int listener) {
  while (true) {
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) return {.socket = FileDescriptor(fd)};
    // A connection that died in the queue says nothing about the next one.
    if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
    return {.socket = {}, .error = would_block(errno) ? 0 : errno};
  }
}

int finish_connect(int fd, int connect_errno, const Deadline& deadline) {
  if (connect_errno != EINPROGRESS && connect_errno != EINTR) return connect_errno;
  if (!wait_for(fd, POLLOUT, deadline)) return ETIMEDOUT;
  int error = 0;
  socklen_t length = sizeof(error);
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

}  // namespace tokenyard::system
