// SPDX-License-Identifier: Apache-2.0
// Ranks that use CUDA. The test program itself never does, because CUDA does not survive fork(): ranks that are threads
// are those of a forked process too, and what the machine has is asked in another.
// Thread rule: call from the test's main thread.
#pragma once

#include <chrono>
#include <string>

#include "tokenyard/group.h"

#include "support/run_ranks.h"

namespace tokenyard::gpu_tests {

// For collectives: processes that share a device start CUDA one after the other.
inline constexpr std::chrono::milliseconds kDeadline{60'000};

struct Machine {
  int num_devices = 0;   // that windows can lie on
  std::string unusable;  // why there is none
};

[[nodiscard]] const Machine& machine();

// Throws support::CheckFailure as support::run does, and when CUDA was used before.
void run_on_gpus(support::RankKind kind, int num_ranks, const support::RankFunction& fn);

}  // namespace tokenyard::gpu_tests

// Skips the test, visibly, where there are fewer than `count` devices.
#define TOKENYARD_NEEDS_DEVICES(count)                                                                                \
  if (::tokenyard::gpu_tests::machine().num_devices < (count))                                                        \
  GTEST_SKIP() << "needs " << (count) << " GPUs, there are " << ::tokenyard::gpu_tests::machine().num_devices << "; " \
               << ::tokenyard::gpu_tests::machine().unusable
