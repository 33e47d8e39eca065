// SPDX-License-Identifier: Apache-2.0
// What one measurement of the bench plays. Thread rule: plain data.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "tokenyard/backends.h"
#include "tokenyard/dispatch.h"

#include "cli/bench_routing.h"
#include "cli/engine_choice.h"

namespace tokenyard::cli {

// How rows travel to the experts.
enum class BenchRows : std::uint8_t {
  kPlain,      // as they are
  kCast,       // the backend casts them to fp8 on the way
  kQuantised,  // their rank has made them fp8 with a scale for each 128 values, and the backend moves both
};

// What may differ between rounds of one communication.
struct BenchVariant {
  int num_sms = 0;     // 0: the library chooses
  bool graph = false;  // CUDA: rounds are captured once and replayed
};

struct BenchJob {
  BenchShape shape{};
  Dtype dtype = Dtype::kBf16;
  BenchRows rows = BenchRows::kPlain;
  BackendConfig config{};
  std::vector<std::vector<std::int32_t>> ids{};  // of each rank
  std::vector<BenchVariant> variants{{}};        // in this order; those of graphs last
  int num_threads = 1;
  int warmup = 5;
  int num_rounds = 30;
  std::chrono::milliseconds deadline{60'000};
  bool pin = false;  // rank r to core r modulo the cores
  EngineChoice engine{};
};

}  // namespace tokenyard::cli
