// SPDX-License-Identifier: Apache-2.0
// Finds who holds up a rank whose wait ran out: the awaited rank, or whom that one waits for in its turn.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace tokenyard::engine::cuda {

inline constexpr int kNoCulprit = -1;  // ranks wait for each other in a circle

// Where ranks tell each other that they wait: a line for each at `offset` of each window.
struct LifeLines {
  std::byte* const* windows = nullptr;  // [num_ranks], device pointers in device memory
  std::int64_t offset = 0;
  int rank = 0;
  int num_ranks = 1;
};

// Who was waited for, and how long other ranks may take to say that they wait, too.
struct Question {
  int peer = 0;
  std::uint32_t phase = 0;
  std::uint32_t epoch = 0;
  std::uint64_t grace_ns = 0;
};

void load_find_culprit();
// `answer`: in memory that device and host reach: a rank, or kNoCulprit.
void launch_find_culprit(const LifeLines& lines, const Question& asked, std::int32_t* answer, cudaStream_t stream);

}  // namespace tokenyard::engine::cuda
