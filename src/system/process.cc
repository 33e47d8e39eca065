// SPDX-License-Identifier: Apache-2.0
#include "system/process.h"

#include <unistd.h>

#include "system/random.h"

namespace tokenyard::system {

namespace {

// The finaliser of splitmix64: a bijection, so that different pids of one base never collide.
std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9U;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

}  // namespace

std::uint64_t process_nonce() {
  // The base is drawn once and inherited through fork(); the pid is asked for each time, so a child differs at once.
  static const std::uint64_t base = random_u64();
  return mix(base ^ static_cast<std::uint64_t>(::getpid()));
}

}  // namespace tokenyard::system
