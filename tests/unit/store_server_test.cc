// SPDX-License-Identifier: Apache-2.0
// The store against peers that do not keep to the rules: a live session must not notice them.
#include "group/store_server.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "group/store_session.h"
#include "group/store_wire.h"
#include "system/deadline.h"
#include "system/stream_socket.h"
#include "system/tcp_socket.h"
#include "unit/group_helpers.h"

namespace tokenyard::group {

namespace {

using namespace testing_groups;
using system::Deadline;
using system::IoOutcome;

// A live group of two over TCP, and a way to talk to its store by hand.
class StoreServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    on_threads(2, [&](int rank) {
      members_[static_cast<std::size_t>(rank)].emplace(Group::over_tcp(address_, rank, 2, {.deadline = kLong}));
    });
  }

  // Fails when the session has been disturbed.
  void expect_alive() {
    on_threads(2, [&](int rank) {
      const std::vector<Bytes> all =
          members_[static_cast<std::size_t>(rank)]->all_gather(to_bytes("rank" + std::to_string(rank)));
      EXPECT_EQ(to_text(all[0]) + to_text(all[1]), "rank0rank1");
    });
  }

  [[nodiscard]] system::FileDescriptor stranger() const {
    system::SocketAttempt attempt =
        system::connect_tcp(system::parse_tcp_address(address_), Deadline::after(milliseconds(5000)));
    EXPECT_TRUE(attempt.socket.valid());
    return std::move(attempt.socket);
  }

  // Everything that the store says until it closes.
  static std::vector<Frame> answers(const system::FileDescriptor& socket) {
    std::vector<Frame> frames;
    FrameReader reader(0x1FE);
    std::array<std::byte, 4096> buffer{};
    while (system::wait_for(socket.get(), POLLIN, Deadline::after(kLong))) {
      const system::Transfer step = system::receive_some(socket.get(), buffer);
      std::span<const std::byte> data(buffer.data(), step.bytes);
      while (!data.empty()) {
        if (std::optional<Frame> frame = reader.feed(data)) frames.push_back(std::move(*frame));
      }
      if (step.closed) return frames;
    }
    ADD_FAILURE() << "the store did not close the connection";
    return frames;
  }

  void expect_refusal(const Bytes& message, RefusalCode code, const std::string& reason) {
    const system::FileDescriptor socket = stranger();
    EXPECT_EQ(system::send_all(socket.get(), message, Deadline::after(kLong)), IoOutcome::kDone);
    const std::vector<Frame> frames = answers(socket);
    ASSERT_EQ(frames.size(), 1U) << reason;
    EXPECT_EQ(frames[0].header.type, FrameType::kRefused);
    const std::optional<Refusal> refusal = decode_refusal(frames[0].payload);
    ASSERT_TRUE(refusal.has_value());
    EXPECT_EQ(refusal->code, code) << refusal->reason;
    EXPECT_NE(refusal->reason.find(reason), std::string::npos) << refusal->reason;
  }

  std::string address_ = free_address();
  std::array<std::optional<Group>, 2> members_;
};

Bytes hello(int rank, std::uint32_t num_ranks, const std::string& name = "") {
  return make_frame({.type = FrameType::kHello, .rank = static_cast<std::uint32_t>(rank)},
                    encode(Hello{.num_ranks = num_ranks, .name = name}));
}

TEST_F(StoreServerTest, RefusesWithAReason) {
  expect_refusal(to_bytes("GET / HTTP/1.1\r\n\r\n"), RefusalCode::kMalformed, "TKYD");
  Bytes other_version = hello(1, 2);
  other_version[4] = std::byte{2};
  expect_refusal(other_version, RefusalCode::kVersion, "version");
  Bytes too_long = hello(1, 2);
  too_long[15] = std::byte{0x7F};
  expect_refusal(too_long, RefusalCode::kMalformed, "longer");
  expect_refusal(make_frame({.type = FrameType::kGather, .rank = 1, .sequence = 1}, to_bytes("x")),
                 RefusalCode::kMalformed, "type");
  expect_refusal(make_frame({.type = FrameType::kHello, .rank = 1}, to_bytes("abc")), RefusalCode::kMalformed,
                 "4 bytes");
  expect_refusal(hello(1, 2), RefusalCode::kRankTaken, "rank 1 has joined already");
  expect_refusal(hello(7, 2), RefusalCode::kRank, "no rank 7");
  expect_refusal(hello(1, 3), RefusalCode::kRankTaken, "rank 0 says 2");
  expect_refusal(hello(1, 2, "other"), RefusalCode::kName, "'other'");
  expect_alive();
}

