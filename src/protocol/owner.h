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

// Division by a number that is known before: it takes a GPU longer than the rest of a token's route. n / d is the high
// half of n * ceil(2^32 / d) as long as n * d < 2^32.
class Divisor {
 public:
  Divisor() = default;

  constexpr explicit Divisor(int value)
      : value_(static_cast<std::uint32_t>(value)),
        reciprocal_(value < 2 ? 0 : static_cast<std::uint32_t>(((std::uint64_t{1} << 32) + value_ - 1) / value_)) {}

  [[nodiscard]] TOKENYARD_HD constexpr std::uint32_t value() const { return value_; }

  [[nodiscard]] TOKENYARD_HD constexpr std::uint32_t divide(std::uint32_t n) const {
    return reciprocal_ == 0 ? n : static_cast<std::uint32_t>(std::uint64_t{n} * reciprocal_ >> 32);
  }

 private:
  std::uint32_t value_ = 1;
  std::uint32_t reciprocal_ = 0;  // 0 of 1, and of 0, by which nobody divides
};

// owner_of by such divisors.
class OwnerRule {
 public:
  static constexpr int kMostExperts = 1 << 16;

  OwnerRule() = default;

  constexpr OwnerRule(int num_experts, int num_ranks)
      : boundary_(num_experts - (num_ranks - num_experts % num_ranks) * (num_experts / num_ranks)),
        larger_(num_experts % num_ranks),
        small_(num_experts / num_ranks),
        large_(num_experts / num_ranks + 1) {}

  // `expert` in [0, num_experts), which are fewer than kMostExperts.
  [[nodiscard]] TOKENYARD_HD constexpr int owner_of(int expert) const {
    const bool large = expert < boundary_;
    const Divisor block = large ? large_ : small_;
    const int before = large ? 0 : boundary_;
    return (large ? 0 : larger_) + static_cast<int>(block.divide(static_cast<std::uint32_t>(expert - before)));
  }

 private:
  int boundary_ = 0;  // experts of the ranks that hold one more
  int larger_ = 0;
  Divisor small_{};
  Divisor large_{};
};

}  // namespace tokenyard::protocol
