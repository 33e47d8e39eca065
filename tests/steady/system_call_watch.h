// SPDX-License-Identifier: Apache-2.0
// A seccomp filter that lets a thread wait and do nothing else: any other system call is not made, but written down.
// What is written down lies in memory that forked processes share. There is no way back: use it in a child process
// that ends by _exit.
// Thread rule: `make` before ranks start; the rest from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

namespace tokenyard::steady_tests {

class SystemCallWatch {
 public:
  // What the watched threads did; in memory shared with child processes.
  struct Record {
    std::atomic<int> num_calls{0};
    std::atomic<int> first_call{-1};
    std::atomic<int> num_finished{0};
    std::atomic<bool> failed{false};
  };

  enum class Scope { kThisThread, kAllThreads };

  // Zeroed shared memory that lives until the end of the process.
  static Record& make_record();
  // Whether this system allows such filters, tried in a child. The reason if not.
  static bool permitted(std::string& reason);
  // From now on `record` holds what the threads in `scope` call besides waiting. Throws std::runtime_error.
  static void begin(Record& record, Scope scope);
  static std::string name_of(int call);
};

}  // namespace tokenyard::steady_tests
