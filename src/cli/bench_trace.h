// SPDX-License-Identifier: Apache-2.0
// The picks of a real layer for the bench, from the layer's tokens.safetensors. Peers compile this file too. Thread
// rule: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/bench_routing.h"

namespace tokenyard::cli {

// [num_tokens, top_k] of each rank: the file's first tokens, rank after rank. Throws Error(kInvalidArgument) for a file
// that has too few, another top_k, or experts that the shape lacks.
[[nodiscard]] std::vector<std::vector<std::int32_t>> trace_ids(const std::string& file, const BenchShape& shape);

}  // namespace tokenyard::cli
