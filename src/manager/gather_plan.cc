// SPDX-License-Identifier: Apache-2.0
#include "manager/gather_plan.h"

#include <numeric>
#include <string>

#include "tokenyard/error.h"

namespace tokenyard::manager {
namespace {

int size_of_group(const std::optional<Group>& group) {
  return group ? group->num_ranks() : 1;
}

Group or_alone(const std::optional<Group>& group) {
  return group ? *group : Group::in_process(1).front();
}

}  // namespace

void GatherPlan::check(const ParallelGroups& parallel, const Group& manager_group) {
  const auto refuse = [](const std::string& message) { throw Error(ErrorCode::kInvalidArgument, message); };
  if (parallel.tp_size < 1) {
    refuse("ParallelGroups::tp_size is " + std::to_string(parallel.tp_size) + "; it must be at least 1");
  }
  const std::int64_t dp = size_of_group(parallel.dp);
  const std::int64_t pcp = size_of_group(parallel.pcp);
  const int ep = parallel.ep.value_or(manager_group).num_ranks();
  if (dp * pcp * parallel.tp_size == ep) return;
  refuse("ParallelGroups has " + std::to_string(dp) + " data-parallel times " + std::to_string(pcp) +
         " context-parallel times " + std::to_string(parallel.tp_size) + " tensor-parallel ranks and the " +
         "expert-parallel group " + std::to_string(ep) + "; set dp, pcp and tp_size so that they multiply up to it");
}

GatherPlan::GatherPlan(const ParallelGroups& parallel, const Group& manager_group)
    : ep_(parallel.ep.value_or(manager_group)),
      dp_(or_alone(parallel.dp)),
      pcp_(or_alone(parallel.pcp)),
      tp_size_(parallel.tp_size),
      use_ep_(parallel.use_ep) {}

void GatherPlan::set_step(std::span<const std::int64_t> num_tokens) {
  step_.assign(num_tokens.begin(), num_tokens.end());
}

const Group& GatherPlan::group(bool sequence_parallel) const {
  if (sequence_parallel) return ep_;
  if (dp_.num_ranks() == 1) return pcp_;
  if (!use_ep_ || pcp_.num_ranks() == 1) return dp_;
  if (tp_size_ == 1) return ep_;
  throw Error(ErrorCode::kInvalidArgument,
              "data and context parallelism with tp_size = " + std::to_string(tp_size_) +
                  " require sequence-parallel inputs: split them over the tensor-parallel ranks and pass "
                  "sequence_parallel = true");
}

std::span<const std::int64_t> GatherPlan::step_sizes(const Group& group) const {
  if (step_.empty()) {
    throw Error(ErrorCode::kInvalidState,
                "there is no list of token counts for this step; give set_step_num_tokens the rows of each of the " +
                    std::to_string(group.num_ranks()) + " ranks");
  }
  if (std::ssize(step_) == group.num_ranks()) return step_;
  throw Error(ErrorCode::kInvalidArgument, "the step's list of token counts has " + std::to_string(step_.size()) +
                                               " entries and this call joins " + std::to_string(group.num_ranks()) +
                                               " ranks");
}

std::span<const std::int64_t> GatherPlan::equal_sizes(const Group& group, std::int64_t rows) {
  equal_.assign(static_cast<std::size_t>(group.num_ranks()), rows);
  return equal_;
}

std::span<const std::int64_t> GatherPlan::sizes_of_dispatch(const Group& group, std::int64_t own_rows) {
  return dp_.num_ranks() == 1 ? equal_sizes(group, own_rows) : step_sizes(group);
}

std::span<const std::int64_t> GatherPlan::sizes_of_combine(const Group& group, std::int64_t rows) {
  if (dp_.num_ranks() > 1) return step_sizes(group);
  if (rows % group.num_ranks() == 0) return equal_sizes(group, rows / group.num_ranks());
  throw Error(ErrorCode::kInvalidArgument, "hidden_states has " + std::to_string(rows) +
                                               " rows, which do not divide by the " +
                                               std::to_string(group.num_ranks()) + " ranks of this call");
}

void GatherPlan::require_own(const Group& group, std::span<const std::int64_t> sizes, std::int64_t own_rows) {
  const std::int64_t own = sizes[static_cast<std::size_t>(group.rank())];
  if (own == own_rows) return;
  throw Error(ErrorCode::kInvalidArgument, "the step's list of token counts says " + std::to_string(own) +
                                               " rows for rank " + std::to_string(group.rank()) +
                                               " and hidden_states has " + std::to_string(own_rows));
}

void GatherPlan::require_sum(std::span<const std::int64_t> sizes, std::int64_t rows) {
  const std::int64_t sum = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (sum == rows) return;
  throw Error(ErrorCode::kInvalidArgument, "the step's list of token counts adds up to " + std::to_string(sum) +
                                               " rows and hidden_states has " + std::to_string(rows));
}

}  // namespace tokenyard::manager
