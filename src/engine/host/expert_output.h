// SPDX-License-Identifier: Apache-2.0
// Reading the caller's expert output row by row, on its way to the wire. Thread rule: pure functions.
#pragma once

#include <cstdint>

#include "engine/engine.h"

namespace tokenyard::engine::host {

// `row` counts the rows that the caller sees, through all blocks.
[[nodiscard]] const std::byte* expert_row(const TensorView& rows, std::int64_t row);

// Writes a row to `to` in the wire's dtype; nothing when it is there already.
void stage_row(const TensorView& rows, std::int64_t row, Dtype wire, std::byte* to, bool stream);

}  // namespace tokenyard::engine::host