TEST_F(StoreServerTest, PartialFramesMayIdle) {
  std::vector<system::FileDescriptor> idle;
  for (std::size_t size : {1U, 4U, 23U, 24U, 26U}) {
    idle.push_back(stranger());
    const Bytes message = hello(1, 2, "abc");
    EXPECT_EQ(system::send_all(idle.back().get(), std::span(message).first(size), Deadline::after(kLong)),
              IoOutcome::kDone);
  }
  expect_alive();
  // The store still waits for the rest.
  for (const auto& socket : idle) {
    EXPECT_FALSE(system::wait_for(socket.get(), POLLIN, Deadline::after(milliseconds(10))));
  }
  expect_alive();
}

TEST_F(StoreServerTest, ManyStrangersDoNotKeepMembersOut) {
  std::vector<system::FileDescriptor> strangers;
  for (int i = 0; i < 200; ++i)
    strangers.push_back(stranger());
  expect_alive();
  expect_refusal(hello(1, 2), RefusalCode::kRankTaken, "rank 1");
  std::byte unused{};
  // The oldest were sent away to make room.
  EXPECT_EQ(system::receive_all(strangers[0].get(), std::span(&unused, 1), Deadline::after(kLong)), IoOutcome::kClosed);
}

TEST_F(StoreServerTest, RandomBytesDisturbNobody) {
  std::mt19937 random(20240607);
  for (int round = 0; round < 300; ++round) {
    // Pure noise, or a valid header with noise in one place and noise behind it.
    Bytes message = round % 3 == 0 ? Bytes{} : hello(static_cast<int>(random() % 4), random() % 4);
    if (round % 3 == 2) message[random() % message.size()] = static_cast<std::byte>(random());
    for (std::size_t n = random() % 2000; n > 0; --n)
      message.push_back(static_cast<std::byte>(random()));
    const system::FileDescriptor socket = stranger();
    // It may be cut off before it has said everything.
    (void)system::send_all(socket.get(), message, Deadline::after(kLong));
    if (round % 50 == 0) expect_alive();
  }
  expect_alive();
}

// No socket: whatever members and strangers say, replies go to known connections, and lengths stay within bounds.
TEST(StoreSession, RandomFramesNeverBreakIt) {
  std::mt19937 random(7);
  for (int run = 0; run < 200; ++run) {
    StoreSession session({.name = "n", .num_ranks = 3, .nonce = 1});
    for (int step = 0; step < 200; ++step) {
      const ConnectionId from = random() % 6;
      const std::array<FrameType, 3> types{FrameType::kHello, FrameType::kGather, FrameType::kWho};
      Frame frame{.header = {.type = types[random() % 3],
                             .rank = static_cast<std::uint32_t>(random() % 4),
                             .length = 0,
                             .sequence = random() % 5},
                  .payload = {}};
      if (frame.header.type == FrameType::kHello) frame.payload = encode(Hello{.num_ranks = 3, .name = "n"});
      std::vector<Reply> replies;
      if (random() % 20 == 0) {
        session.on_closed(from, replies);
      } else if (random() % 20 == 0) {
        session.on_fault(from, WireFault::kLength, replies);
      } else {
        session.on_frame(from, std::move(frame), replies);
      }
      for (const Reply& reply : replies) {
        EXPECT_LT(reply.to, 6U);
        EXPECT_GE(reply.bytes->size(), kHeaderBytes);
        EXPECT_FALSE(reply.last && session.is_member(reply.to));
      }
    }
  }
}

