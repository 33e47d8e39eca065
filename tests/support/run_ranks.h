// SPDX-License-Identifier: Apache-2.0
// Runs one function on every rank of a fresh group: ranks as threads, or as processes of this host.
// A failing rank's text is rethrown; a hang becomes a failure that names the ranks that did not finish.
// Thread rule: call from the test's main thread; `run_processes` forks, so no other thread may be alive then.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>

#include "tokenyard/group.h"

namespace tokenyard::support {

enum class RankKind : std::uint8_t { kThreads, kProcesses };

[[nodiscard]] std::string_view name(RankKind kind);

struct RunOptions {
  std::chrono::seconds limit{45};  // of the whole run
  std::chrono::milliseconds group_deadline{20'000};
};

using RankFunction = std::function<void(const Group&)>;

// Throws CheckFailure("rank 2: ...") for the failure that came first. A hung thread cannot be ended, so past the limit
// the whole program prints which ranks hang and exits with a failure.
void run_ranks(int num_ranks, const RankFunction& fn, const RunOptions& options = {});

// As `run_ranks`, in forked children that meet under a random name. Past the limit the children are killed.
void run_processes(int num_ranks, const RankFunction& fn, const RunOptions& options = {});

void run(RankKind kind, int num_ranks, const RankFunction& fn, const RunOptions& options = {});

}  // namespace tokenyard::support
