// SPDX-License-Identifier: Apache-2.0
// Command line options that `run` and `bench` share, and what the names of backends stand for. Thread rule: pure.
#pragma once

#include <string>
#include <vector>

#include "tokenyard/backends.h"

#include "cli/ranks.h"

namespace CLI {
class App;
}  // namespace CLI

namespace tokenyard::cli {

// By names and aliases; `all` is every backend that moves tokens.
[[nodiscard]] std::vector<const BackendInfo*> chosen_backends(const std::vector<std::string>& names);

// Whether `all` is among the names.
[[nodiscard]] bool asks_for_all(const std::vector<std::string>& names);

// --backend
void add_backend_option(CLI::App& command, std::vector<std::string>& backends);

// --num-ranks, --rank-kind, --num-threads
struct RankOptions {
  int& num_ranks;
  RankKind& rank_kind;
  int& num_threads;
};

void add_rank_options(CLI::App& command, const RankOptions& options);

}  // namespace tokenyard::cli