// A member that breaks the rules is expelled, and the others learn it as its loss.
TEST_F(StoreServerTest, AMemberThatBreaksTheRulesIsLost) {
  const std::string name = free_address();
  std::optional<Group> zero;
  std::thread rank0([&] { zero.emplace(Group::over_tcp(name, 0, 2, {.deadline = kLong})); });
  system::SocketAttempt attempt;
  while (!attempt.socket.valid()) {
    attempt = system::connect_tcp(system::parse_tcp_address(name), Deadline::after(kLong));
    if (!attempt.socket.valid()) std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_EQ(system::send_all(attempt.socket.get(), hello(1, 2), Deadline::after(kLong)), IoOutcome::kDone);
  rank0.join();
  // Collective 2 without collective 1.
  const Bytes wrong = make_frame({.type = FrameType::kGather, .rank = 1, .sequence = 2}, {});
  EXPECT_EQ(system::send_all(attempt.socket.get(), wrong, Deadline::after(kLong)), IoOutcome::kDone);
  expect_error(ErrorCode::kPeerLost, {"rank 1"}, [&] { zero->barrier(); });
  const std::vector<Frame> frames = answers(attempt.socket);
  ASSERT_EQ(frames.size(), 2U);
  EXPECT_EQ(frames[0].header.type, FrameType::kWelcome);
  EXPECT_EQ(decode_nonce(frames[0].payload), zero->nonce());
  EXPECT_EQ(frames[1].header.type, FrameType::kRefused);
  EXPECT_NE(decode_refusal(frames[1].payload)->reason.find("collective 2 where 1"), std::string::npos);
}

// A member that does not read its results delays nobody but, for a moment, the departure of rank 0.
TEST(StoreServer, ASlowMemberDelaysOnlyTheEnd) {
  const std::string name = free_address();
  constexpr int kRanks = 3;
  std::array<std::optional<Group>, 2> members;
  std::thread joining([&] {
    on_threads(2, [&](int rank) {
      members[static_cast<std::size_t>(rank)].emplace(Group::over_tcp(name, rank, kRanks, {.deadline = kLong}));
    });
  });
  system::SocketAttempt attempt;
  while (!attempt.socket.valid()) {
    attempt = system::connect_tcp(system::parse_tcp_address(name), Deadline::after(kLong));
    if (!attempt.socket.valid()) std::this_thread::sleep_for(milliseconds(5));
  }
  const auto say = [&](const Bytes& message) {
    EXPECT_EQ(system::send_all(attempt.socket.get(), message, Deadline::after(kLong)), IoOutcome::kDone);
  };
  say(hello(2, kRanks));
  joining.join();
  const Bytes large(static_cast<std::size_t>(Group::kMaxGatherBytes), std::byte{1});
  for (std::uint64_t round = 1; round <= 8; ++round) {
    say(make_frame({.type = FrameType::kGather, .rank = 2, .sequence = round}, large));
    on_threads(2, [&](int rank) { EXPECT_EQ(members[static_cast<std::size_t>(rank)]->all_gather(large).size(), 3U); });
  }
  const Stopwatch watch;
  members[0].reset();
  EXPECT_LT(watch.elapsed(), StoreServer::kLinger + milliseconds(2000));
}

// The client refuses what is no store instead of waiting for it to make sense.
TEST(StoreClient, NoticesThatItTalksToSomethingElse) {
  const std::string name = free_address();
  const system::SocketAttempt listener = system::listen_tcp(system::parse_tcp_address(name), 4);
  std::thread web([&] {
    ASSERT_TRUE(system::wait_for(listener.socket.get(), POLLIN, Deadline::after(kLong)));
    const system::SocketAttempt client = system::accept_some(listener.socket.get());
    const Bytes reply = to_bytes("HTTP/1.1 400 Bad Request\r\n\r\n");
    EXPECT_EQ(system::send_all(client.socket.get(), reply, Deadline::after(kLong)), IoOutcome::kDone);
    std::array<std::byte, 64> hello_bytes{};
    (void)system::receive_all(client.socket.get(), hello_bytes, Deadline::after(milliseconds(2000)));
  });
  expect_error(ErrorCode::kMismatch, {"no store of this library", "TKYD"},
               [&] { (void)Group::over_tcp(name, 1, 2, {.deadline = kLong}); });
  web.join();
}

}  // namespace

}  // namespace tokenyard::group
