// SPDX-License-Identifier: Apache-2.0
// The store's side of the conversation without a socket, and the member's side against a store that is played by hand.
#include "group/store_session.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "group/store_wire.h"
#include "system/stream_socket.h"
#include "system/tcp_socket.h"
#include "unit/group_helpers.h"

namespace tokenyard::group {

namespace {

using namespace testing_groups;
using system::Deadline;
using system::IoOutcome;

// Connection c speaks for rank c - 10.
class StoreSessionTest : public ::testing::Test {
 protected:
  std::vector<Reply> say(int rank, FrameHeader header, const Bytes& payload = {}) {
    header.rank = static_cast<std::uint32_t>(rank);
    std::vector<Reply> replies;
    session_.on_frame(connection(rank), Frame{.header = header, .payload = payload}, replies);
    return replies;
  }

  std::vector<Reply> hello(int rank) {
    return say(rank, {.type = FrameType::kHello}, encode(Hello{.num_ranks = 3, .name = "n"}));
  }

  std::vector<Reply> gather(int rank, std::uint64_t sequence) {
    return say(rank, {.type = FrameType::kGather, .sequence = sequence}, to_bytes(std::to_string(rank)));
  }

  std::vector<Reply> who(int rank, std::uint64_t sequence) {
    return say(rank, {.type = FrameType::kWho, .sequence = sequence});
  }

  std::vector<Reply> close(int rank) {
    std::vector<Reply> replies;
    session_.on_closed(connection(rank), replies);
    return replies;
  }

  void join_all() {
    for (int rank = 0; rank < 3; ++rank)
      (void)hello(rank);
  }

  static ConnectionId connection(int rank) { return static_cast<ConnectionId>(rank) + 10; }

  static void expect_reply(const Reply& reply, int rank, const Bytes& bytes) {
    EXPECT_EQ(reply.to, connection(rank));
    EXPECT_EQ(*reply.bytes, bytes);
    EXPECT_FALSE(reply.last);
  }

  static Bytes missing_frame(std::uint64_t sequence, const std::vector<int>& ranks) {
    return make_frame({.type = FrameType::kMissing, .sequence = sequence}, encode_ranks(ranks));
  }

  static Bytes lost_frame(std::uint32_t rank) { return make_frame({.type = FrameType::kLost, .rank = rank}, {}); }

