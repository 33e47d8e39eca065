// SPDX-License-Identifier: Apache-2.0
// Counts what all threads of this program ask of the C heap; operator new ends there too. The program that links
// allocation_counter.cc has its own malloc family in front of the C library's.
// Thread rule: the functions may be called by any thread; the count is the whole process's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokenyard::steady_tests {

void start_counting_allocations();
// Allocations since the start; releases count as well, because a steady state has none of either.
[[nodiscard]] std::int64_t stop_counting_allocations();
// Bytes of the first allocation that was counted; 0 when there was none.
[[nodiscard]] std::size_t first_counted_bytes();

// Whether counting is on or not: what was given out and has not come back. Nothing that the C library keeps at hand for
// later is in it, so it is the same whenever the program holds the same.
struct HeapInUse {
  std::int64_t blocks = 0;
  std::int64_t bytes = 0;
};

[[nodiscard]] HeapInUse heap_in_use();

}  // namespace tokenyard::steady_tests
