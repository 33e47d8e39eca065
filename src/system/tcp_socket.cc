// SPDX-License-Identifier: Apache-2.0
#include "system/tcp_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "system/system_error.h"

namespace tokenyard::system {

namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};

using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// A numeric host needs no name service and so cannot block.
Addresses resolve(const TcpAddress& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  int error = ::getaddrinfo(address.host.c_str(), address.port.c_str(), &hints, &list);
  if (error == EAI_NONAME) {
    hints.ai_flags = AI_NUMERICSERV;
    error = ::getaddrinfo(address.host.c_str(), address.port.c_str(), &hints, &list);
  }
  if (error != 0) {
    throw Error(ErrorCode::kSystem, "looking up '" + address.text() + "' failed: " + ::gai_strerror(error));
  }
  return Addresses(list);
}

FileDescriptor make_socket(const addrinfo& address) {
  FileDescriptor fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, address.ai_protocol));
  if (!fd.valid()) throw system_error("making a TCP socket failed", errno);
  return fd;
}

void set_option(int fd, int level, int option, int value) {
  if (::setsockopt(fd, level, option, &value, sizeof(value)) != 0) {
    throw system_error("setting socket option " + std::to_string(option) + " failed", errno);
  }
}

// A connect to a local port of the ephemeral range that nobody serves yet may be given that very port and so reach
// itself.
bool connected_to_itself(int fd) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t own_length = sizeof(own);
  socklen_t peer_length = sizeof(peer);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_length) != 0) return false;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) != 0) return false;
  return own_length == peer_length && std::memcmp(&own, &peer, own_length) == 0;
}

bool may_pass(int error) {
  return error == ECONNREFUSED || error == ECONNRESET || error == ETIMEDOUT || error == EHOSTUNREACH ||
         error == ENETUNREACH || error == ENETDOWN || error == EADDRNOTAVAIL || error == EAGAIN;
}

[[noreturn]] void refuse_address(std::string_view text, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument, "the address '" + std::string(text) + "' " + why +
                                               "; right would be \"127.0.0.1:29500\" or \"[::1]:29500\"");
}

}  // namespace

std::string TcpAddress::text() const {
  return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + port;
}

TcpAddress parse_tcp_address(std::string_view text) {
  std::string_view host;
  std::string_view port;
  if (!text.empty() && text.front() == '[') {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) refuse_address(text, "has no closing bracket");
    if (end + 1 >= text.size() || text[end + 1] != ':') refuse_address(text, "has no port");
    host = text.substr(1, end - 1);
    port = text.substr(end + 2);
  } else {
    const std::size_t colon = text.find(':');
    if (colon == std::string_view::npos) refuse_address(text, "has no port");
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (port.find(':') != std::string_view::npos) refuse_address(text, "has more than one colon outside brackets");
  }
  if (host.empty()) refuse_address(text, "has no host");
  // A zero byte would end the name where the resolver reads it, and so name another host.
  if (host.find('\0') != std::string_view::npos) refuse_address(text, "has a zero byte in its host");
  int number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (error != std::errc() || end != port.data() + port.size() || number < 1 || number > 65535) {
    refuse_address(text, "has the port '" + std::string(port) + "', which is not in 1 to 65535");
  }
  return {.host = std::string(host), .port = std::to_string(number)};
}

SocketAttempt listen_tcp(const TcpAddress& address, int backlog) {
  const Addresses addresses = resolve(address);
  FileDescriptor fd = make_socket(*addresses);
  // Connections of an earlier session may still be in TIME_WAIT; a live listener still refuses us.
  set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (::bind(fd.get(), addresses->ai_addr, addresses->ai_addrlen) != 0) {
    if (errno == EADDRINUSE || errno == EADDRNOTAVAIL) return {.socket = {}, .error = errno};
    throw system_error("binding '" + address.text() + "' failed", errno);
  }
  if (::listen(fd.get(), backlog) != 0) {
    if (errno == EADDRINUSE) return {.socket = {}, .error = errno};
    throw system_error("listening on '" + address.text() + "' failed", errno);
  }
  return {.socket = std::move(fd)};
}

SocketAttempt connect_tcp(const TcpAddress& address, const Deadline& deadline) {
  const Addresses addresses = resolve(address);
  int last_error = ECONNREFUSED;
  for (const addrinfo* entry = addresses.get(); entry != nullptr; entry = entry->ai_next) {
    FileDescriptor fd = make_socket(*entry);
    const int started = ::connect(fd.get(), entry->ai_addr, entry->ai_addrlen) == 0 ? 0 : errno;
    last_error = finish_connect(fd.get(), started, deadline);
    if (last_error == 0 && connected_to_itself(fd.get())) last_error = ECONNREFUSED;
    if (last_error == 0) {
      tune_tcp(fd.get());
      return {.socket = std::move(fd)};
    }
    if (!may_pass(last_error)) throw system_error("connecting to '" + address.text() + "' failed", last_error);
  }
  return {.socket = {}, .error = last_error};
}

void tune_tcp(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  // Unacknowledged data keeps the probes away; this bounds that case too.
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 25'000);
}

}  // namespace tokenyard::system
