// SPDX-License-Identifier: Apache-2.0
// The only atomic words of the host engine. Every release store has a name, and docs/protocol.md says which acquire
// it pairs with. A build with TOKENYARD_TEST_HOOKS can weaken one site at a time, and can be told of every step, so
// that tests prove that each release is needed and that the protocol holds under any interleaving.
#pragma once

#include <atomic>
#include <cstdint>

namespace tokenyard::engine::host {

enum class ReleaseSite : int {
  kHeader,           // counts, header and chunk 0 -> wait_header of the receiver
  kChunk,            // rows of a chunk -> HostEngine::receive_chunks
  kReleased,         // last read of a dispatch's rows -> wait_rows_released, wait_headers_read of the sources
  kCombineHeader,    // expert output rows -> wait_header of the origins
  kCombineReleased,  // last read of expert output rows -> wait_combine_section of their owner
  kQueueFilled,      // rows in a queue -> Queues::receive_some
  kQueueDrained,     // last read of rows in a queue, or of all in this turn -> Queues::send_some
  kGivenWeights,     // weights of a combine -> wait_header of the owners
  kWeightsReleased,  // last read of those weights -> wait_rows_released of the origin
};

inline constexpr int kNumReleaseSites = 9;

#ifdef TOKENYARD_TEST_HOOKS
struct TestHooks {
  // Set before any engine runs.
  static inline std::atomic<int> weakened_site{-1};
  static inline std::atomic<void (*)()> before_step{nullptr};
};

inline void step() {
  if (auto* hook = TestHooks::before_step.load(std::memory_order_relaxed)) hook();
}

inline std::memory_order release_order(ReleaseSite site) {
  return TestHooks::weakened_site.load(std::memory_order_relaxed) == static_cast<int>(site) ? std::memory_order_relaxed
                                                                                            : std::memory_order_release;
}
#else
inline void step() {}

constexpr std::memory_order release_order(ReleaseSite /*site*/) {
  return std::memory_order_release;
}
#endif

static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free, "stamps cross process boundaries");

inline void store_release(std::uint64_t& word, std::uint64_t value, ReleaseSite site) {
  step();
  std::atomic_ref<std::uint64_t>(word).store(value, release_order(site));
}

[[nodiscard]] inline std::uint64_t load_acquire(std::uint64_t& word) {
  step();
  return std::atomic_ref<std::uint64_t>(word).load(std::memory_order_acquire);
}

// For words that guard nothing (signs of life).
inline void store_relaxed(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref<std::uint64_t>(word).store(value, std::memory_order_relaxed);
}

[[nodiscard]] inline std::uint64_t load_relaxed(std::uint64_t& word) {
  return std::atomic_ref<std::uint64_t>(word).load(std::memory_order_relaxed);
}

}  // namespace tokenyard::engine::host
