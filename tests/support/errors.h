// SPDX-License-Identifier: Apache-2.0
// Checks on how misuse is reported: an Error of the right kind here, kAborted that names this rank elsewhere.
// Thread rule: free functions without state.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "tokenyard/error.h"

#include "support/check.h"

namespace tokenyard::support {

// Why tests that leave no descriptor are skipped under the address sanitizer.
inline constexpr const char* kSanitizerNeedsDescriptors =
    "with no descriptor left, the undefined-behaviour sanitizer built with this one takes what it looks at for no "
    "object: it opens a pipe to look at it";

inline void check_contains(std::string_view text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    check(text.find(part) != std::string_view::npos,
          "the message \"" + std::string(text) + "\" does not hold \"" + part + "\"");
  }
}

// `fn` throws Error of `code` whose message holds every one of `parts`.
template <class Function>
void check_throws(ErrorCode code, const std::vector<std::string>& parts, Function&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    check(error.code() == code, "got Error " + std::string(name(error.code())) + " (" + error.what() + "), expected " +
                                    std::string(name(code)));
    check_contains(error.what(), parts);
    return;
  }
  throw CheckFailure("nothing was thrown, expected Error " + std::string(name(code)));
}

// A Status that says what it should about `peer`.
inline void check_fault(const Status& status, StatusCode code, int peer, Phase phase) {
  check(status.code == code, "got " + std::string(name(status.code)) + " (" + status.message() + "), expected " +
                                 std::string(name(code)) + " about rank " + std::to_string(peer));
  check_eq(status.fault.peer, peer, "the rank at fault (" + status.message() + ")");
  check(status.fault.phase == phase, "phase " + std::string(name(status.fault.phase)) + " instead of " +
                                         std::string(name(phase)) + " in: " + status.message());
  check_contains(status.message(), {"rank " + std::to_string(peer)});
}

class Stopwatch {
 public:
  [[nodiscard]] std::chrono::milliseconds elapsed() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start_);
  }

  void check_below(std::chrono::milliseconds limit, const std::string& what) const {
    const std::chrono::milliseconds taken = elapsed();
    check(taken < limit,
          what + " took " + std::to_string(taken.count()) + " ms, limit " + std::to_string(limit.count()) + " ms");
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace tokenyard::support
