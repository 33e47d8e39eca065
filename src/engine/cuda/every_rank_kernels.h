// SPDX-License-Identifier: Apache-2.0
// The kernels of `every_rank`, for host code; as kernels.h says.
#pragma once

#include <cuda_runtime.h>

#include "engine/cuda/every_rank_tasks.h"

namespace tokenyard::engine::cuda {

// True where the current device can send in bulk; otherwise that launch is not to be used.
[[nodiscard]] bool load_every_rank_dispatch();
// Takes the epoch, sends this rank's header, and leaves in `sizes` what all ranks said.
void launch_learn_sizes(const Announcement& said, HostSizes* sizes, cudaStream_t stream);
void launch_every_rank_dispatch(const EveryRankDispatchTask& task, int blocks, cudaStream_t stream);
// The same for many tokens.
void launch_every_rank_in_bulk(const EveryRankDispatchTask& task, int blocks, cudaStream_t stream);

// As load_combine and launch_combine.
[[nodiscard]] bool load_every_rank_combine();
void launch_every_rank_combine(const EveryRankCombineTask& task, int blocks, bool in_bulk, cudaStream_t stream);

}  // namespace tokenyard::engine::cuda
