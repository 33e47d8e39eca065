// SPDX-License-Identifier: Apache-2.0
// The kernels of rounds at final places, for host code; as those in kernels.h.
#pragma once

#include "engine/cuda/compact_tasks.h"
#include "engine/cuda/kernels.h"

namespace tokenyard::engine::cuda {

// The counts of a dispatch alone, of which the host is told; and a dispatch that this rank gives up, of which the peers
// are told.
void load_count();
void launch_count(const MoveTask& task, int blocks, cudaStream_t stream);
void launch_abort_compact(const MoveTask& task, cudaStream_t stream);

// The rows of a dispatch, or all of it.
void load_move();
void launch_move(const MoveTask& task, int blocks, cudaStream_t stream);
// The same for many tokens, where the device can.
[[nodiscard]] bool load_bulk_move();
void launch_bulk_move(const MoveTask& task, int blocks, cudaStream_t stream);

// As load_combine and launch_combine.
[[nodiscard]] bool load_compact_combine();
void launch_compact_combine(const CompactCombineTask& task, int blocks, bool in_bulk, cudaStream_t stream);

}  // namespace tokenyard::engine::cuda
