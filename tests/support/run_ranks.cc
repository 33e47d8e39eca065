// SPDX-License-Identifier: Apache-2.0
#include "support/run_ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tokenyard/error.h"

#include "support/check.h"

namespace tokenyard::support {
namespace {

using Clock = std::chrono::steady_clock;

std::string describe(int rank, const std::exception& failure) {
  const auto* error = dynamic_cast<const Error*>(&failure);
  const std::string kind = error == nullptr ? "" : std::string("Error ") + std::string(name(error->code())) + ": ";
  return "rank " + std::to_string(rank) + ": " + kind + failure.what();
}

// What the rank threads of one run tell the thread that waits for them.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> finished;
  int num_finished = 0;
  std::string first_failure;

  void finish(int rank, const std::string& failure) {
    const std::lock_guard lock(mutex);
    if (first_failure.empty()) first_failure = failure;
    finished[static_cast<std::size_t>(rank)] = true;
    ++num_finished;
    changed.notify_all();
  }
};

void run_rank(const Group& group, const RankFunction& fn, Progress& progress) {
  std::string failure;
  try {
    fn(group);
  } catch (const std::exception& error) {
    failure = describe(group.rank(), error);
  } catch (...) {
    failure = "rank " + std::to_string(group.rank()) + ": an exception of an unknown type";
  }
  progress.finish(group.rank(), failure);
}

[[noreturn]] void give_up(const Progress& progress, std::chrono::seconds limit) {
  std::string text = "run_ranks: after " + std::to_string(limit.count()) + " s these ranks hang:";
  for (std::size_t rank = 0; rank < progress.finished.size(); ++rank) {
    if (!progress.finished[rank]) text.append(" ").append(std::to_string(rank));
  }
  if (!progress.first_failure.empty()) text += "; first failure: " + progress.first_failure;
  std::fprintf(stderr, "%s\n[  FAILED  ] hung ranks cannot be ended, so the program exits\n", text.c_str());
  std::fflush(nullptr);
  std::_Exit(EXIT_FAILURE);
}

struct Child {
  pid_t pid = -1;
  int pipe = -1;  // read end; closed by the child's end
  std::string text;
};

[[noreturn]] void run_child(const std::string& group_name, int rank, int num_ranks, int pipe, const RankFunction& fn) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::string failure;
  try {
    const Group group = Group::on_host(group_name, rank, num_ranks, {.deadline = std::chrono::milliseconds(20'000)});
    fn(group);
  } catch (const std::exception& error) {
    failure = describe(rank, error);
  } catch (...) {
    failure = "rank " + std::to_string(rank) + ": an exception of an unknown type";
  }
  for (std::size_t done = 0; done < failure.size();) {
    const ssize_t written = ::write(pipe, failure.data() + done, failure.size() - done);
    if (written <= 0) break;
    done += static_cast<std::size_t>(written);
  }
  ::_exit(failure.empty() ? 0 : 1);  // no destructors of the test program: they belong to the parent
}

std::string random_group_name() {
  std::random_device device;
  return "tokenyard-test-" + std::to_string(::getpid()) + "-" + std::to_string(device());
}

std::vector<Child> fork_children(int num_ranks, const RankFunction& fn) {
  const std::string group_name = random_group_name();
  std::vector<Child> children;
  std::fflush(nullptr);
  for (int rank = 0; rank < num_ranks; ++rank) {
    int ends[2];
    check(::pipe2(ends, O_CLOEXEC) == 0, "pipe2 failed");
    const pid_t pid = ::fork();
    check(pid >= 0, "fork failed");
    if (pid == 0) {
      ::close(ends[0]);
      run_child(group_name, rank, num_ranks, ends[1], fn);
    }
    ::close(ends[1]);
    children.push_back({.pid = pid, .pipe = ends[0], .text = {}});
  }
  return children;
}

// Reads every child's text until its end of the pipe closes. Returns the first text that came.
std::string read_children(std::vector<Child>& children, Clock::time_point end) {
  std::string first;
  for (;;) {
    std::vector<pollfd> waiting;
    std::vector<Child*> owners;
    for (Child& child : children) {
      if (child.pipe < 0) continue;
      waiting.push_back({.fd = child.pipe, .events = POLLIN, .revents = 0});
      owners.push_back(&child);
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    if (waiting.empty() || left <= 0) return first;
    if (::poll(waiting.data(), waiting.size(), static_cast<int>(left)) <= 0) continue;
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      if (waiting[i].revents == 0) continue;
      char bytes[512];
      const ssize_t count = ::read(waiting[i].fd, bytes, sizeof bytes);
      if (count > 0) {
        owners[i]->text.append(bytes, static_cast<std::size_t>(count));
        continue;
      }
      ::close(owners[i]->pipe);
      owners[i]->pipe = -1;
      if (first.empty()) first = owners[i]->text;
    }
  }
}

}  // namespace

std::string_view name(RankKind kind) {
  return kind == RankKind::kThreads ? "threads" : "processes";
}

void run_ranks(int num_ranks, const RankFunction& fn, const RunOptions& options) {
  const std::vector<Group> groups = Group::in_process(num_ranks, {.deadline = options.group_deadline});
  Progress progress;
  progress.finished.resize(static_cast<std::size_t>(num_ranks), false);
  std::vector<std::thread> threads;
  threads.reserve(groups.size());
  for (const Group& group : groups)
    threads.emplace_back(run_rank, std::cref(group), std::cref(fn), std::ref(progress));
  {
    std::unique_lock lock(progress.mutex);
    const bool all = progress.changed.wait_for(lock, options.limit, [&] { return progress.num_finished == num_ranks; });
    if (!all) give_up(progress, options.limit);
  }
  for (std::thread& thread : threads)
    thread.join();
  check(progress.first_failure.empty(), progress.first_failure);
}

void run_processes(int num_ranks, const RankFunction& fn, const RunOptions& options) {
  std::vector<Child> children = fork_children(num_ranks, fn);
  std::string failure = read_children(children, Clock::now() + options.limit);
  std::string hung;
  for (int rank = 0; rank < num_ranks; ++rank) {
    Child& child = children[static_cast<std::size_t>(rank)];
    if (child.pipe >= 0) {
      hung.append(" ").append(std::to_string(rank));
      ::kill(child.pid, SIGKILL);
      ::close(child.pipe);
    }
    int state = 0;
    ::waitpid(child.pid, &state, 0);
    const bool clean = WIFEXITED(state) && WEXITSTATUS(state) == 0;
    if (clean || !failure.empty() || child.pipe >= 0) continue;
    failure = "rank " + std::to_string(rank) + ": ended with wait status " + std::to_string(state);
  }
  if (!hung.empty())
    failure = "after " + std::to_string(options.limit.count()) + " s these ranks hang:" + hung +
              (failure.empty() ? "" : "; first failure: " + failure);
  check(failure.empty(), failure);
}

void run(RankKind kind, int num_ranks, const RankFunction& fn, const RunOptions& options) {
  if (kind == RankKind::kThreads) {
    run_ranks(num_ranks, fn, options);
  } else {
    run_processes(num_ranks, fn, options);
  }
}

}  // namespace tokenyard::support
