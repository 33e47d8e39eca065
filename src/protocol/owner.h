// SPDX-License-Identifier: Apache-2.0
// Who owns an expert: contiguous blocks, the first num_experts % num_ranks ranks hold one more (design.md part 2).
#pragma once

#include <cstdint>

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

// The same without division, which takes a GPU longer than the rest of a token's route: n / d is the high half of
// n * ceil(2^32 / d) as long as n * d < 2^32.
class OwnerRule {
 public:
  static constexpr int kMostExperts = 1 << 16;

  OwnerRule() = default;

  constexpr OwnerRule(int num_experts, int num_ranks)
      : boundary_(num_experts - (num_ranks - num_experts % num_ranks) * (num_experts / num_ranks)),
        larger_(num_experts % num_ranks),
        per_small_(reciprocal(num_experts / num_ranks)),
        per_large_(reciprocal(num_experts / num_ranks + 1)) {}

  // `expert` in [0, num_experts), which are fewer than kMostExperts.
  [[nodiscard]] TOKENYARD_HD constexpr int owner_of(int expert) const {
    return expert < boundary_ ? divide(expert, per_large_) : larger_ + divide(expert - boundary_, per_small_);
  }

 private:
  // 0 for 1, whose quotient is told apart, and for 0, by which nobody divides.
  static constexpr std::uint32_t reciprocal(int divisor) {
    return divisor < 2 ? 0 : static_cast<std::uint32_t>(((std::uint64_t{1} << 32) + divisor - 1) / divisor);
  }

  TOKENYARD_HD static constexpr int divide(int n, std::uint32_t reciprocal) {
    return reciprocal == 0 ? n : static_cast<int>(static_cast<std::uint64_t>(n) * reciprocal >> 32);
  }

  int boundary_ = 0;  // experts of the ranks that hold one more
  int larger_ = 0;
  std::uint32_t per_small_ = 0;
  std::uint32_t per_large_ = 0;
};

}  // namespace tokenyard::protocol
