// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <thread>

#include "system/deadline.h"
#include "system/segment.h"
#include "system/stream_socket.h"
#include "system/tcp_socket.h"
#include "system/unix_socket.h"
#include "unit/group_helpers.h"

namespace tokenyard {

namespace {

using namespace testing_groups;
using namespace system;

std::pair<FileDescriptor, FileDescriptor> socket_pair() {
  std::array<int, 2> fds{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds.data()), 0);
  return {FileDescriptor(fds[0]), FileDescriptor(fds[1])};
}

TEST(SystemDeadline, ExpiresAfterItsTimeAndSaturates) {
  EXPECT_TRUE(Deadline::after(milliseconds(0)).expired());
  EXPECT_TRUE(Deadline::after(milliseconds(-5)).expired());
  EXPECT_FALSE(Deadline::after(milliseconds(10'000)).expired());
  EXPECT_FALSE(Deadline::after(milliseconds::max()).expired());
  EXPECT_EQ(Deadline::after(milliseconds::max()).poll_timeout(), -1);
  EXPECT_EQ(Deadline::after(milliseconds(0)).poll_timeout(), 0);
  const int timeout = Deadline::after(milliseconds(5000)).poll_timeout();
  EXPECT_GT(timeout, 4000);
  EXPECT_LE(timeout, 5000);
}

TEST(SystemFileDescriptor, ClosesOnceAndMoves) {
  auto [a, b] = socket_pair();
  const int number = a.get();
  FileDescriptor moved = std::move(a);
  EXPECT_FALSE(a.valid());  // NOLINT(bugprone-use-after-move): that is what is tested
  EXPECT_EQ(moved.get(), number);
  moved.reset();
  EXPECT_LT(::fcntl(number, F_GETFD), 0);
}

TEST(SystemStreamSocket, MovesMoreThanASocketHolds) {
  auto [a, b] = socket_pair();
  const std::vector<std::byte> sent(3'000'000, std::byte{7});
  std::vector<std::byte> got(sent.size());
  std::thread sender([&, fd = a.get()] { EXPECT_EQ(send_all(fd, sent, Deadline::after(kLong)), IoOutcome::kDone); });
  EXPECT_EQ(receive_all(b.get(), got, Deadline::after(kLong)), IoOutcome::kDone);
  sender.join();
  EXPECT_EQ(sent, got);
}

TEST(SystemStreamSocket, HasDeadlinesAndSeesTheEnd) {
  auto [a, b] = socket_pair();
  std::array<std::byte, 8> bytes{};
  const Stopwatch watch;
  EXPECT_EQ(receive_all(b.get(), bytes, Deadline::after(milliseconds(30))), IoOutcome::kTimedOut);
  EXPECT_GE(watch.elapsed(), milliseconds(30));
  const std::vector<std::byte> much(4'000'000);
  EXPECT_EQ(send_all(a.get(), much, Deadline::after(milliseconds(30))), IoOutcome::kTimedOut);
  b.reset();
  EXPECT_EQ(send_all(a.get(), bytes, Deadline::after(kLong)), IoOutcome::kClosed);  // and no SIGPIPE
}

TEST(SystemUnixSocket, PassesDescriptors) {
  const std::string name = unique_name("unit");
  const SocketAttempt listener = listen_unix(name, 4);
  ASSERT_TRUE(listener.socket.valid());
  EXPECT_EQ(listen_unix(name, 4).error, EADDRINUSE);
  const SocketAttempt client = connect_unix(name);
  ASSERT_TRUE(client.socket.valid());
  EXPECT_TRUE(same_user(client.socket.get()));
  const SocketAttempt server = accept_some(listener.socket.get());
  ASSERT_TRUE(server.socket.valid());
  EXPECT_TRUE(same_user(server.socket.get()));
  EXPECT_NE(::fcntl(server.socket.get(), F_GETFD) & FD_CLOEXEC, 0);

  const Segment segment = Segment::create(64);
  segment.data()[5] = std::byte{99};
  const std::array<std::byte, 3> note{std::byte{1}, std::byte{2}, std::byte{3}};
  EXPECT_EQ(send_descriptor(client.socket.get(), segment.fd(), note, Deadline::after(kLong)), IoOutcome::kDone);
  std::array<std::byte, 3> got{};
  ReceivedDescriptor received = receive_descriptor(server.socket.get(), got, Deadline::after(kLong));
  EXPECT_EQ(received.outcome, IoOutcome::kDone);
  EXPECT_EQ(got, note);
  EXPECT_NE(::fcntl(received.fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(Segment::import(std::move(received.fd), 64).data()[5], std::byte{99});

  EXPECT_EQ(receive_descriptor(server.socket.get(), got, Deadline::after(milliseconds(10))).outcome,
            IoOutcome::kTimedOut);
  EXPECT_EQ(send_all(client.socket.get(), note, Deadline::after(kLong)), IoOutcome::kDone);
  EXPECT_FALSE(receive_descriptor(server.socket.get(), got, Deadline::after(kLong)).fd.valid());
}

TEST(SystemUnixSocket, ANameGoesWithItsSocket) {
  const std::string name = unique_name("unit");
  EXPECT_EQ(connect_unix(name).error, ECONNREFUSED);
  { const SocketAttempt listener = listen_unix(name, 1); }
  EXPECT_EQ(connect_unix(name).error, ECONNREFUSED);
  EXPECT_TRUE(listen_unix(name, 1).socket.valid());
  expect_error(ErrorCode::kInvalidArgument, {"108", "107"}, [] { (void)listen_unix(std::string(108, 'x'), 1); });
}

TEST(SystemTcpSocket, ParsesAddresses) {
  const TcpAddress v4 = parse_tcp_address("127.0.0.1:29500");
  EXPECT_EQ(v4.host, "127.0.0.1");
  EXPECT_EQ(v4.port, "29500");
  const TcpAddress v6 = parse_tcp_address("[::1]:1");
  EXPECT_EQ(v6.host, "::1");
  EXPECT_EQ(v6.port, "1");
  EXPECT_EQ(v6.text(), "[::1]:1");
  EXPECT_EQ(parse_tcp_address("host-a.example:65535").text(), "host-a.example:65535");
  for (const char* bad : {"", "localhost", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:12x", ":80",
                          "::1:80", "[::1]", "[::1:80", "[]:80", "a:-1", "a:+1", "a: 1"}) {
    expect_error(ErrorCode::kInvalidArgument, {std::string("'").append(bad).append("'"), "127.0.0.1:29500"},
                 [&] { (void)parse_tcp_address(bad); });
  }
}

TEST(SystemTcpSocket, ConnectsAndSaysWhenNobodyListens) {
  const TcpAddress address = parse_tcp_address(free_address());
  const SocketAttempt refused = connect_tcp(address, Deadline::after(kLong));
  EXPECT_FALSE(refused.socket.valid());
  EXPECT_EQ(refused.error, ECONNREFUSED);
  const SocketAttempt listener = listen_tcp(address, 4);
  ASSERT_TRUE(listener.socket.valid());
  EXPECT_EQ(listen_tcp(address, 4).error, EADDRINUSE);
  const SocketAttempt client = connect_tcp(address, Deadline::after(kLong));
  ASSERT_TRUE(client.socket.valid());
  ASSERT_TRUE(wait_for(listener.socket.get(), POLLIN, Deadline::after(kLong)));
  const SocketAttempt server = accept_some(listener.socket.get());
  ASSERT_TRUE(server.socket.valid());
  const std::array<std::byte, 2> sent{std::byte{3}, std::byte{4}};
  std::array<std::byte, 2> got{};
  EXPECT_EQ(send_all(client.socket.get(), sent, Deadline::after(kLong)), IoOutcome::kDone);
  EXPECT_EQ(receive_all(server.socket.get(), got, Deadline::after(kLong)), IoOutcome::kDone);
  EXPECT_EQ(sent, got);
}

TEST(SystemTcpSocket, AnAddressOfNoInterfaceMayComeLaterAndANameOfNoHostIsAnError) {
  EXPECT_EQ(listen_tcp(parse_tcp_address("192.0.2.1:29500"), 1).error, EADDRNOTAVAIL);
  expect_error(ErrorCode::kSystem, {"no-such-host.invalid:1"}, [] {
    (void)connect_tcp(parse_tcp_address("no-such-host.invalid:1"), Deadline::after(milliseconds(1000)));
  });
}

}  // namespace

}  // namespace tokenyard
