// SPDX-License-Identifier: Apache-2.0
// Unix stream sockets in Linux's abstract namespace: a name lives as long as its socket, so nothing is left in the
// file system after kill -9. The namespace has no permissions, so both sides ask the kernel who the peer is.
// Thread rule: one thread at a time per socket.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "system/deadline.h"
#include "system/file_descriptor.h"
#include "system/stream_socket.h"

namespace tokenyard::system {

// Longest abstract name: sun_path without its leading zero byte.
inline constexpr std::size_t kMaxUnixName = 107;

// May fail with EADDRINUSE.
[[nodiscard]] SocketAttempt listen_unix(std::string_view name, int backlog);
// May fail with ECONNREFUSED (nobody listens) or EAGAIN (the listener's queue is full). Throws when the listener
// belongs to another user.
[[nodiscard]] SocketAttempt connect_unix(std::string_view name);
// Whether the other end was opened by a process of our effective user.
[[nodiscard]] bool same_user(int fd);

// Sends `note` with a copy of `passed` attached. `note` is small and goes as one message.
[[nodiscard]] IoOutcome send_descriptor(int socket,
                                        int passed,
                                        std::span<const std::byte> note,
                                        const Deadline& deadline);

struct ReceivedDescriptor {
  IoOutcome outcome = IoOutcome::kTimedOut;
  FileDescriptor fd;  // invalid when the message carried none or the note was cut
};

// Fills `note`; descriptors beyond the first are closed.
[[nodiscard]] ReceivedDescriptor receive_descriptor(int socket, std::span<std::byte> note, const Deadline& deadline);

}  // namespace tokenyard::system
