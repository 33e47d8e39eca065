// SPDX-License-Identifier: Apache-2.0
// What `tokenyard bench` prints. Thread rule: call from the main thread.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "cli/bench.h"
#include "cli/bench_job.h"
#include "cli/bench_volume.h"
#include "cli/link_limit.h"
#include "cli/time_statistics.h"

namespace tokenyard::cli {

// Of the slowest rank in each round, in microseconds.
struct BenchResult {
  BenchVariant variant{};
  std::string skew{};
  BenchTime dispatch{}, combine{}, round{};
  BenchTime pipelined{};        // BenchVariant::graph: of a round in trains of captured ones
  double memcpy_us = 0;         // host
  BenchVolume crossed{};        // between ranks, all of them together
  BenchVolume per_direction{};  // of one device's link
  LinkLimit link{};
};

// Microseconds that the bytes of one direction take at what the link does at best. 0 where nothing crosses a link.
struct LinkFloor {
  double dispatch_us = 0;
  double combine_us = 0;

  [[nodiscard]] double round_us() const { return dispatch_us + combine_us; }
};

[[nodiscard]] LinkFloor link_floor(const BenchResult& result);

// What a line of JSON says of the link: its state, its rate, the floor, and how much of a measured time the floor is.
[[nodiscard]] nlohmann::ordered_json link_fields(const BenchResult& result);

void print_bench_heading(const BenchOptions& options, const EngineChoice& engine, const LinkLimit& link);
void print_bench_line(const BackendInfo& backend, const BenchJob& job, const BenchResult& result);
void print_bench_json(const BackendInfo& backend,
                      const BenchOptions& options,
                      const BenchJob& job,
                      const BenchResult& result);

}  // namespace tokenyard::cli
