// SPDX-License-Identifier: Apache-2.0
// `tokenyard run`: the main job over the backends asked for, one line each. Thread rule: call from the main thread.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/job.h"

namespace CLI {
class App;
}  // namespace CLI

namespace tokenyard::cli {

struct RunOptions {
  std::vector<std::string> backends{"all"};
  std::filesystem::path layer;   // empty: the layer that comes with the program
  std::filesystem::path output;  // empty: not written
  JobOptions job{};
  EngineOptions engine{};
  bool json = false;
};

CLI::App* add_run_command(CLI::App& program, RunOptions& options);

// Returns the exit status: 0 when every backend gave the expected output.
int run_layer(const RunOptions& options);

}  // namespace tokenyard::cli
