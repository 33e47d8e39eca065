// SPDX-License-Identifier: Apache-2.0
// The kernels of the CUDA engine, for host code. Each call enqueues one launch on the stream and returns; the grid must
// fit the device all at once together with those of other ranks there. Loading makes a kernel resident, so that no
// launch of it loads code while another kernel waits.
#pragma once

#include <cuda_runtime.h>

#include "engine/cuda/tasks.h"

namespace tokenyard::engine::cuda {

// Throws with CUDA's words, as fabric::cuda::require, unless `outcome` is cudaSuccess.
void check(cudaError_t outcome, const char* what);

// Whether the current device has bulk copies, and as much shared memory for a block of the kernel besides its own; it
// is then ready to be launched with it.
[[nodiscard]] bool make_room_for_ring(const void* kernel, int bytes);

void load_rank_major_dispatch();
void launch_rank_major_dispatch(const DispatchTask& task, int blocks, cudaStream_t stream);
// The same for many tokens, with rows that move in bulk. Loading is false where the current device cannot: then it is
// not to be launched.
[[nodiscard]] bool load_bulk_dispatch();
void launch_bulk_dispatch(const DispatchTask& task, int blocks, cudaStream_t stream);

void load_small_dispatch();
void launch_small_dispatch(const SmallDispatchTask& task, int blocks, cudaStream_t stream);
void load_small_combine();
void launch_small_combine(const CombineTask& task, int blocks, cudaStream_t stream);

// Rows are staged and summed in bulk, or by plain loads and stores. Loading is false where the current device has only
// these. What other ranks choose does not matter.
[[nodiscard]] bool load_combine();
void launch_combine(const CombineTask& task, int blocks, bool in_bulk, cudaStream_t stream);

// One block each. A dispatch that this rank gives up: it uses up the epoch and tells every peer.
void launch_abort_dispatch(const Common& common, const SmallLayout& small, cudaStream_t stream);
// The same of the combine of a round.
void launch_abort_combine(const Common& common, const RouteMemory& route, bool small, cudaStream_t stream);
// The receive half of a dispatch whose rows nobody wants.
void launch_await_dispatch(const Common& common, const SmallLayout& small, cudaStream_t stream);
// Nothing of the last dispatch's rows will be read any more, and no combine says so; or nothing of the last combine's.
void launch_release(const Common& common, bool combine, cudaStream_t stream);
// Ends when no origin reads this rank's rows of the last combine any more.
void launch_await_section(const Common& common, cudaStream_t stream);
// Makes a route as new, after a round that no combine ended.
void launch_clear(const Common& common, const RouteMemory& route, cudaStream_t stream);
void load_notices();

}  // namespace tokenyard::engine::cuda
