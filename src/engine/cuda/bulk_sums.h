// SPDX-License-Identifier: Apache-2.0
// What a kernel needs that stages and sums rows in bulk (bulk_sums.cuh), and which launches are better so.
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

// Whether a launch with one half or both is better in bulk: `tokens` to sum, or up to `staged` rows to stage. From two
// of them a block on, it takes more than to fill a pipeline. Rows are whole units of a bulk copy.
[[nodiscard]] inline bool combines_in_bulk(const CombineTask& task,
                                           std::int64_t tokens,
                                           std::int64_t staged,
                                           int blocks) {
  constexpr std::int64_t kRowsPerBlock = 2;
  if (!task.receives) return stages_in_bulk(task) && staged > kRowsPerBlock * blocks;
  return task.vectors && task.row_bytes >= kLeastBulkBytes && task.row_bytes % 16 == 0 &&
         tokens > kRowsPerBlock * blocks;
}

}  // namespace tokenyard::engine::cuda
