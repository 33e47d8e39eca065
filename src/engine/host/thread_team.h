// SPDX-License-Identifier: Apache-2.0
// A rank's threads: the caller and num_threads - 1 workers that share out loops over tokens or rows.
//
// The partition is static and contiguous, so which thread does what never depends on timing. Between runs the workers
// spin for a moment, because the next phase of a round is usually near, and then sleep on a condition variable.
// A run allocates nothing. What the caller wrote before `run` is visible to all threads in it, and what they wrote is
// visible to the caller after it.
// Thread rule: one thread at a time calls `run`; not from inside a run.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace tokenyard::engine::host {

class ThreadTeam {
 public:
  // Throws kInvalidArgument for num_threads < 1, kSystem when a thread cannot be started.
  explicit ThreadTeam(int num_threads);
  ThreadTeam(ThreadTeam&&) noexcept;
  ThreadTeam& operator=(ThreadTeam&&) noexcept;
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;
  ~ThreadTeam();

  [[nodiscard]] int num_threads() const { return num_threads_; }

  // Calls fn(begin, end, thread_index) on every thread whose part of [0, num_items) is not empty; the caller is thread
  // 0. Parts differ by at most one item. Returns when all are done; then rethrows the exception of the lowest thread
  // that threw. With one thread it is a plain call. Throws kInvalidState from inside a run of several threads.
  template <class F>
  void run(std::int64_t num_items, F&& fn) {
    if (num_items <= 0) return;
    if (num_threads_ == 1 || num_items == 1) {
      fn(std::int64_t{0}, num_items, 0);
      return;
    }
    using Function = std::remove_reference_t<F>;
    const Job job{.num_items = num_items, .context = &fn, .call = [](const void* context, const Part& part) {
                    // The context is the caller's own fn; const_cast gives back what it was.
                    (*static_cast<Function*>(const_cast<void*>(context)))(part.begin, part.end, part.thread_index);
                  }};
    run_job(job);
  }

 private:
  struct Part {
    std::int64_t begin;
    std::int64_t end;
    int thread_index;
  };

  struct Job {
    std::int64_t num_items = 0;
    const void* context = nullptr;
    void (*call)(const void* context, const Part& part) = nullptr;
  };

  class Workers;

  void run_job(const Job& job);

  int num_threads_;
  std::unique_ptr<Workers> workers_;  // null with one thread
};

}  // namespace tokenyard::engine::host
