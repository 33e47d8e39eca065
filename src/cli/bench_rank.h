// SPDX-License-Identifier: Apache-2.0
// One rank's part of a bench: rounds of one backend, and between them, on the host, `memcpy` of the same rows.
// Thread rule: one thread per rank.
#pragma once

#include "tokenyard/group.h"

#include "cli/bench_board.h"
#include "cli/bench_job.h"

namespace tokenyard::cli {

// Collective. Throws Error when an answer is wrong.
void run_bench_rank(const BenchJob& job, const Group& group, BenchBoard& board);

}  // namespace tokenyard::cli
