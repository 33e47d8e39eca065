// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_volume.h"

#include <algorithm>
#include <map>

#include "protocol/block_cast.h"

namespace tokenyard::cli {
namespace {

// Of `source`'s tokens that have an expert of `owner`.
std::int64_t rows_between(const BenchJob& job, const Contract& contract, int source, int owner) {
  if (contract.output_layout == OutputLayout::kEveryRank) return job.shape.num_tokens;
  const std::vector<std::int32_t>& ids = job.ids[static_cast<std::size_t>(source)];
  std::int64_t rows = 0;
  for (std::int64_t token = 0; token < job.shape.num_tokens; ++token) {
    const auto first = ids.begin() + static_cast<std::ptrdiff_t>(token * job.shape.top_k);
    rows += std::any_of(first, first + job.shape.top_k,
                        [&](std::int32_t id) { return bench_owner(job.shape, id) == owner; });
  }
  return rows;
}

std::int64_t dispatched_row_bytes(const BenchJob& job) {
  const std::int64_t routing = std::int64_t{job.shape.top_k} * 8;
  if (job.rows == BenchRows::kPlain) return job.shape.hidden_size * size_of(job.dtype) + routing;
  const protocol::RowBytes row = protocol::cast_row_bytes(DispatchCast::kFp8Block128, job.shape.hidden_size);
  return row.values + row.scales + routing;
}

// Calls `add(source, owner, rows)` for every two ranks.
template <class Add>
void for_each_pair(const BenchJob& job, const Contract& contract, const Add& add) {
  for (int source = 0; source < job.shape.num_ranks; ++source) {
    for (int owner = 0; owner < job.shape.num_ranks; ++owner) {
      if (owner != source) add(source, owner, rows_between(job, contract, source, owner));
    }
  }
}

std::int64_t most(const std::map<int, std::int64_t>& rows_of_device) {
  std::int64_t rows = 0;
  for (const auto& [device, of_device] : rows_of_device)
    rows = std::max(rows, of_device);
  return rows;
}

BenchVolume volume_of(const BenchJob& job, std::int64_t rows) {
  return {.dispatch_bytes = rows * dispatched_row_bytes(job),
          .combine_bytes = rows * job.shape.hidden_size * size_of(job.dtype)};
}

}  // namespace

BenchVolume volume_between_ranks(const BenchJob& job, const Contract& contract) {
  std::int64_t rows = 0;
  for_each_pair(job, contract, [&](int /*source*/, int /*owner*/, std::int64_t between) { rows += between; });
  return volume_of(job, rows);
}

// Combine's rows go the other way along the same paths, so the largest of both directions is one number of rows.
BenchVolume volume_per_direction(const BenchJob& job, const Contract& contract) {
  std::map<int, std::int64_t> out;
  std::map<int, std::int64_t> in;
  for_each_pair(job, contract, [&](int source, int owner, std::int64_t between) {
    if (job.engine.device_of(source) == job.engine.device_of(owner)) return;
    out[job.engine.device_of(source)] += between;
    in[job.engine.device_of(owner)] += between;
  });
  return volume_of(job, std::max(most(out), most(in)));
}

}  // namespace tokenyard::cli
