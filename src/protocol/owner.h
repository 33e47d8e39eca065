// SPDX-License-Identifier: Apache-2.0
// Who owns an expert: contiguous blocks, the first num_experts % num_ranks ranks hold one more (design.md part 2).
#pragma once

#include "protocol/host_device.h"

namespace tokenyard::protocol {

TOKENYARD_HD constexpr int num_local_experts(int num_experts, int num_ranks, int rank) {
  return num_experts / num_ranks + (rank < num_experts % num_ranks ? 1 : 0);
}

TOKENYARD_HD constexpr int first_local_expert(int num_experts, int num_ranks, int rank) {
  const int larger = num_experts % num_ranks;
  return rank * (num_experts / num_ranks) + (rank < larger ? rank : larger);
}

// `expert` in [0, num_experts).
TOKENYARD_HD constexpr int owner_of(int num_experts, int num_ranks, int expert) {
  const int small = num_experts / num_ranks;
  const int larger = num_experts % num_ranks;
  const int boundary = num_experts - (num_ranks - larger) * small;  // experts of the ranks that hold one more
  return expert < boundary ? expert / (small + 1) : larger + (expert - boundary) / small;
}

}  // namespace tokenyard::protocol
