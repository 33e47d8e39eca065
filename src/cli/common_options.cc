// SPDX-License-Identifier: Apache-2.0
#include "cli/common_options.h"

#include <algorithm>
#include <map>

#include <CLI/CLI.hpp>

#include "tokenyard/group.h"

namespace tokenyard::cli {
namespace {

constexpr const char* kAllBackends = "all";

}  // namespace

std::vector<const BackendInfo*> chosen_backends(const std::vector<std::string>& names) {
  std::vector<const BackendInfo*> result;
  for (const std::string& name : names) {
    if (name != kAllBackends) {
      result.push_back(&find_backend(name));
      continue;
    }
    for (const BackendInfo& backend : backends()) {
      if (backend.moves_tokens) result.push_back(&backend);
    }
  }
  return result;
}

bool asks_for_all(const std::vector<std::string>& names) {
  return std::ranges::find(names, kAllBackends) != names.end();
}

void add_backend_option(CLI::App& command, std::vector<std::string>& backends) {
  command.add_option("--backend", backends, "Names or aliases, or all")->delimiter(',')->capture_default_str();
}

void add_rank_options(CLI::App& command, const RankOptions& options) {
  command.add_option("--num-ranks", options.num_ranks, "Ranks of the group")
      ->check(CLI::Range(1, Group::kMaxRanks))
      ->capture_default_str();
  const std::map<std::string, RankKind> kinds{{"threads", RankKind::kThreads}, {"processes", RankKind::kProcesses}};
  command.add_option("--rank-kind", options.rank_kind, "What a rank is")
      ->transform(CLI::CheckedTransformer(kinds))
      ->default_str("threads");
  command.add_option("--num-threads", options.num_threads, "Threads per rank that copy and sum")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
}

}  // namespace tokenyard::cli
