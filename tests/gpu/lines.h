// SPDX-License-Identifier: Apache-2.0
// Lines of small rounds sent to and fro, to see how they arrive.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokenyard::gpu_tests {

struct LineTraffic {
  std::byte* theirs = nullptr;  // the same place in the peer's window
  const std::byte* mine = nullptr;
  int blocks = 1;
  int threads = 128;
  int generations = 1;
};

// Bytes that the traffic needs of each window.
[[nodiscard]] std::int64_t bytes_of(const LineTraffic& traffic);

struct LinesSeen {
  std::int64_t torn = 0;     // loads that saw a line's new flag and some of its old words
  std::int64_t awaited = 0;  // lines that did not come
};

// Generation after generation, each stored when the one before has come. Both ranks call it at about the same time, on
// the current device; returns when it is over.
[[nodiscard]] LinesSeen exchange_lines(const LineTraffic& traffic);

}  // namespace tokenyard::gpu_tests
