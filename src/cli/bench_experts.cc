// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_experts.h"

#include <algorithm>
#include <span>

#include "cli/row_access.h"
#include "protocol/block_cast.h"

namespace tokenyard::cli {
namespace {

// The rows of one block, [rows, columns].
TensorView block_of(const TensorView& view, std::int64_t block, std::int64_t num_rows) {
  if (view.num_dims == 2) return view.rows(0, num_rows);
  TensorView rows = view;
  rows.data = view.as<std::byte>() + block * view.strides[0] * size_of(view.dtype);
  rows.num_dims = 2;
  rows.shape = {num_rows, view.shape[2]};
  rows.strides = {view.strides[1], view.strides[2]};
  return rows;
}

}  // namespace

// The largest magnitude of a block is 1, so that its scale is 1 / 448 and its codes are values times 448.
BenchExperts::BenchExperts(const BenchJob& job, int rank)
    : job_(job),
      rank_(rank),
      received_bytes_(job.shape, job.rows == BenchRows::kPlain ? job.dtype : Dtype::kF8e4m3),
      expert_bytes_(job.shape, job.dtype) {}

void BenchExperts::run(RankDevice& device,
                       const Communication& communication,
                       const DispatchResult& received,
                       TensorView output) {
  const float code = job_.rows == BenchRows::kPlain ? 1.0F : protocol::kLargestF8e4m3;
  const TensorView& input = received.hidden_states;
  for (const Part& part : parts(communication)) {
    if (part.rows.empty()) continue;
    const std::int64_t count = part.rows.back().at + 1;
    const RowAccess in(device.load(block_of(input, part.block, count)));
    const TensorView to = block_of(output, part.block, count);
    const RowAccess out(device.host_side(to));
    for (const Row& row : part.rows) {
      received_bytes_.require(in.row<const std::byte>(row.at), row.from, code, "a row that dispatch brought");
      std::ranges::copy(expert_bytes_.row(row.from, row.factor), out.row<std::byte>(row.at));
    }
    device.store(to);
  }
}

void BenchExperts::require_sums(const TensorView& sums) {
  const std::vector<std::int32_t>& ids = job_.ids[static_cast<std::size_t>(rank_)];
  const RowAccess rows(sums);
  for (std::int64_t token = 0; token < job_.shape.num_tokens; ++token) {
    expert_bytes_.require(rows.row<const std::byte>(token), {rank_, token},
                          bench_total_factor(ids, job_.shape.top_k, token), "a sum that combine gave");
  }
}

std::vector<BenchExperts::Part> BenchExperts::parts(const Communication& communication) const {
  switch (communication.contract().output_layout) {
    case OutputLayout::kExpertMajor:
      return parts_by_expert(communication);
    case OutputLayout::kRankMajor:
      return parts_by_source(false, false);
    case OutputLayout::kEveryRank:
      return parts_by_source(true, true);
    default:
      return parts_by_source(true, false);
  }
}

// Row by row in the order of (source, token): one behind the other, or each at its token's index.
std::vector<BenchExperts::Part> BenchExperts::parts_by_source(bool compact, bool rows_of_others) const {
  std::vector<Part> parts;
  for (int source = 0; source < job_.shape.num_ranks; ++source) {
    if (parts.empty() || !compact) parts.push_back({.block = source});
    std::vector<Row>& rows = parts.back().rows;
    for (std::int64_t token = 0; token < job_.shape.num_tokens; ++token) {
      const float factor = own_factor({source, token});
      if (factor == 0 && !rows_of_others) continue;
      rows.push_back({compact ? std::ssize(rows) : token, {source, token}, factor});
    }
  }
  return parts;
}

// In the order of (source, token) for each expert.
std::vector<BenchExperts::Part> BenchExperts::parts_by_expert(const Communication& communication) const {
  const MoeParams& params = communication.params();
  const int first = first_local_expert(params, rank_, job_.shape.num_ranks);
  std::vector<Part> parts(static_cast<std::size_t>(num_local_experts(params, rank_, job_.shape.num_ranks)));
  for (std::size_t i = 0; i < parts.size(); ++i)
    parts[i].block = static_cast<std::int64_t>(i);
  for (int source = 0; source < job_.shape.num_ranks; ++source) {
    const std::vector<std::int32_t>& ids = job_.ids[static_cast<std::size_t>(source)];
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (bench_owner(job_.shape, ids[i]) != rank_) continue;
      std::vector<Row>& rows = parts[static_cast<std::size_t>(ids[i] - first)].rows;
      rows.push_back(
          {std::ssize(rows), {source, static_cast<std::int64_t>(i) / job_.shape.top_k}, bench_factor(ids[i])});
    }
  }
  return parts;
}

// What this rank's experts multiply the token by.
float BenchExperts::own_factor(const BenchToken& token) const {
  const std::vector<std::int32_t>& ids = job_.ids[static_cast<std::size_t>(token.rank)];
  float factor = 0;
  for (int slot = 0; slot < job_.shape.top_k; ++slot) {
    const std::int32_t id = ids[static_cast<std::size_t>(token.token * job_.shape.top_k + slot)];
    if (bench_owner(job_.shape, id) == rank_) factor += bench_factor(id);
  }
  return factor;
}

}  // namespace tokenyard::cli
