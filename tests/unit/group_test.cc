// SPDX-License-Identifier: Apache-2.0
// What every kind of group promises, with ranks as threads.
#include "tokenyard/group.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "unit/group_helpers.h"

namespace tokenyard {

namespace {

using namespace testing_groups;

enum class Kind : std::uint8_t { kInProcess, kOnHost, kOverTcp, kCallbacks };

std::string kind_name(Kind kind) {
  switch (kind) {
    case Kind::kInProcess:
      return "InProcess";
    case Kind::kOnHost:
      return "OnHost";
    case Kind::kOverTcp:
      return "OverTcp";
    case Kind::kCallbacks:
      return "Callbacks";
  }
  return "";
}

// All members of one group; a member leaves when its entry is reset.
using Members = std::vector<std::optional<Group>>;

Members join_with(int num_ranks, const std::function<Group(int)>& join) {
  Members members(static_cast<std::size_t>(num_ranks));
  on_threads(num_ranks, [&](int rank) { members[static_cast<std::size_t>(rank)].emplace(join(rank)); });
  return members;
}

// Callbacks over a group of another kind: what a caller would bring, with an engine that is tested elsewhere.
Members wrap_in_callbacks(std::vector<Group> inner) {
  return join_with(static_cast<int>(inner.size()), [&](int rank) {
    const Group group = inner[static_cast<std::size_t>(rank)];
    return Group::from_callbacks({.rank = rank,
                                  .num_ranks = group.num_ranks(),
                                  .all_gather = [group](auto bytes) { return group.all_gather(bytes); },
                                  .barrier = [group] { group.barrier(); }});
  });
}

Members make_group(Kind kind, int num_ranks, milliseconds deadline = kLong) {
  const GroupOptions options{.deadline = deadline};
  switch (kind) {
    case Kind::kInProcess: {
      Members members;
      for (Group& group : Group::in_process(num_ranks, options))
        members.emplace_back(std::move(group));
      return members;
    }
    case Kind::kOnHost: {
      const std::string name = unique_name("unit");
      return join_with(num_ranks, [&](int rank) { return Group::on_host(name, rank, num_ranks, options); });
    }
    case Kind::kOverTcp: {
      const std::string address = free_address();
      return join_with(num_ranks, [&](int rank) { return Group::over_tcp(address, rank, num_ranks, options); });
    }
    case Kind::kCallbacks:
      return wrap_in_callbacks(Group::in_process(num_ranks, options));
  }
  return {};
}

class EveryGroup : public ::testing::TestWithParam<Kind> {};

// A group that notices its dead.
class AgreeingGroup : public ::testing::TestWithParam<Kind> {};

std::string param_name(const ::testing::TestParamInfo<Kind>& info) {
  return kind_name(info.param);
}

INSTANTIATE_TEST_SUITE_P(Kinds,
                         EveryGroup,
                         ::testing::Values(Kind::kInProcess, Kind::kOnHost, Kind::kOverTcp, Kind::kCallbacks),
                         param_name);
INSTANTIATE_TEST_SUITE_P(Kinds,
                         AgreeingGroup,
                         ::testing::Values(Kind::kInProcess, Kind::kOnHost, Kind::kOverTcp),
                         param_name);

std::string words_of(int rank, int round) {
  std::string words(static_cast<std::size_t>((rank * 7 + round) % 23), static_cast<char>('a' + rank % 26));
  return words;
}

TEST_P(EveryGroup, GathersEveryRanksBytesInRankOrder) {
  for (const int num_ranks : {1, 2, 3, 8, 64}) {
    const Members members = make_group(GetParam(), num_ranks);
    on_threads(num_ranks, [&](int rank) {
      const Group& group = *members[static_cast<std::size_t>(rank)];
      EXPECT_EQ(group.rank(), rank);
      EXPECT_EQ(group.num_ranks(), num_ranks);
      for (int round = 0; round < 5; ++round) {
        const std::vector<Bytes> all = group.all_gather(to_bytes(words_of(rank, round)));
        ASSERT_EQ(all.size(), static_cast<std::size_t>(num_ranks));
        for (int peer = 0; peer < num_ranks; ++peer) {
          EXPECT_EQ(to_text(all[static_cast<std::size_t>(peer)]), words_of(peer, round));
        }
        group.barrier();
      }
    });
  }
}

TEST_P(EveryGroup, SharesANonceThatOtherGroupsDoNotHave) {
  std::set<std::uint64_t> nonces;
  for (int i = 0; i < 3; ++i) {
    const Members members = make_group(GetParam(), 3);
    for (const auto& member : members)
      EXPECT_EQ(member->nonce(), members[0]->nonce());
    nonces.insert(members[0]->nonce());
  }
  EXPECT_EQ(nonces.size(), 3U);
}

TEST_P(EveryGroup, TakesTheLargestContributionAndNamesBothNumbersBeyond) {
  const Members members = make_group(GetParam(), 2);
  on_threads(2, [&](int rank) {
    const Group& group = *members[static_cast<std::size_t>(rank)];
    const Bytes largest(static_cast<std::size_t>(Group::kMaxGatherBytes), static_cast<std::byte>(rank + 1));
    const Bytes larger(largest.size() + 1);
    expect_error(ErrorCode::kInvalidArgument, {"1048577", "1048576"}, [&] { (void)group.all_gather(larger); });
    const std::vector<Bytes> all = group.all_gather(largest);  // the refused call did not count
    EXPECT_EQ(all[0], Bytes(largest.size(), std::byte{1}));
    EXPECT_EQ(all[1], Bytes(largest.size(), std::byte{2}));
    expect_error(ErrorCode::kInvalidArgument, {"-1"}, [&] { group.barrier(milliseconds(-1)); });
  });
}

TEST_P(EveryGroup, ABarrierHoldsEverybody) {
  constexpr int kRanks = 4;
  const Members members = make_group(GetParam(), kRanks);
  std::atomic<int> arrived{0};
  on_threads(kRanks, [&](int rank) {
    for (int round = 1; round <= 10; ++round) {
      if (rank == round % kRanks) std::this_thread::sleep_for(milliseconds(2));
      ++arrived;
      members[static_cast<std::size_t>(rank)]->barrier();
      EXPECT_GE(arrived.load(), round * kRanks);
    }
  });
}

TEST_P(EveryGroup, SaysWhetherItNoticesTheDead) {
  const Members members = make_group(GetParam(), 2);
  for (const auto& member : members)
    EXPECT_EQ(member->offers_agreement(), GetParam() != Kind::kCallbacks);
}

TEST_P(EveryGroup, SeveralLiveInOneProcessAndOverlap) {
  const Members all = make_group(GetParam(), 4);
  const Members low = make_group(GetParam(), 2);
  const Members high = make_group(GetParam(), 2);
  on_threads(4, [&](int rank) {
    const Group& big = *all[static_cast<std::size_t>(rank)];
    const Group& small = *(rank < 2 ? low : high)[static_cast<std::size_t>(rank % 2)];
    for (int round = 0; round < 20; ++round) {
      // The small groups run ahead of each other and of the large one.
      const std::vector<Bytes> pair = small.all_gather(to_bytes(std::to_string(rank)));
      EXPECT_EQ(to_text(pair[0]), std::to_string(rank / 2 * 2));
      EXPECT_EQ(to_text(pair[1]), std::to_string(rank / 2 * 2 + 1));
      if (round % 4 == 0) {
        EXPECT_EQ(to_text(big.all_gather(to_bytes(std::to_string(round)))[3]), std::to_string(round));
      }
    }
  });
}

TEST_P(AgreeingGroup, ATimeoutNamesWhoDidNotCome) {
  const Members members = make_group(GetParam(), 5);
  std::barrier together(3);
  on_threads(5, [&](int rank) {
    if (rank == 1 || rank == 4) return;
    together.arrive_and_wait();
    const Stopwatch watch;
    const std::optional<Error> error =
        error_of([&] { members[static_cast<std::size_t>(rank)]->barrier(milliseconds(300)); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kTimeout) << error->what();
    EXPECT_EQ(error->rank(), rank);
    EXPECT_EQ(error->peer(), 1);
    EXPECT_NE(std::string(error->what()).find("ranks 1 and 4"), std::string::npos) << error->what();
    EXPECT_NE(std::string(error->what()).find("300 ms"), std::string::npos) << error->what();
    EXPECT_GE(watch.elapsed(), milliseconds(300));
  });
}

// The late rank's call meets the one that timed out, and the next ones meet each other.
TEST_P(AgreeingGroup, ATimeoutCountsAndTheNextCollectiveWorks) {
  const Members members = make_group(GetParam(), 3);
  on_threads(3, [&](int rank) {
    const Group& group = *members[static_cast<std::size_t>(rank)];
    if (rank != 2) {
      expect_error(ErrorCode::kTimeout, {"rank 2"},
                   [&] { (void)group.all_gather(to_bytes("first" + std::to_string(rank)), milliseconds(50)); });
    } else {
      std::this_thread::sleep_for(milliseconds(400));
      const std::vector<Bytes> late = group.all_gather(to_bytes("first2"));
      EXPECT_EQ(to_text(late[0]), "first0");
      EXPECT_EQ(to_text(late[1]), "first1");
    }
    for (int round = 0; round < 3; ++round) {
      const std::vector<Bytes> next = group.all_gather(to_bytes(std::to_string(round) + std::to_string(rank)));
      for (int peer = 0; peer < 3; ++peer) {
        EXPECT_EQ(to_text(next[static_cast<std::size_t>(peer)]), std::to_string(round) + std::to_string(peer));
      }
    }
  });
}

TEST_P(AgreeingGroup, ARankThatRunsFarAheadIsStoppedAndCatchesUp) {
  const Members members = make_group(GetParam(), 2);
  for (int i = 0; i < 16; ++i) {
    expect_error(ErrorCode::kTimeout, {"rank 1"}, [&] { members[0]->barrier(milliseconds(0)); });
  }
  for (int i = 0; i < 2; ++i) {
    expect_error(ErrorCode::kInvalidState, {"16", "rank 1"}, [&] { members[0]->barrier(milliseconds(1000)); });
  }
  for (int i = 0; i < 16; ++i)
    members[1]->barrier();
  on_threads(2, [&](int rank) {
    const std::vector<Bytes> all = members[static_cast<std::size_t>(rank)]->all_gather(to_bytes(std::to_string(rank)));
    EXPECT_EQ(to_text(all[0]) + to_text(all[1]), "01");
  });
}

TEST_P(AgreeingGroup, AMemberThatLeavesIsNamedAtOnce) {
  for (const int leaver : {0, 1, 2}) {
    Members members = make_group(GetParam(), 3);
    on_threads(3, [&](int rank) {
      auto& member = members[static_cast<std::size_t>(rank)];
      member->barrier();
      if (rank == leaver) {
        std::this_thread::sleep_for(milliseconds(50));
        member.reset();
        return;
      }
      for (int again = 0; again < 2; ++again) {  // pending, then later
        const Stopwatch watch;
        const std::optional<Error> error = error_of([&] { member->barrier(); });
        ASSERT_TRUE(error.has_value());
        EXPECT_EQ(error->code(), ErrorCode::kPeerLost) << error->what();
        EXPECT_EQ(error->peer(), leaver) << error->what();
        EXPECT_LT(watch.elapsed(), milliseconds(5000));
      }
      std::this_thread::sleep_for(milliseconds(100));  // so that rank 0 is not the second to leave too early
    });
  }
}

// Who leaves after its last collective takes nothing from those who still read it.
TEST_P(AgreeingGroup, LeavingLosesNoResult) {
  for (int round = 0; round < 20; ++round) {
    Members members = make_group(GetParam(), 4);
    const Bytes mine(200'000, static_cast<std::byte>(round));
    on_threads(4, [&](int rank) {
      auto& member = members[static_cast<std::size_t>(rank)];
      const std::vector<Bytes> all = member->all_gather(mine);
      member.reset();
      for (const Bytes& bytes : all)
        EXPECT_EQ(bytes, mine);
    });
  }
}

TEST_P(AgreeingGroup, CopiesAreOneMember) {
  Members members = make_group(GetParam(), 2);
  std::optional<Group> copy = members[1];
  members[1].reset();
  on_threads(2, [&](int rank) { (rank == 0 ? members[0] : copy)->barrier(); });
  copy.reset();
  expect_error(ErrorCode::kPeerLost, {"rank 1"}, [&] { members[0]->barrier(); });
}

TEST(Group, ChecksItsArgumentsBeforeAnyTraffic) {
  for (const int num_ranks : {0, -3, 1025}) {
    const std::vector<std::string> parts{std::to_string(num_ranks), "1024"};
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { (void)Group::in_process(num_ranks); });
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { (void)Group::on_host("x", 0, num_ranks); });
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { (void)Group::over_tcp("127.0.0.1:1", 0, num_ranks); });
  }
  for (const int rank : {-1, 2}) {
    const std::vector<std::string> parts{std::to_string(rank), "0 to 1"};
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { (void)Group::on_host("x", rank, 2); });
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { (void)Group::over_tcp("127.0.0.1:1", rank, 2); });
  }
  expect_error(ErrorCode::kInvalidArgument, {"0 characters"}, [] { (void)Group::on_host("", 0, 1); });
  expect_error(ErrorCode::kInvalidArgument, {"65", "64"}, [] { (void)Group::on_host(std::string(65, 'a'), 0, 1); });
  expect_error(ErrorCode::kInvalidArgument, {"32", "position 1"}, [] { (void)Group::on_host("a b", 0, 1); });
  expect_error(ErrorCode::kInvalidArgument, {"'nowhere'"}, [] { (void)Group::over_tcp("nowhere", 0, 1); });
  expect_error(ErrorCode::kInvalidArgument, {"-5"}, [] { (void)Group::in_process(2, {.deadline = milliseconds(-5)}); });
  EXPECT_EQ(Group::on_host(unique_name("") + std::string(40, '.'), 0, 1).num_ranks(), 1);
  EXPECT_EQ(Group::in_process(1024).size(), 1024U);
}