  StoreSession session_{{.name = "n", .num_ranks = 3, .nonce = 77}};
};

TEST_F(StoreSessionTest, WelcomesAllWhenAllHaveCome) {
  EXPECT_TRUE(hello(2).empty());
  EXPECT_TRUE(hello(0).empty());
  const std::vector<Reply> asked = who(2, 0);
  ASSERT_EQ(asked.size(), 1U);
  expect_reply(asked[0], 2, missing_frame(0, {1}));
  const std::vector<Reply> welcomes = hello(1);
  ASSERT_EQ(welcomes.size(), 3U);
  for (int rank = 0; rank < 3; ++rank) {
    expect_reply(welcomes[static_cast<std::size_t>(rank)], rank,
                 make_frame({.type = FrameType::kWelcome}, encode_nonce(77)));
  }
}

TEST_F(StoreSessionTest, AResultIsOneFramePerRankForThoseWhoWait) {
  join_all();
  EXPECT_TRUE(gather(1, 1).empty());
  EXPECT_TRUE(gather(0, 1).empty());
  const std::vector<Reply> asked = who(1, 1);  // and rank 1 waits no longer
  ASSERT_EQ(asked.size(), 1U);
  expect_reply(asked[0], 1, missing_frame(1, {2}));
  const std::vector<Reply> results = gather(2, 1);
  ASSERT_EQ(results.size(), 2U);
  Bytes expected;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    append_frame(expected, {.type = FrameType::kResult, .rank = rank, .sequence = 1}, to_bytes(std::to_string(rank)));
  }
  expect_reply(results[0], 0, expected);
  expect_reply(results[1], 2, expected);
}

TEST_F(StoreSessionTest, TheFirstLossIsToldOnceAndEndsTheSession) {
  join_all();
  (void)gather(0, 1);
  const std::vector<Reply> news = close(2);
  ASSERT_EQ(news.size(), 2U);
  expect_reply(news[0], 0, lost_frame(2));
  expect_reply(news[1], 1, lost_frame(2));
  EXPECT_TRUE(gather(1, 1).empty());
  EXPECT_TRUE(close(1).empty());
  const std::vector<Reply> late = hello(2);
  ASSERT_EQ(late.size(), 1U);
  EXPECT_TRUE(late[0].last);
  EXPECT_EQ(decode_refusal(std::span(*late[0].bytes).subspan(kHeaderBytes))->code, RefusalCode::kEnded);
}

TEST_F(StoreSessionTest, ARankZeroThatGivesUpSaysForWhomItWaited) {
  (void)hello(0);
  (void)hello(1);
  const std::vector<Reply> news = close(0);
  ASSERT_EQ(news.size(), 2U);
  expect_reply(news[0], 1, missing_frame(0, {2}));
  expect_reply(news[1], 1, lost_frame(0));
}

TEST_F(StoreSessionTest, TheSeventeenthOpenCollectiveIsRefusedAndDoesNotCount) {
  join_all();
  (void)gather(1, 1);
  for (std::uint64_t sequence = 1; sequence <= 16; ++sequence)
    EXPECT_TRUE(gather(0, sequence).empty());
  for (int again = 0; again < 2; ++again) {
    const std::vector<Reply> refused = gather(0, 17);
    ASSERT_EQ(refused.size(), 1U);
    EXPECT_FALSE(refused[0].last);
    EXPECT_EQ(decode_refusal(std::span(*refused[0].bytes).subspan(kHeaderBytes))->code, RefusalCode::kTooFarAhead);
  }
  EXPECT_EQ(gather(2, 1).size(), 3U);
  EXPECT_TRUE(gather(0, 17).empty());  // there is room again
}

// A store that did not see in time that the member had given up still sends it the result.
TEST(StoreClientTest, SkipsTheResultOfACollectiveThatTimedOut) {
  const std::string address = free_address();
  const system::SocketAttempt listener = system::listen_tcp(system::parse_tcp_address(address), 4);
  ASSERT_TRUE(listener.socket.valid());
  std::thread store([&] {
    ASSERT_TRUE(system::wait_for(listener.socket.get(), POLLIN, Deadline::after(kLong)));
    const system::SocketAttempt member = system::accept_some(listener.socket.get());
    const auto hear = [&](std::size_t payload) {
      Bytes frame(kHeaderBytes + payload);
      EXPECT_EQ(system::receive_all(member.socket.get(), frame, Deadline::after(kLong)), IoOutcome::kDone);
    };
    const auto tell = [&](FrameHeader header, const Bytes& payload) {
      const Bytes frame = make_frame(header, payload);
      EXPECT_EQ(system::send_all(member.socket.get(), frame, Deadline::after(kLong)), IoOutcome::kDone);
    };
    hear(4);  // hello
    tell({.type = FrameType::kWelcome}, encode_nonce(5));
    hear(3);  // gather 1
    hear(0);  // who 1
    const std::vector<int> missing{0};
    tell({.type = FrameType::kMissing, .sequence = 1}, encode_ranks(missing));
    hear(3);  // gather 2
    for (std::uint64_t sequence = 1; sequence <= 2; ++sequence) {
      for (std::uint32_t rank = 0; rank < 2; ++rank) {
        const Bytes payload = to_bytes(std::to_string(sequence * 10 + rank));
        tell({.type = FrameType::kResult, .rank = rank, .sequence = sequence}, payload);
      }
    }
    std::byte end{};
    EXPECT_EQ(system::receive_all(member.socket.get(), std::span(&end, 1), Deadline::after(kLong)), IoOutcome::kClosed);
  });
  {
    const Group group = Group::over_tcp(address, 1, 2, {.deadline = kLong});
    expect_error(ErrorCode::kTimeout, {"rank 0"}, [&] { (void)group.all_gather(to_bytes("one"), milliseconds(20)); });
    const std::vector<Bytes> second = group.all_gather(to_bytes("two"));
    EXPECT_EQ(to_text(second[0]) + " " + to_text(second[1]), "20 21");
  }
  store.join();
}

}  // namespace

}  // namespace tokenyard::group
