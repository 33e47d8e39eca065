// SPDX-License-Identifier: Apache-2.0
// How many bytes a round of the bench moves. Thread rule: pure functions.
#pragma once

#include <cstdint>

#include "tokenyard/backends.h"

#include "cli/bench_job.h"

namespace tokenyard::cli {

struct BenchVolume {
  std::int64_t dispatch_bytes = 0;  // rows, ids and weights
  std::int64_t combine_bytes = 0;   // rows on their way back
};

// Between ranks, all of them together; a rank's own rows do not count.
[[nodiscard]] BenchVolume volume_between_ranks(const BenchJob& job, const Contract& contract);

// The most that one device's link carries in one direction, into the device or out of it; rows between ranks of one
// device do not count.
[[nodiscard]] BenchVolume volume_per_direction(const BenchJob& job, const Contract& contract);

}  // namespace tokenyard::cli
