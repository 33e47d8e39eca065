// SPDX-License-Identifier: Apache-2.0
// TCP sockets for "host:port" and "[v6]:port".
// Thread rule: one thread at a time per socket.
#pragma once

#include <string>
#include <string_view>

#include "system/deadline.h"
#include "system/stream_socket.h"

namespace tokenyard::system {

struct TcpAddress {
  std::string host;
  std::string port;

  // As the user wrote it.
  [[nodiscard]] std::string text() const;
};

// Throws kInvalidArgument with the text and what would be right. Looks nothing up.
[[nodiscard]] TcpAddress parse_tcp_address(std::string_view text);

// Binds to the address given and to no other. May fail with EADDRINUSE, or EADDRNOTAVAIL while an interface comes up.
[[nodiscard]] SocketAttempt listen_tcp(const TcpAddress& address, int backlog);
// One attempt on every address that the host name stands for; may fail with any errno of an unreachable peer.
[[nodiscard]] SocketAttempt connect_tcp(const TcpAddress& address, const Deadline& deadline);
// No delay for small frames, and keep-alive probes, so that a host that vanished is noticed within half a minute.
void tune_tcp(int fd);

}  // namespace tokenyard::system
