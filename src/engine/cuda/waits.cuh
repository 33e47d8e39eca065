// SPDX-License-Identifier: Apache-2.0
// Waits of kernels: each ends, with what it waited for or at the deadline, and leaves a notice on the host's board
// then.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "tokenyard/error.h"

#include "engine/cuda/tasks.h"
#include "engine/cuda/verbs.cuh"
#include "protocol/stamp.h"

namespace tokenyard::engine::cuda {

struct Awaited {
  int peer = 0;
  Phase phase = Phase::kNone;
  std::uint32_t epoch = 0;
};

// The first notice stays: who waits in vain after it waits for the same culprit, or for one that waits for it. `kind`
// is stored last, for the host to find a whole record.
__device__ inline void leave_notice(Notice& notice, NoticeKind kind, const Awaited& awaited, std::uint64_t waited_ns) {
  notice.peer = awaited.peer;
  notice.phase = static_cast<std::uint32_t>(awaited.phase);
  notice.epoch = awaited.epoch;
  notice.waited_ns = waited_ns;
  __threadfence_system();
  *const_cast<volatile NoticeKind*>(&notice.kind) = kind;
}

__device__ inline void fail(const Common& common, NoticeKind kind, const Awaited& awaited, std::uint64_t waited_ns) {
  if (atomicCAS(&common.board->failed, 0U, 1U) == 0U) leave_notice(common.host->fault, kind, awaited, waited_ns);
}

// The operation ends here without a result; the next one works.
__device__ inline void give_up(const Common& common, std::uint32_t* state, NoticeKind kind, const Awaited& awaited) {
  if (atomicExch(state, 1U) == 0U) leave_notice(common.host->aborted, kind, awaited, 0);
}

__device__ inline std::uint64_t deadline_of(const Common& common, std::uint32_t epoch) {
  const bool first = epoch == common.board->initial_epoch + 1;
  return first ? common.board->first_deadline_ns : common.board->deadline_ns;
}

// True when `ready()`; false at the deadline, or when another thread of this rank failed, or when `pointless()`, which
// is asked now and then.
template <class Ready, class Pointless>
__device__ bool wait_unless(const Common& common,
                            const Awaited& awaited,
                            const Ready& ready,
                            const Pointless& pointless) {
  constexpr int kPollsPerClock = 64;
  if (ready()) return true;
  const std::uint64_t start = nanoseconds();
  while (true) {
#pragma unroll 1
    for (int i = 0; i < kPollsPerClock; ++i) {
      if (ready()) return true;
    }
    if (load_relaxed_device(&common.board->failed) != 0 || pointless()) return false;
    const std::uint64_t waited = nanoseconds() - start;
    if (waited < deadline_of(common, awaited.epoch)) continue;
    if (ready()) return true;  // it came while the clock ran out
    fail(common, NoticeKind::kTimeout, awaited, waited);
    return false;
  }
}

// `stop`: a word of this rank that ends the wait when it is not 0.
template <class Ready>
__device__ bool wait_until(const Common& common,
                           const Awaited& awaited,
                           Ready&& ready,
                           const std::uint32_t* stop = nullptr) {
  return wait_unless(common, awaited, ready, [stop] { return stop != nullptr && load_relaxed_device(stop) != 0; });
}

}  // namespace tokenyard::engine::cuda
