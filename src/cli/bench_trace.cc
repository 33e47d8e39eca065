// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_trace.h"

#include <fmt/format.h>

#include <cstddef>

#include "tokenyard/error.h"
#include "tokenyard/tensor.h"

#include "cli/safetensors.h"

namespace tokenyard::cli {

std::vector<std::vector<std::int32_t>> trace_ids(const std::string& file, const BenchShape& shape) {
  const Safetensors tokens = Safetensors::load(file);
  const StoredTensor& ids = tokens.at("topk_ids");
  const auto values = static_cast<std::int64_t>(ids.bytes.size()) / size_of(ids.dtype);
  const std::int64_t wanted = shape.num_ranks * shape.num_tokens * shape.top_k;
  if (ids.shape.empty() || ids.shape.back() != shape.top_k || values < wanted ||
      (ids.dtype != Dtype::kI64 && ids.dtype != Dtype::kI32)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the trace has {} picks of {} in rows of {}; {} in rows of top_k = {} are needed", values,
                            name(ids.dtype), ids.shape.empty() ? 0 : ids.shape.back(), wanted, shape.top_k));
  }
  std::vector<std::vector<std::int32_t>> picks(static_cast<std::size_t>(shape.num_ranks));
  std::int64_t next = 0;
  for (auto& of_rank : picks) {
    for (std::int64_t i = 0; i < shape.num_tokens * shape.top_k; ++i, ++next) {
      const std::int64_t id = ids.dtype == Dtype::kI64 ? reinterpret_cast<const std::int64_t*>(ids.bytes.data())[next]
                                                       : reinterpret_cast<const std::int32_t*>(ids.bytes.data())[next];
      if (id < 0 || id >= shape.num_experts) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("the trace picks expert {}; there are {} (--num-experts)", id, shape.num_experts));
      }
      of_rank.push_back(static_cast<std::int32_t>(id));
    }
  }
  return picks;
}

}  // namespace tokenyard::cli
