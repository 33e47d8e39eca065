// SPDX-License-Identifier: Apache-2.0
// Eight ranks as data * context * tensor parallel ones, and the rows that each of them brings to a gather call.
// Values are small whole numbers, so sums are exact in every order; what a call must give is counted out from them.
// Thread rule: plain values and pure functions.
#pragma once

#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tokenyard/manager.h"

#include "manager/manager_setup.h"
#include "support/check.h"
#include "support/round.h"
#include "support/tensor.h"

namespace tokenyard::manager_tests {

// The groups of all ranks; tensor-parallel ranks are neighbours, then come context-parallel ones.
class RankCube {
 public:
  RankCube(int dp, int pcp, int tp) : dp_(dp), pcp_(pcp), tp_(tp) {
    for (int i = 0; i < pcp * tp; ++i)
      dp_groups_.push_back(Group::in_process(dp));
    for (int i = 0; i < dp * tp; ++i)
      pcp_groups_.push_back(Group::in_process(pcp));
  }

  [[nodiscard]] int num_ranks() const { return dp_ * pcp_ * tp_; }

  [[nodiscard]] ParallelGroups groups_of(int rank, bool use_ep) const {
    const auto at = [](const auto& groups, int group, int member) {
      return groups[static_cast<std::size_t>(group)][static_cast<std::size_t>(member)];
    };
    const int tp_index = rank % tp_;
    const int pcp_index = rank / tp_ % pcp_;
    const int dp_index = rank / (tp_ * pcp_);
    return {.dp = at(dp_groups_, pcp_index * tp_ + tp_index, dp_index),
            .pcp = at(pcp_groups_, dp_index * tp_ + tp_index, pcp_index),
            .tp_size = tp_,
            .use_ep = use_ep};
  }

  // Ranks of the whole in the order of the group.
  [[nodiscard]] std::vector<int> ep_ranks() const {
    std::vector<int> ranks(static_cast<std::size_t>(num_ranks()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  [[nodiscard]] std::vector<int> dp_ranks(int rank) const {
    std::vector<int> ranks;
    for (int i = 0; i < dp_; ++i)
      ranks.push_back(i * pcp_ * tp_ + rank % (pcp_ * tp_));
    return ranks;
  }

  [[nodiscard]] std::vector<int> pcp_ranks(int rank) const {
    std::vector<int> ranks;
    for (int i = 0; i < pcp_; ++i)
      ranks.push_back(rank / (tp_ * pcp_) * tp_ * pcp_ + i * tp_ + rank % tp_);
    return ranks;
  }

 private:
  int dp_, pcp_, tp_;
  std::vector<std::vector<Group>> dp_groups_, pcp_groups_;
};

// Element of a payload that `rank` brings.
inline std::int64_t cargo(int payload, int rank, std::int64_t row, std::int64_t column) {
  return (payload * 41 + rank * 13 + row * 5 + column * 3) % 97;
}

// [rows, columns] of T, filled by `cargo` or zero.
template <class T>
struct Matrix {
  std::vector<T> values;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  Dtype dtype = Dtype::kF32;

  [[nodiscard]] TensorView view() { return {values.data(), dtype, {rows, columns}}; }
};

template <class T>
Matrix<T> cargo_matrix(Dtype dtype, int payload, int rank, std::int64_t rows, std::int64_t columns) {
  Matrix<T> matrix{.values = {}, .rows = rows, .columns = columns, .dtype = dtype};
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column)
      matrix.values.push_back(static_cast<T>(cargo(payload, rank, row, column)));
  }
  return matrix;
}

// The cargo of all `ranks`, one after the other.
template <class T>
void check_gathered(const TensorView& view,
                    Dtype dtype,
                    int payload,
                    const std::vector<int>& ranks,
                    std::span<const std::int64_t> sizes) {
  const std::string what = "payload " + std::to_string(payload);
  support::check(view.dtype == dtype, what + " has dtype " + std::string(name(view.dtype)));
  support::check_eq(view.num_rows(), std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}), what + ", rows");
  std::int64_t at = 0;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    for (std::int64_t row = 0; row < sizes[i]; ++row, ++at) {
      for (std::int64_t column = 0; column < view.shape[1]; ++column) {
        T value{};
        std::memcpy(&value, support::row_of(view, at) + column * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
        support::check_eq(static_cast<std::int64_t>(value), cargo(payload, ranks[i], row, column),
                          what + " of rank " + std::to_string(ranks[i]) + ", row " + std::to_string(row));
      }
    }
  }
}

