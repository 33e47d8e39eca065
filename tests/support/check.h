// SPDX-License-Identifier: Apache-2.0
// Checks that throw, because a rank may be a child process where gtest's assertions reach nobody.
// Thread rule: free functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>

namespace tokenyard::support {

class CheckFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void check(bool condition, const std::string& what) {
  if (!condition) throw CheckFailure(what);
}

template <class Actual, class Expected>
void check_eq(const Actual& actual, const Expected& expected, const std::string& what) {
  if (actual == expected) return;
  std::ostringstream text;
  text << what << ": got " << actual << ", expected " << expected;
  throw CheckFailure(text.str());
}

template <class Actual, class Expected>
void check_lists_eq(const Actual& actual, const Expected& expected, const std::string& what) {
  check_eq(std::size(actual), std::size(expected), what + ", length");
  for (std::size_t i = 0; i < std::size(actual); ++i) {
    check_eq(actual[i], expected[i], what + "[" + std::to_string(i) + "]");
  }
}

// Names the first byte that differs.
inline void check_bytes(const std::byte* actual, std::span<const std::byte> expected, const std::string& what) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (actual[i] == expected[i]) continue;
    check_eq(std::to_integer<int>(actual[i]), std::to_integer<int>(expected[i]),
             what + ", byte " + std::to_string(i) + " of " + std::to_string(expected.size()));
  }
}

}  // namespace tokenyard::support
