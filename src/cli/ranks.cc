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
#include <optional>
#include <string>
#include <string_view>
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
// Of a rank that has reported its failure; no sanitizer or runtime ends a program with it.
constexpr int kReportedStatus = 3;

// A message in memory that forked ranks share; the first rank to claim it writes it.
struct Message {
  std::atomic<int> claimed{0};
  ErrorCode code = ErrorCode::kPeerFailed;
  std::array<char, 4096> text{};

  void write(int rank, std::string_view what, ErrorCode why = ErrorCode::kPeerFailed) noexcept {
    // Read only after the ranks have ended, so the join or wait orders it.
    if (claimed.exchange(1, std::memory_order_relaxed) != 0) return;
    code = why == ErrorCode::kUnsupported ? why : ErrorCode::kPeerFailed;
    const std::string prefix = "rank " + std::to_string(rank) + ": ";
    const bool prefixed = what.starts_with(prefix);
    std::snprintf(text.data(), text.size(), "%s%.*s", prefixed ? "" : prefix.c_str(), static_cast<int>(what.size()),
                  what.data());
  }

  [[nodiscard]] bool written() const { return claimed.load(std::memory_order_relaxed) != 0; }
};

// A rank often learns that another failed before that one's own message is out, so the two are kept apart.
struct Failures {
  Message cause;
  Message consequence;

  void report(int rank, const Error& error) noexcept {
    const bool of_another = error.code() == ErrorCode::kPeerFailed || error.code() == ErrorCode::kPeerLost ||
                            error.code() == ErrorCode::kTimeout;
    (of_another ? consequence : cause).write(rank, error.what(), error.code());
  }

  [[nodiscard]] bool any() const { return cause.written() || consequence.written(); }

  [[nodiscard]] Error error() const {
    const Message& told = cause.written() ? cause : consequence;
    return {told.code, told.text.data()};
  }
};

static_assert(std::atomic<int>::is_always_lock_free, "shared between processes");

bool run_guarded(int rank, const std::function<void()>& work, Failures& failures) {
  try {
    work();
    return true;
  } catch (const Error& error) {
    failures.report(rank, error);
  } catch (const std::exception& error) {
    failures.cause.write(rank, error.what());
  } catch (...) {
    failures.cause.write(rank, "an exception of an unknown type");
  }
  return false;
}

void run_threads(int num_ranks, const RankMain& rank_main, Failures& failures) {
  std::vector<Group> groups = Group::in_process(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    // A thread holds the only copy of its group, so that one that fails leaves the group and the others learn of it.
    Group group = std::move(groups[static_cast<std::size_t>(rank)]);
    threads.emplace_back([rank, &rank_main, &failures, own = std::make_unique<Group>(std::move(group))]() mutable {
      run_guarded(
          rank, [&] { rank_main(*own); }, failures);
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
    const std::string& group_name, Child self, int num_ranks, const RankMain& rank_main, Failures& failures) {
  // A program that is killed takes its ranks along; one killed before this line is seen by the comparison.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const bool orphaned = ::getppid() != self.pid;
  const bool right =
      !orphaned && run_guarded(
                       self.rank, [&] { rank_main(Group::on_host(group_name, self.rank, num_ranks)); }, failures);
  // Without destructors and flushes, which belong to the parent.
  ::_exit(right ? EXIT_SUCCESS : kReportedStatus);
}

std::vector<Child> fork_ranks(int num_ranks, const RankMain& rank_main, Failures& failures) {
  const std::string group_name = fmt::format("tokenyard-run-{:016x}", system::random_u64());
  const pid_t parent = ::getpid();
  std::fflush(nullptr);
  std::vector<Child> children;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) run_child(group_name, {.rank = rank, .pid = parent}, num_ranks, rank_main, failures);
    if (pid < 0) {
      failures.cause.write(rank, fmt::format("fork failed: {}", std::generic_category().message(errno)));
      break;
    }
    children.push_back({.rank = rank, .pid = pid});
  }
  return children;
}

// The wait status of a child that has ended; nothing while it runs, which only WNOHANG finds.
std::optional<int> end_of(const Child& child, int options) {
  int state = 0;
  pid_t ended = 0;
  do {
    ended = ::waitpid(child.pid, &state, options);
  } while (ended < 0 && errno == EINTR);
  return ended == 0 ? std::nullopt : std::optional(state);
}

// Whether the child has ended; reports an end that says nothing by itself.
bool reap(const Child& child, Failures& failures) {
  const auto state = end_of(child, WNOHANG);
  if (!state) return false;
  if (WIFSIGNALED(*state)) {
    const int signal = WTERMSIG(*state);
    failures.cause.write(child.rank, fmt::format("ended by signal {} ({})", signal, ::strsignal(signal)));
  } else if (WEXITSTATUS(*state) != EXIT_SUCCESS && WEXITSTATUS(*state) != kReportedStatus) {
    failures.cause.write(child.rank, fmt::format("ended with status {}", WEXITSTATUS(*state)));
  }
  return true;
}

void run_processes(int num_ranks, const RankMain& rank_main, Failures& failures) {
  std::vector<Child> children = fork_ranks(num_ranks, rank_main, failures);
  const auto reap_ended = [&] { std::erase_if(children, [&](const Child& child) { return reap(child, failures); }); };
  const auto failed = [&] { return failures.any(); };
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
    end_of(child, 0);
}

}  // namespace

std::string_view name(RankKind kind) {
  return kind == RankKind::kThreads ? "threads" : "processes";
}

void run_ranks(RankKind kind, int num_ranks, const RankMain& rank_main) {
  const auto memory = system::Segment::create(sizeof(Failures));
  auto* failures = new (memory.data()) Failures;
  if (kind == RankKind::kThreads) {
    run_threads(num_ranks, rank_main, *failures);
  } else {
    run_processes(num_ranks, rank_main, *failures);
  }
  if (failures->any()) throw failures->error();
}

}  // namespace tokenyard::cli
