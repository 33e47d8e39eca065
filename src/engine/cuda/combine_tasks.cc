// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/combine_tasks.h"

#include <algorithm>

#include "engine/cuda/access_unit.h"

namespace tokenyard::engine::cuda {

CombineTask combine_task(const CombineRequest& request, Dtype wire, bool in_place) {
  const TensorView& rows = request.expert_output;
  CombineTask task;
  task.hidden = hidden_of(rows);
  task.from_dtype = rows.dtype;
  task.rows_dtype = wire;
  task.row_bytes = task.hidden * size_of(wire);
  task.staged = wire != rows.dtype || !in_place;
  task.from = static_cast<const std::byte*>(rows.data);
  task.from_row_stride = rows.strides[rows.num_dims == 3 ? 1 : 0] * size_of(rows.dtype);
  task.ends_views = request.ends_views;
  task.reads_views = request.reads_views;
  task.receives = request.in_one_call;
  return task;
}

std::uint64_t add_target(const CombineTarget& target, CombineTask& task) {
  const TensorView& output = target.output;
  task.output = static_cast<std::byte*>(output.data);
  task.output_stride = output.row_stride_bytes();
  task.output_dtype = output.dtype;
  std::uint64_t all = bits_of(output.data) | bits_of(task.output_stride);
  for (std::size_t i = 0; i < target.bias.size(); ++i) {
    if (!target.bias[i].defined()) continue;
    task.bias[i] = static_cast<const std::byte*>(target.bias[i].data);
    task.bias_stride[i] = target.bias[i].row_stride_bytes();
    all |= bits_of(task.bias[i]) | bits_of(task.bias_stride[i]);
  }
  return all;
}

bool in_vectors(const CombineTask& task, std::uint64_t places) {
  const std::int64_t wider = std::max(size_of(task.rows_dtype), size_of(task.output_dtype));
  return unit_of(places) == 16 && task.hidden % (16 / wider) == 0;
}

}  // namespace tokenyard::engine::cuda
