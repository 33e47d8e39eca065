// SPDX-License-Identifier: Apache-2.0
// A dispatch's result against the plain reference, member by member.
#include <cstring>

#include "support/casts.h"
#include "support/check.h"
#include "support/round.h"

namespace tokenyard::support {
namespace {

void check_payload(const World& world,
                   const ExpectedDispatch& expected,
                   const TensorView& got,
                   Rows RankData::*payload,
                   const std::string& what) {
  for (const ExpectedRow& row : expected.rows) {
    const Rows& rows = world.rank(row.source).*payload;
    check_eq(last_dim_bytes(got), rows.row_bytes(), what + ", bytes of a row");
    check_bytes(row_of(got, row.position), rows.row(row.token), what + ", row " + std::to_string(row.position));
  }
}

// One payload of a result: given exactly when it was sent, with the right dtype and rows.
void check_member(const World& world,
                  const ExpectedDispatch& expected,
                  const TensorView& got,
                  Rows RankData::*payload,
                  const std::string& what) {
  const Rows& sent = world.rank(0).*payload;
  check_eq(got.defined(), sent.columns > 0, what + " is given");
  if (sent.columns == 0) return;
  check_eq(name(got.dtype), name(sent.dtype), what + ", dtype");
  check_eq(num_flat_rows(got), expected.total_rows, what + ", rows");
  check_payload(world, expected, got, payload, what);
}

void check_ids(
    const World& world, const ExpectedDispatch& expected, const TensorView& got, int rank, const Contract& contract) {
  const MoeParams& params = world.spec.params;
  check_eq(name(got.dtype), name(world.spec.id_dtype), "ids, dtype");
  check_eq(num_flat_rows(got), expected.total_rows, "ids, rows");
  const std::int64_t invalid = contract.id_space == IdSpace::kGlobal ? params.invalid_expert_id : -1;
  const std::vector<std::int64_t> unused(static_cast<std::size_t>(params.top_k), invalid);
  std::vector<bool> used(static_cast<std::size_t>(expected.total_rows), false);
  for (const ExpectedRow& row : expected.rows) {
    used[static_cast<std::size_t>(row.position)] = true;
    check_bytes(row_of(got, row.position),
                id_bytes(expect_ids(world, row, rank, contract.id_space), world.spec.id_dtype),
                "ids, row " + std::to_string(row.position));
  }
  for (std::int64_t position = 0; position < expected.total_rows; ++position) {
    if (used[static_cast<std::size_t>(position)]) continue;
    check_bytes(row_of(got, position), id_bytes(unused, world.spec.id_dtype),
                "ids of the unused row " + std::to_string(position));
  }
}

// Weights travel bit for bit; under local ids other ranks' slots and unused rows are zero.
void check_weights(
    const World& world, const ExpectedDispatch& expected, const TensorView& got, int rank, const Contract& contract) {
  if (contract.id_space != IdSpace::kLocal) {
    check_member(world, expected, got, &RankData::weights, "weights");
    return;
  }
  check_eq(got.defined(), world.spec.with_weights, "weights are given");
  if (!got.defined()) return;
  check_eq(name(got.dtype), name(world.spec.weight_dtype), "weights, dtype");
  check_eq(num_flat_rows(got), expected.total_rows, "weights, rows");
  const auto size = static_cast<std::size_t>(size_of(world.spec.weight_dtype));
  std::vector<std::byte> want(size * static_cast<std::size_t>(world.spec.params.top_k));
  for (const ExpectedRow& row : expected.rows) {
    std::memcpy(want.data(), world.rank(row.source).weights.row(row.token).data(), want.size());
    const std::vector<std::int64_t> ids = expect_ids(world, row, rank, contract.id_space);
    for (std::size_t slot = 0; slot < ids.size(); ++slot) {
      if (ids[slot] < 0) std::memset(want.data() + slot * size, 0, size);
    }
    check_bytes(row_of(got, row.position), want, "weights, row " + std::to_string(row.position));
  }
  std::fill(want.begin(), want.end(), std::byte{0});
  for (std::int64_t row = std::ssize(expected.rows); row < expected.total_rows; ++row) {
    check_bytes(row_of(got, row), want, "weights of the tail row " + std::to_string(row));
  }
}

void check_counts(const ExpectedDispatch& expected,
                  const RowCounts& counts,
                  const Contract& contract,
                  const RoundPlan& plan,
                  bool with_ids) {
  check_eq(counts.num_rows, expected.num_received, "counts.num_rows");
  check_eq(counts.dropped_rows, expected.dropped_rows, "counts.dropped_rows");
  check_lists_eq(counts.tokens_per_source, expected.tokens_per_source, "counts.tokens_per_source");
  if (expected.dropped_rows > 0) return;  // the contract does not say whether these count dropped rows
  check_lists_eq(counts.rows_per_source, expected.rows_per_source, "counts.rows_per_source");
  // Without ids the contract does not promise counts per expert.
  if (contract.id_space == IdSpace::kCargo || !with_ids) return;
  check_lists_eq(counts.rows_per_expert, expected.rows_per_expert, "counts.rows_per_expert");
  if (!contract.takes_expert_alignment) return;
  std::vector<std::int64_t> aligned = expected.rows_per_expert;
  for (std::int64_t& rows : aligned) {
    rows = (rows + plan.expert_alignment - 1) / plan.expert_alignment * plan.expert_alignment;
  }
  check_lists_eq(counts.aligned_rows_per_expert, aligned, "counts.aligned_rows_per_expert");
}

void check_extras(const World& world, const ExpectedDispatch& expected, const DispatchResult& result) {
  check_eq(result.extra_payloads.size(), world.spec.extra_row_bytes.size(), "number of extra payloads");
  for (std::size_t i = 0; i < result.extra_payloads.size(); ++i) {
    const std::string what = "extra payload " + std::to_string(i);
    const TensorView& got = result.extra_payloads[i];
    check_eq(name(got.dtype), name(world.rank(0).extras[i].dtype), what + ", dtype");
    check_eq(num_flat_rows(got), expected.total_rows, what + ", rows");
    for (const ExpectedRow& row : expected.rows) {
      check_bytes(row_of(got, row.position), world.rank(row.source).extras[i].row(row.token),
                  what + ", row " + std::to_string(row.position));
    }
  }
}

void check_eplb(const World& world, const TensorView& got) {
  check_eq(got.defined(), world.spec.eplb_entries > 0, "eplb statistics are given");
  if (!got.defined()) return;
  check_eq(num_flat_rows(got), std::int64_t{world.spec.num_ranks}, "eplb statistics, rows");
  for (int rank = 0; rank < world.spec.num_ranks; ++rank) {
    check_bytes(row_of(got, rank), std::as_bytes(std::span(world.rank(rank).eplb)),
                "eplb statistics of rank " + std::to_string(rank));
  }
}

void check_experts(const Communication& communication,
                   const World& world,
                   const ExpectedDispatch& expected,
                   const DispatchResult& result) {
  check(!result.topk_ids.defined() && !result.topk_weights.defined(), "expert-major results show no ids and weights");
  const std::vector<std::int64_t> blocks = blocks_of(communication, expected);
  check_eq(result.hidden_states.num_dims, 3, "dimensions of expert-major rows");
  check_eq(result.hidden_states.shape[0], blocks[0], "blocks");
  check_eq(result.hidden_states.shape[1], blocks[1], "rows of a block");
  check_eq(num_flat_rows(result.source_tokens) * result.source_tokens.shape[1], expected.total_rows, "source tokens");
  for (const ExpectedRow& row : expected.rows) {
    check_eq(std::int64_t{result.source_tokens.as<const std::int32_t>()[row.position]}, row.token,
             "source token of row " + std::to_string(row.position));
  }
  const std::vector<std::int32_t> ranges = expect_source_ranges(world, expected);
  const auto* got = result.source_ranges.as<const std::int32_t>();
  check_lists_eq(std::vector<std::int32_t>(got, got + ranges.size()), ranges, "source ranges");
}

}  // namespace

std::vector<std::int64_t> blocks_of(const Communication& communication, const ExpectedDispatch& expected) {
  const auto blocked = [&](std::int64_t blocks, std::int64_t rows) { return std::vector<std::int64_t>{blocks, rows}; };
  switch (communication.contract().output_layout) {
    case OutputLayout::kRankMajor:
      return blocked(communication.num_ranks(), expected.total_rows / communication.num_ranks());
    case OutputLayout::kExpertMajor:
      return blocked(std::ssize(expected.rows_per_expert),
                     std::int64_t{communication.num_ranks()} * communication.params().max_tokens_per_rank);
    default:
      return {};
  }
}

void check_result(const Communication& communication,
                  const World& world,
                  const RoundPlan& plan,
                  const DispatchResult& result,
                  bool with_ids) {
  const Contract& contract = communication.contract();
  const ExpectedDispatch expected = expect_dispatch(world, communication.rank(), layout_rule(communication, plan));
  const World cast = plan.cast == DispatchCast::kNone ? World() : with_cast(world, plan.cast);
  const World& rows = plan.cast == DispatchCast::kNone ? world : cast;
  check_member(rows, expected, result.hidden_states, &RankData::hidden, "hidden states");
  check_member(rows, expected, result.hidden_states_scale, &RankData::scale, "scales");
  check_member(world, expected, result.router_logits, &RankData::router_logits, "router logits");
  check_extras(world, expected, result);
  check_eplb(world, result.eplb_gathered_stats);
  if (contract.output_layout == OutputLayout::kExpertMajor) {
    check_experts(communication, world, expected, result);
  } else if (with_ids) {
    check_ids(world, expected, result.topk_ids, communication.rank(), contract);
    check_weights(world, expected, result.topk_weights, communication.rank(), contract);
  }
  check_counts(expected, result.counts, contract, plan, with_ids);
  if (contract.output_layout == OutputLayout::kRankMajor) {
    const std::int64_t tokens = layout_rule(communication, plan).tokens_per_rank;
    check_eq(result.counts.tokens_per_rank, tokens, "counts.tokens_per_rank");
    check_eq(result.hidden_states.num_dims, 3, "dimensions of rank-major rows");
    check_eq(result.hidden_states.shape[0], std::int64_t{communication.num_ranks()}, "blocks");
    check_eq(result.hidden_states.shape[1], tokens, "rows of a block");
  }
}

}  // namespace tokenyard::support
