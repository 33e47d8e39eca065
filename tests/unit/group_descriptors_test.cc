// SPDX-License-Identifier: Apache-2.0
// Descriptors of all ranks to all ranks, over every kind of group.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <array>
#include <functional>
#include <vector>

#include "tokenyard/group.h"

#include "fabric/descriptor_exchange.h"
#include "support/errors.h"
#include "system/segment.h"
#include "unit/group_helpers.h"

namespace tokenyard {

namespace {

using namespace testing_groups;
using fabric::exchange_descriptors;
using system::FileDescriptor;
using system::Segment;

constexpr std::int64_t kBytes = 1000;

// Each rank writes its number into its own segment and reads the peers' numbers through their descriptors.
bool exchanges(const Group& group, std::span<const char> wanted = {}) {
  const Segment own = Segment::create(kBytes);
  own.data()[kBytes - 1] = static_cast<std::byte>(group.rank() + 1);
  std::vector<FileDescriptor> fds = exchange_descriptors(group, own.fd(), wanted, kLong);
  if (fds.size() != static_cast<std::size_t>(group.num_ranks())) return false;
  for (int peer = 0; peer < group.num_ranks(); ++peer) {
    FileDescriptor& fd = fds[static_cast<std::size_t>(peer)];
    const bool expected = peer != group.rank() && (wanted.empty() || wanted[static_cast<std::size_t>(peer)] != 0);
    if (fd.valid() != expected) return false;
    if (!expected) continue;
    if ((::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) == 0) return false;
    if (Segment::import(std::move(fd), kBytes).data()[kBytes - 1] != static_cast<std::byte>(peer + 1)) return false;
  }
  return true;
}

TEST(GroupDescriptors, ProcessesSeeEachOthersMemory) {
  for (const int num_ranks : {1, 2, 3, 8}) {
    for (const bool tcp : {false, true}) {
      const std::string where = tcp ? free_address() : unique_name("unit");
      std::vector<Child> children;
      for (int rank = 0; rank < num_ranks; ++rank) {
        children.emplace_back([&, rank] {
          const Group group = tcp ? Group::over_tcp(where, rank, num_ranks) : Group::on_host(where, rank, num_ranks);
          // Twice: one communication's exchange must not disturb the next.
          return exchanges(group) && exchanges(group);
        });
      }
      for (Child& child : children)
        EXPECT_TRUE(child.wait());
    }
  }
}

TEST(GroupDescriptors, ThreadsMayExchangeToo) {
  const std::vector<Group> groups = Group::in_process(32);
  on_threads(32, [&](int rank) { EXPECT_TRUE(exchanges(groups[static_cast<std::size_t>(rank)])); });
}

TEST(GroupDescriptors, OnlyTheWantedOnesAreExchanged) {
  const std::vector<Group> groups = Group::in_process(4);
  // Ranks 0 and 1 are one process, 2 and 3 another.
  const std::array<char, 4> wanted_by_low{0, 0, 1, 1};
  const std::array<char, 4> wanted_by_high{1, 1, 0, 0};
  on_threads(4, [&](int rank) {
    EXPECT_TRUE(exchanges(groups[static_cast<std::size_t>(rank)], rank < 2 ? wanted_by_low : wanted_by_high));
  });
}

TEST(GroupDescriptors, AOneSidedWishIsAnErrorOnAllRanks) {
  const std::vector<Group> groups = Group::in_process(3);
  const std::array<char, 3> all{1, 1, 1};
  const std::array<char, 3> not_zero{0, 1, 1};
  on_threads(3, [&](int rank) {
    const Segment own = Segment::create(kBytes);
    expect_error(ErrorCode::kMismatch, {"rank 0 wants", "rank 2"}, [&] {
      (void)exchange_descriptors(groups[static_cast<std::size_t>(rank)], own.fd(), rank == 2 ? not_zero : all, kLong);
    });
  });
}

TEST(GroupDescriptors, OneRanksFailureIsEverybodysWithItsReason) {
  const std::vector<Group> groups = Group::in_process(3);
  on_threads(3, [&](int rank) {
    const Group& group = groups[static_cast<std::size_t>(rank)];
    const Segment own = Segment::create(kBytes);
    expect_error(rank == 1 ? ErrorCode::kInvalidArgument : ErrorCode::kPeerFailed, {"descriptor to exchange is -1"},
                 [&] { (void)exchange_descriptors(group, rank == 1 ? -1 : own.fd(), {}, kLong); });
    const std::array<char, 2> short_list{1, 1};
    expect_error(rank == 2 ? ErrorCode::kInvalidArgument : ErrorCode::kPeerFailed, {"2 entries", "3 ranks"}, [&] {
      (void)exchange_descriptors(group, own.fd(),
                                 rank == 2 ? std::span<const char>(short_list) : std::span<const char>(), kLong);
    });
    EXPECT_TRUE(exchanges(group));  // the group is as good as before
  });
}

// A rank that answers the gather and then dies must not cost the others their deadline.
TEST(GroupDescriptors, ADeathInTheMiddleIsNamed) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << support::kSanitizerNeedsDescriptors;
#endif
  const std::string name = unique_name("unit");
  std::vector<Child> children;
  for (int rank = 0; rank < 3; ++rank) {
    children.emplace_back([&, rank] {
      const Group group = Group::on_host(name, rank, 3);
      const Segment own = Segment::create(kBytes);
      if (rank == 2) {
        // No room for the peers' connections: it fails after all have listened.
        const rlimit limit{.rlim_cur = static_cast<rlim_t>(own.fd()) + 3, .rlim_max = 1024};
        if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
        const std::optional<Error> error = error_of([&] { (void)exchange_descriptors(group, own.fd(), {}, kLong); });
        return error && error->code() == ErrorCode::kSystem;
      }
      const Stopwatch watch;
      const std::optional<Error> error = error_of([&] { (void)exchange_descriptors(group, own.fd(), {}, kLong); });
      const bool good = error && error->code() == ErrorCode::kPeerLost && watch.elapsed() < milliseconds(5000);
      if (!good) std::fprintf(stderr, "rank %d: %s\n", rank, error ? error->what() : "no error");
      // The first to notice leaves too, so the other may name it.
      return good && error->peer() != rank;
    });
  }
  for (Child& child : children)
    EXPECT_TRUE(child.wait());
}

TEST(GroupDescriptors, APeerInAnotherNetworkIsUnsupported) {
  const std::string name = unique_name("unit");
  std::vector<Child> children;
  for (int rank = 0; rank < 3; ++rank) {
    children.emplace_back([&, rank] {
      const Group group = Group::on_host(name, rank, 3);
      // Rank 2 joins and then moves away, as if it had come over TCP from elsewhere.
      const bool moved = rank != 2 || ::unshare(CLONE_NEWNET) == 0 || ::unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0;
      const std::vector<Bytes> all_moved = group.all_gather(to_bytes(moved ? "yes" : "no"));
      if (to_text(all_moved[2]) == "no") return true;  // not permitted here, so there is nothing to see
      const Segment own = Segment::create(kBytes);
      const std::optional<Error> error = error_of([&] { (void)exchange_descriptors(group, own.fd(), {}, kLong); });
      const bool good = error && error->code() == ErrorCode::kUnsupported && error->peer() == (rank == 2 ? 0 : 2) &&
                        std::string(error->what()).find("another host") != std::string::npos;
      if (!good) std::fprintf(stderr, "rank %d: %s\n", rank, error ? error->what() : "no error");
      return good;
    });
  }
  for (Child& child : children)
    EXPECT_TRUE(child.wait());
}

TEST(GroupDescriptors, AMissingRankIsNamedAtTheDeadline) {
  const std::vector<Group> groups = Group::in_process(2);
  const Segment own = Segment::create(kBytes);
  expect_error(ErrorCode::kTimeout, {"rank 1", "100 ms"},
               [&] { (void)exchange_descriptors(groups[0], own.fd(), {}, milliseconds(100)); });
}

}  // namespace

}  // namespace tokenyard
