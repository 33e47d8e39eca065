// SPDX-License-Identifier: Apache-2.0
// `tokenyard bench --limits`: what the devices and the link between the first two can do at best.
// Thread rule: call from the main thread.
#pragma once

#include "cli/engine_choice.h"

namespace tokenyard::cli {

// Prints a table or lines of JSON; returns the program's exit status. In builds without CUDA it throws kUnsupported.
int run_limits(const EngineChoice& engine, bool json);

}  // namespace tokenyard::cli
