// SPDX-License-Identifier: Apache-2.0
#include "cli/ranks.h"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "tokenyard/error.h"

#include "system/deadline.h"
#include "system/random.h"
#include "system/segment.h"

namespace tokenyard::cli {
namespace {

using RankMain = std::function<void(const Group&)>;

// How long ranks may take to end by themselves when one has failed: time for an announced failure to arrive.
constexpr std::chrono::milliseconds kGrace{3000};
constexpr std::chrono::milliseconds kPollInterval{10};
constexpr int kFailureStatus = 1;

// Where the rank that fails first leaves its message, in memory that forked ranks share.
struct FirstFailure {
  std::atomic<int> claimed{0};
  std::array<char, 4096> text{};

  void report(int rank, const char* what) noexcept {
    // Read only after the ranks have ended, so the join or wait orders it.
    if (claimed.exchange(1, std::memory_order_relaxed) != 0) return;
    std::snprintf(text.data(), text.size(), "rank %d: %s", rank, what);
  }
};

static_assert(std::atomic<int>::is_always_lock_free, "shared between processes");

bool run_guarded(int rank, const std::function<void()>& work, FirstFailure& failure) {
  try {
    work();
    return true;
  } catch (const std::exception& error) {
    failure.report(rank, error.what());
  } catch (...) {
    failure.report(rank, "an exception of an unknown type");
  }
  return false;
}

void run_threads(int num_ranks, const RankMain& rank_main, FirstFailure& failure) {
  std::vector<Group> groups = Group::in_process(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    // A thread holds the only copy of its group, so that one that fails leaves the group and the others learn of it.
    Group group = std::move(groups[static_cast<std::size_t>(rank)]);
    threads.emplace_back([rank, &rank_main, &failure, own = std::make_unique<Group>(std::move(group))]() mutable {
      run_guarded(
          rank, [&] { rank_main(*own); }, failure);
      own.reset();
    });
  }
  for (std::thread& thread : threads)
    thread.join();
}

struct Child {
  int rank = 0;
  pid_t pid = -1;
};

[[noreturn]] void run_child(
    const std::string& group_name, Child self, int num_ranks, const RankMain& rank_main, FirstFailure& failure) {
  // A program that is killed takes its ranks along; one killed before this line is seen by the comparison.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const bool orphaned = ::getppid() != self.pid;
  const bool right =
      !orphaned && run_guarded(
                       self.rank, [&] { rank_main(Group::on_host(group_name, self.rank, num_ranks)); }, failure);
  // Without destructors and flushes, which belong to the parent.
  ::_exit(right ? EXIT_SUCCESS : kFailureStatus);
}

std::vector<Child> fork_ranks(int num_ranks, const RankMain& rank_main, FirstFailure& failure) {
  const std::string group_name = fmt::format("tokenyard-run-{:016x}", system::random_u64());
  const pid_t parent = ::getpid();
  std::fflush(nullptr);
  std::vector<Child> children;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) run_child(group_name, {.rank = rank, .pid = parent}, num_ranks, rank_main, failure);
    if (pid < 0) {
      failure.report(rank, fmt::format("fork failed: {}", std::generic_category().message(errno)).c_str());
      break;
    }
    children.push_back({.rank = rank, .pid = pid});
  }
  return children;
}

// Whether the child has ended; reports an end that was no success.
bool reap(const Child& child, int options, FirstFailure& failure) {
  int state = 0;
  pid_t ended = 0;
  do {
    ended = ::waitpid(child.pid, &state, options);
  } while (ended < 0 && errno == EINTR);
  if (ended == 0) return false;
  if (WIFSIGNALED(state)) {
    failure.report(child.rank,
                   fmt::format("ended by signal {} ({})", WTERMSIG(state), ::strsignal(WTERMSIG(state))).c_str());
  } else if (WEXITSTATUS(state) != EXIT_SUCCESS) {
    failure.report(child.rank, fmt::format("ended with status {}", WEXITSTATUS(state)).c_str());
  }
  return true;
}

void run_processes(int num_ranks, const RankMain& rank_main, FirstFailure& failure) {
  std::vector<Child> children = fork_ranks(num_ranks, rank_main, failure);
  const auto reap_ended = [&] {
    std::erase_if(children, [&](const Child& child) { return reap(child, WNOHANG, failure); });
  };
  const auto failed = [&] { return failure.claimed.load(std::memory_order_relaxed) != 0; };
  while (!children.empty() && !failed()) {
    reap_ended();
    if (!children.empty() && !failed()) std::this_thread::sleep_for(kPollInterval);
  }
  const auto grace = system::Deadline::after(kGrace);
  while (!children.empty() && !grace.expired()) {
    reap_ended();
    if (!children.empty()) std::this_thread::sleep_for(kPollInterval);
  }
  for (const Child& child : children)
    ::kill(child.pid, SIGKILL);
  for (const Child& child : children)
    reap(child, 0, failure);
}

}  // namespace

std::string_view name(RankKind kind) {
  return kind == RankKind::kThreads ? "threads" : "processes";
}

void run_ranks(RankKind kind, int num_ranks, const RankMain& rank_main) {
  const auto memory = system::Segment::create(sizeof(FirstFailure));
  auto* failure = new (memory.data()) FirstFailure;
  if (kind == RankKind::kThreads) {
    run_threads(num_ranks, rank_main, *failure);
  } else {
    run_processes(num_ranks, rank_main, *failure);
  }
  if (failure->claimed.load(std::memory_order_relaxed) == 0) return;
  throw Error(ErrorCode::kPeerFailed, failure->text.data());
}

}  // namespace tokenyard::cli