TEST(Group, CallbacksAreChecked) {
  const auto echo = [](std::span<const std::byte> bytes) {
    return std::vector<Bytes>{Bytes(bytes.begin(), bytes.end())};
  };
  const auto nothing = [] {};
  expect_error(ErrorCode::kInvalidArgument, {"all_gather"},
               [&] { (void)Group::from_callbacks({.all_gather = nullptr, .barrier = nothing}); });
  expect_error(ErrorCode::kInvalidArgument, {"barrier is missing"},
               [&] { (void)Group::from_callbacks({.all_gather = echo, .barrier = nullptr}); });
  expect_error(ErrorCode::kInvalidArgument, {"rank is 1"},
               [&] { (void)Group::from_callbacks({.rank = 1, .all_gather = echo, .barrier = nothing}); });
  // Too few entries, and entries in another order than that of the ranks.
  expect_error(ErrorCode::kMismatch, {"1 entries", "2 ranks"},
               [&] { (void)Group::from_callbacks({.num_ranks = 2, .all_gather = echo, .barrier = nothing}); });
  const auto twice = [](std::span<const std::byte> bytes) {
    return std::vector<Bytes>(2, Bytes(bytes.begin(), bytes.end()));
  };
  expect_error(ErrorCode::kMismatch, {"entry 1", "rank 0"},
               [&] { (void)Group::from_callbacks({.num_ranks = 2, .all_gather = twice, .barrier = nothing}); });
  EXPECT_EQ(Group::from_callbacks({.all_gather = echo, .barrier = nothing}).num_ranks(), 1);
}

}  // namespace

}  // namespace tokenyard
