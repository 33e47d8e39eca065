// SPDX-License-Identifier: Apache-2.0
// Coming together at rank 0's store: late ranks, missing ranks, wrong ranks, and one session after another.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tokenyard/group.h"

#include "unit/group_helpers.h"

namespace tokenyard {

namespace {

using namespace testing_groups;

TEST(GroupJoin, AJoinThatTimesOutNamesWhoIsMissing) {
  const std::string name = unique_name("unit");
  const std::string address = free_address();
  const auto join = [&](bool tcp, int rank) {
    const GroupOptions options{.deadline = milliseconds(400)};
    (void)(tcp ? Group::over_tcp(address, rank, 4, options) : Group::on_host(name, rank, 4, options));
  };
  for (const bool tcp : {false, true}) {
    // Whichever gives up first, both learn it: rank 0 takes the store with it when it goes.
    on_threads(2, [&](int rank) { expect_error(ErrorCode::kTimeout, {"2 and 3"}, [&] { join(tcp, rank); }); });
    expect_error(ErrorCode::kTimeout, {"rank 0", "400 ms"}, [&] { join(tcp, 1); });
  }
}

TEST(GroupJoin, LateRanksAreWaitedFor) {
  const std::string address = free_address();
  on_threads(3, [&](int rank) {
    std::this_thread::sleep_for(milliseconds(rank == 0 ? 300 : rank * 30));
    Group::over_tcp(address, rank, 3, {.deadline = kLong}).barrier();
  });
}

TEST(GroupJoin, ADuplicateRankAndAnotherSizeAreRefusedWithTheReason) {
  const std::string name = unique_name("unit");
  const GroupOptions options{.deadline = kLong};
  std::optional<Group> zero;
  std::thread rank0([&] { zero.emplace(Group::on_host(name, 0, 2, options)); });
  // While the group is joining, another size is a mistake that waiting does not cure.
  expect_error(ErrorCode::kMismatch, {"3 ranks", "says 2"}, [&] { (void)Group::on_host(name, 1, 3, options); });
  const Group one = Group::on_host(name, 1, 2, options);
  rank0.join();
  expect_error(ErrorCode::kMismatch, {"rank 1 has joined already"},
               [&] { (void)Group::on_host(name, 1, 2, {.deadline = milliseconds(100)}); });
  expect_error(ErrorCode::kSystem, {name, "taken by another group"},
               [&] { (void)Group::on_host(name, 0, 2, {.deadline = milliseconds(100)}); });
  // The session is not disturbed.
  on_threads(2, [&](int rank) { (rank == 0 ? *zero : one).barrier(); });
}

TEST(GroupJoin, SessionsFollowEachOtherAtOneAddress) {
  for (const bool tcp : {false, true}) {
    const std::string where = tcp ? free_address() : unique_name("unit");
    std::array<std::array<std::uint64_t, 3>, 10> nonces{};
    on_threads(3, [&](int rank) {
      for (auto& session : nonces) {
        const GroupOptions options{.deadline = kLong};
        const Group group = tcp ? Group::over_tcp(where, rank, 3, options) : Group::on_host(where, rank, 3, options);
        session[static_cast<std::size_t>(rank)] = group.nonce();
        const std::vector<Bytes> all = group.all_gather(to_bytes(std::to_string(rank)));
        EXPECT_EQ(to_text(all[0]) + to_text(all[1]) + to_text(all[2]), "012");
      }
    });
    std::set<std::uint64_t> distinct;
    for (const auto& session : nonces) {
      EXPECT_EQ(session[0], session[1]);
      EXPECT_EQ(session[0], session[2]);
      distinct.insert(session[0]);
    }
    EXPECT_EQ(distinct.size(), nonces.size());
  }
}

}  // namespace

}  // namespace tokenyard
