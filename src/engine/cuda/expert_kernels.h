// SPDX-License-Identifier: Apache-2.0
// The kernels of expert-major rounds, for host code; the rules are those of kernels.h.
#pragma once

#include <cuda_runtime.h>

#include "engine/cuda/expert_tasks.h"
#include "engine/cuda/kernels.h"

namespace tokenyard::engine::cuda {

// Bytes of shared memory that a dispatch of rows of up to `row` bytes needs.
[[nodiscard]] std::int64_t expert_shared_bytes(const ExpertLayout& extra,
                                               const Experts& experts,
                                               int num_ranks,
                                               std::int64_t row);
// Throws kUnsupported when the current device has less than that.
void load_expert_dispatch(std::int64_t shared_bytes);
void launch_expert_dispatch(const ExpertDispatchTask& task, std::int64_t shared_bytes, int blocks, cudaStream_t stream);

// `logarithmic`: rows go back as logarithms, not as values of the wire's dtype.
void load_expert_combine();
void launch_expert_combine(const ExpertCombineTask& task, bool logarithmic, int blocks, cudaStream_t stream);

// One block each. A dispatch that this rank gives up: it uses up the epoch and tells every peer.
struct ExpertNotice {
  Common common{};
  ExpertLayout extra{};
  ExpertBoard* state = nullptr;
  ExpertRoute route{};
};

void load_expert_notices();
void launch_expert_abort_dispatch(const ExpertNotice& notice, cudaStream_t stream);
// The same of the combine of a round.
void launch_expert_abort_combine(const ExpertNotice& notice, cudaStream_t stream);
// The dispatch or combine of a round was sent and will not be received.
void launch_expert_forget(const ExpertNotice& notice, int phase, cudaStream_t stream);

}  // namespace tokenyard::engine::cuda
