// SPDX-License-Identifier: Apache-2.0
// Groups of processes, and what is left of them after kill -9.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "tokenyard/group.h"

#include "system/segment.h"
#include "unit/group_helpers.h"

namespace tokenyard {

namespace {

using namespace testing_groups;

// Counters that forked processes share.
class Board {
 public:
  [[nodiscard]] std::atomic<std::uint64_t>& operator[](std::size_t index) const {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(memory_.data())[index];
  }

  [[nodiscard]] bool wait_for(std::size_t index, std::uint64_t value) const {
    const Stopwatch watch;
    while ((*this)[index].load() < value) {
      if (watch.elapsed() > kLong) return false;
      std::this_thread::sleep_for(milliseconds(2));
    }
    return true;
  }

 private:
  system::Segment memory_ = system::Segment::create(4096);  // zeroed, which is what a lock-free atomic 0 is
};

struct Address {
  bool tcp = false;
  std::string text;

  [[nodiscard]] Group join(int rank, int num_ranks, milliseconds deadline = kLong) const {
    const GroupOptions options{.deadline = deadline};
    return tcp ? Group::over_tcp(text, rank, num_ranks, options) : Group::on_host(text, rank, num_ranks, options);
  }
};

class ProcessGroup : public ::testing::TestWithParam<bool> {
 protected:
  Address address_{.tcp = GetParam(), .text = GetParam() ? free_address() : unique_name("unit")};
};

INSTANTIATE_TEST_SUITE_P(Kinds, ProcessGroup, ::testing::Bool(), [](const auto& kind) {
  return std::string(kind.param ? "OverTcp" : "OnHost");
});

bool gathers(const Group& group, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const std::vector<Bytes> all = group.all_gather(to_bytes(std::to_string(group.rank() * 100 + round)));
    for (int peer = 0; peer < group.num_ranks(); ++peer) {
      if (to_text(all[static_cast<std::size_t>(peer)]) != std::to_string(peer * 100 + round)) return false;
    }
  }
  return true;
}

bool loses(const Group& group, int peer) {
  const Stopwatch watch;
  const std::optional<Error> error = error_of([&] { group.barrier(); });
  const bool good =
      error && error->code() == ErrorCode::kPeerLost && error->peer() == peer && watch.elapsed() < milliseconds(5000);
  if (!good) std::fprintf(stderr, "rank %d: %s\n", group.rank(), error ? error->what() : "no error");
  return good;
}

TEST_P(ProcessGroup, ProcessesGather) {
  constexpr int kRanks = 5;
  std::vector<Child> children;
  for (int rank = 0; rank < kRanks; ++rank) {
    children.emplace_back([this, rank] { return gathers(address_.join(rank, kRanks), 20); });
  }
  for (Child& child : children)
    EXPECT_TRUE(child.wait());
}

TEST_P(ProcessGroup, AKilledMemberIsNamedByTheOthers) {
  constexpr int kRanks = 4;
  for (const int victim : {2, 0}) {
    const Board board;
    std::vector<Child> children;
    for (int rank = 0; rank < kRanks; ++rank) {
      children.emplace_back([&, rank] {
        const Group group = address_.join(rank, kRanks);
        if (!gathers(group, 3)) return false;
        ++board[0];
        if (rank == victim) std::this_thread::sleep_for(kLong);  // is killed meanwhile
        const bool pending = loses(group, victim);
        const bool later = loses(group, victim);
        ++board[1];
        // Leave together: when rank 0 is alive, its leaving would be another loss.
        return board.wait_for(1, kRanks - 1) && pending && later;
      });
    }
    ASSERT_TRUE(board.wait_for(0, kRanks));
    std::this_thread::sleep_for(milliseconds(50));  // so that the others are inside their barrier
    children[static_cast<std::size_t>(victim)].kill();
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      EXPECT_TRUE(children[static_cast<std::size_t>(rank)].wait()) << "rank " << rank;
    }
  }
}

TEST_P(ProcessGroup, ANewSessionFollowsOneThatWasKilled) {
  constexpr int kRanks = 3;
  for (int session = 0; session < 3; ++session) {
    const Board board;
    std::vector<Child> children;
    for (int rank = 0; rank < kRanks; ++rank) {
      children.emplace_back([&, rank] {
        const Group group = address_.join(rank, kRanks);
        if (!gathers(group, 2)) return false;
        ++board[0];
        std::this_thread::sleep_for(kLong);
        return true;
      });
    }
    EXPECT_TRUE(board.wait_for(0, kRanks));
  }  // kills them
}

// A rank that dies before all have come leaves its place to the one that is started in its stead.
TEST_P(ProcessGroup, ARankThatDiesWhileJoiningMayBeReplaced) {
  Child zero([this] { return gathers(address_.join(0, 3), 2); });
  Child one([this] { return gathers(address_.join(1, 3), 2); });
  std::this_thread::sleep_for(milliseconds(100));
  one.kill();
  Child second_one([this] { return gathers(address_.join(1, 3), 2); });
  Child two([this] { return gathers(address_.join(2, 3), 2); });
  EXPECT_TRUE(zero.wait());
  EXPECT_TRUE(second_one.wait());
  EXPECT_TRUE(two.wait());
}

bool named_in_file(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str().find(name) != std::string::npos;
}

bool named_in_folder(const std::string& path, const std::string& name) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    if (entry.path().filename().string().find(name) != std::string::npos) return true;
  }
  return false;
}

TEST(ProcessGroupOnHost, NothingIsLeftWhenAllAreKilled) {
  const std::string name = unique_name("leftover");
  const Board board;
  {
    std::vector<Child> children;
    for (int rank = 0; rank < 3; ++rank) {
      children.emplace_back([&, rank] {
        const Group group = Group::on_host(name, rank, 3, {.deadline = kLong});
        ++board[0];
        std::this_thread::sleep_for(kLong);
        return true;
      });
    }
    ASSERT_TRUE(board.wait_for(0, 3));
    EXPECT_TRUE(named_in_file("/proc/net/unix", name));  // while it lives, so that its absence means something
    EXPECT_FALSE(named_in_folder("/dev/shm", name));
    EXPECT_FALSE(named_in_folder("/tmp", name));
  }
  EXPECT_FALSE(named_in_file("/proc/net/unix", name));
  EXPECT_FALSE(named_in_folder("/dev/shm", name));
  EXPECT_FALSE(named_in_folder("/tmp", name));
}

// Rank 0 holds the store; its end must not wait for anybody's deadline.
TEST_P(ProcessGroup, LeavingTakesNoTime) {
  std::vector<Child> children;
  const Board board;
  for (int rank = 0; rank < 3; ++rank) {
    children.emplace_back([&, rank] {
      std::optional<Group> group = address_.join(rank, 3);
      group->barrier();
      if (rank != 0) return board.wait_for(0, 1) && loses(*group, 0);
      const Stopwatch watch;
      group.reset();
      ++board[0];
      return watch.elapsed() < milliseconds(1000);
    });
  }
  for (Child& child : children)
    EXPECT_TRUE(child.wait());
}

}  // namespace

}  // namespace tokenyard
