// SPDX-License-Identifier: Apache-2.0
// What a kernel needs that stages and sums rows in bulk (bulk_staging.cuh, bulk_sums.cuh), and which rows are worth it.
#pragma once

#include <cstdint>

#include "engine/cuda/tasks.h"
#include "protocol/host_device.h"

namespace tokenyard::engine::cuda {

inline constexpr int kSumRingBytes = 224 << 10;  // of a block

inline constexpr std::int64_t kLeastBulkBytes = 512;

// Expert output that bulk copies stage: as it is, in whole units of them.
TOKENYARD_HD constexpr bool stages_in_bulk(const CombineTask& task) {
  return task.staged && task.from_dtype == task.rows_dtype && task.unit == 16 && task.row_bytes >= kLeastBulkBytes;
}

// From here on a block sums more tokens than it takes to fill a pipeline. Rows are whole units of a bulk copy.
[[nodiscard]] inline bool sums_in_bulk(const CombineTask& task, std::int64_t tokens, int blocks) {
  constexpr std::int64_t kTokensPerBlock = 2;
  return task.vectors && task.row_bytes >= kLeastBulkBytes && task.row_bytes % 16 == 0 &&
         tokens > kTokensPerBlock * blocks;
}

// Of a launch with one half or both; `rows` is how many there may be to stage.
[[nodiscard]] inline bool sums_or_stages_in_bulk(const CombineTask& task,
                                                 std::int64_t tokens,
                                                 std::int64_t rows,
                                                 int blocks) {
  if (task.receives) return sums_in_bulk(task, tokens, blocks);
  return stages_in_bulk(task) && rows > blocks;
}

}  // namespace tokenyard::engine::cuda