inline constexpr int kExpertPayload = 9;

// What experts give on `rank` for all gathered rows.
inline Matrix<float> expert_output(int rank, std::int64_t rows, std::int64_t hidden) {
  return cargo_matrix<float>(Dtype::kF32, kExpertPayload, rank, rows, hidden);
}

// Member `index` of `ranks` gets its own rows of the sum over all of them.
inline void check_combined(const TensorView& output,
                           const std::vector<int>& ranks,
                           std::span<const std::int64_t> sizes,
                           std::size_t index) {
  const std::int64_t first =
      std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(index), std::int64_t{0});
  support::check_eq(output.num_rows(), sizes[index], "rows of combine");
  for (std::int64_t row = 0; row < sizes[index]; ++row) {
    for (std::int64_t column = 0; column < output.shape[1]; ++column) {
      std::int64_t sum = 0;
      for (const int rank : ranks)
        sum += cargo(kExpertPayload, rank, first + row, column);
      float value = 0;
      std::memcpy(&value, support::row_of(output, row) + column * 4, 4);
      support::check_eq(static_cast<std::int64_t>(value), sum, "sum of row " + std::to_string(row));
    }
  }
}

inline ManagerOptions gather_options(const Group& group, const ParallelGroups& parallel, int max_tokens = 8) {
  ManagerOptions options = options_for(group);
  options.parallel = parallel;
  options.params.max_tokens_per_rank = max_tokens;
  return options;
}

// One rank of many that are all data parallel, with its manager.
struct Flat {
  explicit Flat(const Group& group, int max_tokens = 8)
      : manager(create_all2all_manager("AgRsAll2AllManager", gather_options(group, {.dp = group}, max_tokens))),
        rank(group.rank()) {
    ranks.resize(static_cast<std::size_t>(group.num_ranks()));
    std::iota(ranks.begin(), ranks.end(), 0);
  }

  // This step's rows; returns this rank's.
  std::int64_t step(std::vector<std::int64_t> given) {
    sizes = std::move(given);
    manager.set_step_num_tokens(sizes);
    return sizes[static_cast<std::size_t>(rank)];
  }

  [[nodiscard]] std::int64_t all() const { return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}); }

  // A dispatch of rows of `hidden` f32, checked.
  void dispatch(std::int64_t hidden, std::int64_t top_k = 2) {
    const std::int64_t own = sizes[static_cast<std::size_t>(rank)];
    auto rows = cargo_matrix<float>(Dtype::kF32, 1, rank, own, hidden);
    auto weights = cargo_matrix<float>(Dtype::kF32, 2, rank, own, top_k);
    auto ids = cargo_matrix<std::int32_t>(Dtype::kI32, 3, rank, own, top_k);
    support::check_ok(calls.dispatch(rows.view(), weights.view(), ids.view(), {}, result), "dispatch");
    check_gathered<float>(result.hidden_states, Dtype::kF32, 1, ranks, sizes);
    check_gathered<float>(result.topk_weights, Dtype::kF32, 2, ranks, sizes);
    check_gathered<std::int32_t>(result.topk_ids, Dtype::kI32, 3, ranks, sizes);
    support::check(!result.extra_tensors.has_value(), "no list was given");
  }

  void combine(std::int64_t hidden) {
    auto experts = expert_output(rank, all(), hidden);
    TensorView output;
    support::check_ok(calls.combine(experts.view(), output), "combine");
    check_combined(output, ranks, sizes, static_cast<std::size_t>(rank));
  }

  All2AllManager manager;
  GatherCalls& calls = manager.gather_calls();
  GatherResult result{};
  int rank;
  std::vector<int> ranks{};
  std::vector<std::int64_t> sizes{};
};

}  // namespace tokenyard::manager_tests
