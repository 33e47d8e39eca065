// SPDX-License-Identifier: Apache-2.0
#include "engine/host/thread_team.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "tokenyard/error.h"

namespace tokenyard::engine::host {
namespace {

constexpr int kSpins = 200;
constexpr std::chrono::microseconds kYieldFor{50};

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether done() came true in a wait that is short enough not to sleep: it spins, then lets others run.
template <class Done>
bool wait_briefly(const Done& done) {
  for (int i = 0; i < kSpins; ++i) {
    if (done()) return true;
    pause();
  }
  const auto until = std::chrono::steady_clock::now() + kYieldFor;
  do {
    if (done()) return true;
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

// Threads inherit the mask, so signals of the program go to the program's own threads.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }

  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals(BlockedSignals&&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  BlockedSignals& operator=(BlockedSignals&&) = delete;

  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

// A word that one side advances and the other waits for, first awake and then asleep.
// `sleepers` and the word are seq_cst: either the waiter sees the new word before it sleeps, or the waker sees the
// sleeper. The mutex closes the gap between the sleeper's last look and its sleep.
class Gate {
 public:
  template <class Done>
  void wait(const Done& done) {
    if (wait_briefly(done)) return;
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1);
    condition_.wait(lock, done);
    sleepers_.fetch_sub(1);
  }

  // Call after the store that makes a waiter's done() true.
  void wake() {
    if (sleepers_.load() == 0) return;
    { const std::scoped_lock lock(mutex_); }
    condition_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  std::atomic<int> sleepers_{0};
};

}  // namespace

class ThreadTeam::Workers {
 public:
  explicit Workers(int num_threads) {
    exceptions_.resize(static_cast<std::size_t>(num_threads));
    const BlockedSignals blocked;
    try {
      threads_.reserve(exceptions_.size() - 1);
      for (int index = 1; index < num_threads; ++index)
        threads_.emplace_back([this, index] { work(index); });
    } catch (const std::system_error& error) {
      const std::size_t started = threads_.size();
      stop();
      throw Error(ErrorCode::kSystem, "cannot start worker thread " + std::to_string(started + 1) + " of " +
                                          std::to_string(num_threads - 1) + ": " + error.what());
    }
  }

  Workers(const Workers&) = delete;
  Workers(Workers&&) = delete;
  Workers& operator=(const Workers&) = delete;
  Workers& operator=(Workers&&) = delete;

  ~Workers() { stop(); }

  void run(const Job& job) {
    if (running_.exchange(true, std::memory_order_acquire)) {
      throw Error(ErrorCode::kInvalidState,
                  "ThreadTeam::run was called while a run of this team is in progress; give "
                  "each caller its own team");
    }
    job_ = job;
    unfinished_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1);  // seq_cst, hence a release: pairs with the load in work()
    start_.wake();
    do_part(0);
    finish_.wait([this] { return unfinished_.load() == 0; });
    running_.store(false, std::memory_order_release);  // pairs with the exchange above
    rethrow();
  }

 private:
  void do_part(int index) {
    const auto num_threads = static_cast<std::int64_t>(exceptions_.size());
    const std::int64_t each = job_.num_items / num_threads;
    const std::int64_t longer = job_.num_items % num_threads;  // the first parts have one item more
    const std::int64_t begin = index * each + std::min<std::int64_t>(index, longer);
    const std::int64_t end = begin + each + (index < longer ? 1 : 0);
    if (begin == end) return;
    try {
      job_.call(job_.context, {.begin = begin, .end = end, .thread_index = index});
    } catch (...) {
      exceptions_[static_cast<std::size_t>(index)] = std::current_exception();
    }
  }

  void work(int index) {
    std::uint64_t seen = 0;
    while (true) {
      start_.wait([&] { return generation_.load() != seen; });  // acquires job_ or stopping_
      ++seen;
      if (stopping_) return;
      do_part(index);
      // seq_cst, hence a release: pairs with the load in run().
      if (unfinished_.fetch_sub(1) == 1) finish_.wake();
    }
  }

  void rethrow() {
    std::exception_ptr first;
    for (std::exception_ptr& exception : exceptions_) {
      if (!first) first = exception;
      exception = nullptr;
    }
    if (first) std::rethrow_exception(first);
  }

  void stop() {
    stopping_ = true;
    generation_.fetch_add(1);  // pairs with the load in work()
    start_.wake();
    for (std::thread& thread : threads_)
      thread.join();
  }

  Gate start_;
  Gate finish_;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<int> unfinished_{0};
  std::atomic<bool> running_{false};
  bool stopping_ = false;                       // published by generation_
  Job job_{};                                   // published by generation_
  std::vector<std::exception_ptr> exceptions_;  // one a thread, published by unfinished_
  std::vector<std::thread> threads_;
};

ThreadTeam::ThreadTeam(int num_threads) : num_threads_(num_threads) {
  if (num_threads < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "num_threads is " + std::to_string(num_threads) + "; a team has at least 1 thread, the caller's");
  }
  if (num_threads > 1) workers_ = std::make_unique<Workers>(num_threads);
}

ThreadTeam::ThreadTeam(ThreadTeam&&) noexcept = default;
ThreadTeam& ThreadTeam::operator=(ThreadTeam&&) noexcept = default;
ThreadTeam::~ThreadTeam() = default;

void ThreadTeam::run_job(const Job& job) {
  workers_->run(job);
}

}  // namespace tokenyard::engine::host
