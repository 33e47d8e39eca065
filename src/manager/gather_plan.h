// SPDX-License-Identifier: Apache-2.0
// Which ranks a gather call joins, and how many rows each of them brings.
// Thread rule: the manager's lock guards it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tokenyard/manager.h"

namespace tokenyard::manager {

class GatherPlan {
 public:
  // Throws kInvalidArgument unless the groups multiply up to the expert-parallel one.
  static void check(const ParallelGroups& parallel, const Group& manager_group);
  GatherPlan(const ParallelGroups& parallel, const Group& manager_group);

  void set_step(std::span<const std::int64_t> num_tokens);

  // The expert-parallel group when the inputs are split over it; else the data-parallel one where there is more than
  // one such rank, or the expert-parallel one again when context parallelism splits tokens too; else the
  // context-parallel one.
  [[nodiscard]] const Group& group(bool sequence_parallel) const;
  // Rows of each rank when this one brings `own_rows`. The list is the plan's own, until the next call.
  [[nodiscard]] std::span<const std::int64_t> sizes_of_dispatch(const Group& group, std::int64_t own_rows);
  // Rows that each rank gets back when all ranks together have `rows`.
  [[nodiscard]] std::span<const std::int64_t> sizes_of_combine(const Group& group, std::int64_t rows);
  // Whether these sizes say what the tensor does, apart so that a caller who is told off knows the sizes of the others.
  static void require_own(const Group& group, std::span<const std::int64_t> sizes, std::int64_t own_rows);
  static void require_sum(std::span<const std::int64_t> sizes, std::int64_t rows);

 private:
  [[nodiscard]] std::span<const std::int64_t> step_sizes(const Group& group) const;
  [[nodiscard]] std::span<const std::int64_t> equal_sizes(const Group& group, std::int64_t rows);

  Group ep_;
  Group dp_;
  Group pcp_;
  int tp_size_;
  bool use_ep_;
  std::vector<std::int64_t> step_;   // empty: none given
  std::vector<std::int64_t> equal_;  // of the latest call that takes no list
};

}  // namespace tokenyard::manager
