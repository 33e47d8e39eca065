// SPDX-License-Identifier: Apache-2.0
// What the bench on the host is compared with: the rows of both phases copied one by one, a rank's own rows too, from
// and to memory of the sizes that a round has. Thread rule: one thread per rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cli/bench_job.h"

namespace tokenyard::cli {

class RowCopies {
 public:
  RowCopies(const BenchJob& job, int rank);

  void run();

 private:
  std::int64_t row_bytes_;
  std::vector<std::int64_t> token_of_;
  std::vector<std::byte> tokens_, dispatched_, returned_, landed_;
};

}  // namespace tokenyard::cli
