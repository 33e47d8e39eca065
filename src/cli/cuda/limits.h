// SPDX-License-Identifier: Apache-2.0
// What devices and the link between them can do at best: copies, stores, loads, flags, launches. What rounds cannot
// beat. Thread rule: call from the main thread. In builds without CUDA src/cli/without_cuda.cc refuses it.
#pragma once

#include "cli/engine_choice.h"
#include "cli/link_limit.h"

namespace tokenyard::cli {

// Prints a line for each; returns the exit status. Rates are of the choice's devices in a ring, each of which stores to
// the next or loads from it, all at once; with more than two of them, the first two are measured alone before. Uses
// CUDA in this process.
int run_limits(const EngineChoice& engine, bool json);

// The best of plain and bulk stores, of all devices of the choice at once and in a ring. In a process of its own.
[[nodiscard]] LinkLimit measure_link_limit(const EngineChoice& engine);

}  // namespace tokenyard::cli
