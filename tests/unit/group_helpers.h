// SPDX-License-Identifier: Apache-2.0
// Ranks as threads and as processes, for the tests of groups.
// Thread rule: free functions without state; a Child belongs to one thread.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tokenyard/error.h"
#include "tokenyard/group.h"

#include "system/file_descriptor.h"
#include "system/random.h"

namespace tokenyard::testing_groups {

using std::chrono::milliseconds;

// Generous: only a test that fails waits this long.
inline constexpr milliseconds kLong{20'000};

inline std::string unique_name(const std::string& what) {
  return what + "-" + std::to_string(system::random_u64() % 1'000'000'000'000U);
}

inline std::string free_address() {
  const system::FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
  EXPECT_EQ(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  return "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
}

inline Bytes to_bytes(const std::string& text) {
  const auto view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

inline std::string to_text(const Bytes& bytes) {
  std::string text;
  for (const std::byte b : bytes)
    text += static_cast<char>(b);
  return text;
}

// Runs `fn` and returns the Error that it throws.
template <class Function>
std::optional<Error> error_of(Function&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

template <class Function>
void expect_error(ErrorCode code, const std::vector<std::string>& parts, Function&& fn) {
  const std::optional<Error> error = error_of(std::forward<Function>(fn));
  ASSERT_TRUE(error.has_value()) << "nothing was thrown";
  EXPECT_EQ(static_cast<int>(error->code()), static_cast<int>(code)) << error->what();
  for (const std::string& part : parts) {
    EXPECT_NE(std::string(error->what()).find(part), std::string::npos) << error->what() << " lacks " << part;
  }
}

// Runs `fn(rank)` on a thread per rank; an exception fails the test.
inline void on_threads(int num_ranks, const std::function<void(int)>& fn) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&fn, rank] {
      try {
        fn(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
      }
    });
  }
  for (std::thread& thread : threads)
    thread.join();
}

class Stopwatch {
 public:
  [[nodiscard]] milliseconds elapsed() const {
    return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start_);
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// A forked process that ends with `fn`: exit status 0 when it returns true. It dies with its parent.
class Child {
 public:
  explicit Child(const std::function<bool()>& fn) {
    std::fflush(nullptr);
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    bool good = false;
    try {
      good = fn();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child %d threw: %s\n", static_cast<int>(::getpid()), error.what());
    }
    ::_exit(good ? 0 : 1);
  }

  Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}

  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  Child& operator=(Child&&) = delete;

  ~Child() {
    if (pid_ > 0) kill();
  }

  void kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  // Whether it ended well in time.
  [[nodiscard]] bool wait(milliseconds limit = kLong) {
    const Stopwatch watch;
    while (watch.elapsed() < limit) {
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        return WIFEXITED(status) && WEXITSTATUS(status) == 0;
      }
      std::this_thread::sleep_for(milliseconds(5));
    }
    return false;
  }

 private:
  pid_t pid_ = -1;
};

}  // namespace tokenyard::testing_groups
