// SPDX-License-Identifier: Apache-2.0
#include "engine/host/expert_output.h"

#include "engine/host/rows.h"

namespace tokenyard::engine::host {

const std::byte* expert_row(const TensorView& rows, std::int64_t row) {
  std::int64_t offset = row * rows.row_stride_bytes();
  if (rows.num_dims == 3) {
    const std::int64_t inner = rows.shape[1];
    offset = (row / inner * rows.strides[0] + row % inner * rows.strides[1]) * size_of(rows.dtype);
  }
  return static_cast<const std::byte*>(rows.data) + offset;
}

void stage_row(const TensorView& rows, std::int64_t row, Dtype wire, std::byte* to, bool stream) {
  const std::byte* from = expert_row(rows, row);
  const std::int64_t hidden = hidden_of(rows);
  if (wire != rows.dtype) {
    cast_row(to, wire, from, rows.dtype, hidden);
  } else if (from != to) {
    copy_row(to, from, hidden * size_of(rows.dtype), stream);
  }
}

}  // namespace tokenyard::engine::host
