// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine of bf16 rows with MPI_Alltoallv: counts first, one row per (token, rank) packed by rank with its
// picks and weights alongside, then the same way back and an fp32 sum in rank order. By expert, received rows are
// copied to each of their experts' blocks, and what these give is weighed and reduced before it goes back. All memory
// is allocated once. Thread rule: one thread per MPI process.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <vector>

#include "cli/bench_routing.h"

namespace tokenyard::bench {

enum class ReceivedLayout { kCompact, kExpertMajor };

class Exchange {
 public:
  Exchange(const cli::BenchShape& shape,
           int rank,
           const std::vector<std::vector<std::int32_t>>& ids,
           ReceivedLayout layout);

  void dispatch();
  void combine();

  // Once, after the first dispatch: what this rank's experts make of the rows that came.
  void run_experts();
  // The number of wrong values in the combined tokens.
  [[nodiscard]] std::int64_t count_wrong() const;

  [[nodiscard]] std::int64_t dispatch_bytes() const;  // to other ranks
  [[nodiscard]] std::int64_t combine_bytes() const;

 private:
  struct Copy {
    std::int32_t token = 0;
    std::int32_t rank = 0;
    std::int32_t row = 0;  // among the packed rows
  };

  void plan();
  void unpack_by_expert();
  void reduce_by_token();

  [[nodiscard]] std::int64_t num_received() const;
  void exchange(const void* from, void* to, int bytes_per_row, bool back) const;

  cli::BenchShape shape_;
  int rank_;
  ReceivedLayout layout_;
  // By expert: [num_local_experts, num_ranks * num_tokens, hidden], rows in use, and the row of each received pick.
  std::vector<std::uint16_t> expert_rows_, expert_results_;
  std::vector<std::int32_t> rows_per_expert_, pick_rows_;
  std::vector<std::int32_t> ids_;
  std::vector<std::uint16_t> tokens_, packed_, received_, expert_output_, returned_, output_;
  std::vector<std::int32_t> packed_ids_, received_ids_;
  std::vector<float> weights_, packed_weights_, received_weights_;
  std::vector<int> send_counts_, receive_counts_;
  std::vector<Copy> copies_;              // by token, then by rank
  std::vector<std::int32_t> first_copy_;  // [num_tokens + 1]
  std::vector<float> sums_;
};

}  // namespace tokenyard::bench
