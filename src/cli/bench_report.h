// SPDX-License-Identifier: Apache-2.0
// What `tokenyard bench` prints. Thread rule: call from the main thread.
#pragma once

#include "cli/bench.h"
#include "cli/bench_rank.h"
#include "cli/bench_volume.h"
#include "cli/time_statistics.h"

namespace tokenyard::cli {

// Of the slowest rank in each round, in microseconds.
struct BenchResult {
  BenchTime dispatch, combine, round;
  BenchTime pipelined;        // BenchJob::graph: of a round in trains of captured ones
  double memcpy_us = 0;       // host
  BenchVolume crossed;        // between ranks, all of them together
  BenchVolume per_direction;  // of one device's link
};

void print_bench_heading(const BenchOptions& options, const EngineChoice& engine);
void print_bench_line(const BackendInfo& backend, const BenchJob& job, const BenchResult& result);
void print_bench_json(const BackendInfo& backend,
                      const BenchOptions& options,
                      const BenchJob& job,
                      const BenchResult& result);

}  // namespace tokenyard::cli
