// SPDX-License-Identifier: Apache-2.0
#include "system/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "system/system_error.h"

namespace tokenyard::system {

namespace {

struct AbstractAddress {
  sockaddr_un address{};
  socklen_t length = 0;

  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

AbstractAddress abstract_address(std::string_view name) {
  if (name.empty() || name.size() > kMaxUnixName) {
    throw Error(ErrorCode::kInvalidArgument, "a Unix socket's name has " + std::to_string(name.size()) +
                                                 " bytes; it must have 1 to " + std::to_string(kMaxUnixName));
  }
  AbstractAddress result;
  result.address.sun_family = AF_UNIX;
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());  // a leading zero byte means abstract
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

FileDescriptor make_socket() {
  FileDescriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) throw system_error("making a Unix socket failed", errno);
  return fd;
}

std::string quoted(std::string_view name) {
  return "'@" + std::string(name) + "'";
}

uid_t peer_user(int fd) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    throw system_error("asking for a socket's peer failed", errno);
  }
  return credentials.uid;
}

// Control space for more descriptors than the one expected, so that extra ones reach us and can be closed.
constexpr std::size_t kControlDescriptors = 4;

std::vector<FileDescriptor> take_descriptors(msghdr& message) {
  std::vector<FileDescriptor> result;
  for (cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr; control = CMSG_NXTHDR(&message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof(int));
      result.emplace_back(fd);
    }
  }
  return result;
}

}  // namespace

SocketAttempt listen_unix(std::string_view name, int backlog) {
  const AbstractAddress address = abstract_address(name);
  FileDescriptor fd = make_socket();
  if (::bind(fd.get(), address.get(), address.length) != 0) {
    if (errno == EADDRINUSE) return {.socket = {}, .error = errno};
    throw system_error("binding the Unix socket " + quoted(name) + " failed", errno);
  }
  if (::listen(fd.get(), backlog) != 0) throw system_error("listening on " + quoted(name) + " failed", errno);
  return {.socket = std::move(fd)};
}

SocketAttempt connect_unix(std::string_view name) {
  const AbstractAddress address = abstract_address(name);
  FileDescriptor fd = make_socket();
  int result = -1;
  do {
    result = ::connect(fd.get(), address.get(), address.length);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    if (errno == ECONNREFUSED || errno == EAGAIN) return {.socket = {}, .error = errno};
    throw system_error("connecting to the Unix socket " + quoted(name) + " failed", errno);
  }
  if (!same_user(fd.get())) {
    throw Error(ErrorCode::kSystem, "the Unix socket " + quoted(name) + " belongs to user " +
                                        std::to_string(peer_user(fd.get())) + "; we are user " +
                                        std::to_string(::geteuid()));
  }
  return {.socket = std::move(fd)};
}

bool same_user(int fd) {
  return peer_user(fd) == ::geteuid();
}

IoOutcome send_descriptor(int socket, int passed, std::span<const std::byte> note, const Deadline& deadline) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  iovec part{.iov_base = const_cast<std::byte*>(note.data()), .iov_len = note.size()};  // sendmsg only reads it
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &passed, sizeof(int));
  while (true) {
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    // The descriptor goes with the first byte; the rest of a cut note follows as plain bytes.
    if (sent > 0) return send_all(socket, note.subspan(static_cast<std::size_t>(sent)), deadline);
    if (errno == EPIPE || errno == ECONNRESET) return IoOutcome::kClosed;
    // ETOOMANYREFS: too many descriptors are in flight for this user; receivers will take them.
    if (errno != EAGAIN && errno != EINTR && errno != ETOOMANYREFS) {
      throw system_error("sending descriptor " + std::to_string(passed) + " failed", errno);
    }
    const bool full_table = errno == ETOOMANYREFS;
    if (!wait_for(socket, full_table ? short{0} : short{POLLOUT},
                  full_table ? Deadline::after(std::chrono::milliseconds(5)) : deadline) &&
        deadline.expired()) {
      return IoOutcome::kTimedOut;
    }
  }
}

ReceivedDescriptor receive_descriptor(int socket, std::span<std::byte> note, const Deadline& deadline) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kControlDescriptors * sizeof(int))> control{};
  iovec part{.iov_base = note.data(), .iov_len = note.size()};
  while (true) {
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got > 0) {
      std::vector<FileDescriptor> taken = take_descriptors(message);
      const bool whole = static_cast<std::size_t>(got) == note.size() && (message.msg_flags & MSG_CTRUNC) == 0;
      return {.outcome = IoOutcome::kDone, .fd = whole && taken.size() == 1 ? std::move(taken[0]) : FileDescriptor()};
    }
    if (got == 0 || errno == ECONNRESET) return {.outcome = IoOutcome::kClosed, .fd = {}};
    if (errno != EAGAIN && errno != EINTR) throw system_error("receiving a descriptor failed", errno);
    if (!wait_for(socket, POLLIN, deadline)) return {};
  }
}

}  // namespace tokenyard::system
