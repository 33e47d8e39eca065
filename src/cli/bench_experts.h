// SPDX-License-Identifier: Apache-2.0
// What stands in for a rank's experts in the bench: it looks at every row that dispatch brought, and writes for each
// what the experts would have made of it. Thread rule: one thread per rank.
#pragma once

#include <cstdint>
#include <vector>

#include "tokenyard/communication.h"

#include "cli/bench_job.h"
#include "cli/bench_rows.h"
#include "cli/rank_device.h"

namespace tokenyard::cli {

class BenchExperts {
 public:
  BenchExperts(const BenchJob& job, int rank);

  // `output` has the shape that combine takes. Throws kPeerFailed when a row is not right.
  void run(RankDevice& device, const Communication& communication, const DispatchResult& received, TensorView output);

  // Throws kPeerFailed when a sum of this rank is not right. [num_tokens, hidden_size] in host memory.
  void require_sums(const TensorView& sums);

 private:
  struct Row {
    std::int64_t at = 0;  // of its part
    BenchToken from{};
    float factor = 0;
  };

  // Rows that lie one behind the other.
  struct Part {
    std::int64_t block = 0;  // of the first dimension, where there are three
    std::vector<Row> rows{};
  };

  [[nodiscard]] std::vector<Part> parts(const Communication& communication) const;
  [[nodiscard]] std::vector<Part> parts_by_source(bool compact, bool rows_of_others) const;
  [[nodiscard]] std::vector<Part> parts_by_expert(const Communication& communication) const;
  [[nodiscard]] float own_factor(const BenchToken& token) const;

  const BenchJob& job_;
  int rank_;
  BenchRowBytes received_bytes_, expert_bytes_;
};

}  // namespace tokenyard::cli
