// SPDX-License-Identifier: Apache-2.0
// `tokenyard bench`: how long dispatch and combine take; on the host beside memcpy of the same rows in the same run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tokenyard/tensor.h"

#include "cli/bench_routing.h"
#include "cli/engine_choice.h"
#include "cli/ranks.h"

namespace CLI {
class App;
}

namespace tokenyard::cli {

struct BenchOptions {
  std::vector<std::string> backends{"all"};
  std::vector<std::int64_t> num_tokens{512};
  RankKind rank_kind = RankKind::kThreads;
  BenchShape shape{};
  std::vector<std::string> skews{"uniform"};
  Dtype dtype = Dtype::kBf16;
  std::vector<std::string> dispatch_dtypes{};  // "fp8", or the name of `dtype`, which it is when empty
  int num_threads = 1;
  int warmup = 5;
  int num_rounds = 30;
  bool pin = false;
  EngineOptions engine{};
  std::vector<std::string> num_sms{"auto"};  // numbers, "auto" for what the library chooses, "all"
  bool graph = false;
  bool eager = false;  // beside `graph`
  int deadline_seconds = 60;
  bool limits = false;
  bool json = false;
};

CLI::App* add_bench_command(CLI::App& program, BenchOptions& options);

// Returns the program's exit status: 0 when every answer was right.
int run_bench(const BenchOptions& options);

}  // namespace tokenyard::cli
