// SPDX-License-Identifier: Apache-2.0
// What a caller may pass to dispatch and to the combine after it: views with any shape, strides, dtype and pointer, and
// any options, on a communication of one rank. Wrong ones are an Error; right ones give exactly the rows that were
// sent, cast or not; nothing outside a tensor is read or written, which the address sanitizer watches; and after every
// call a good round works.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tokenyard/communication.h"

#include "fuzz/dispatch_call.h"
#include "fuzz/input.h"
#include "fuzz/target.h"
#include "support/backends.h"
#include "support/casts.h"
#include "support/check.h"
#include "support/round.h"
#include "support/world.h"
#include "unit/block_cast_reference.h"

namespace tokenyard::fuzz {
namespace {

using support::check;
using support::check_eq;

constexpr std::array<std::string_view, 5> kBackends{"all_gather", "high_throughput", "one_sided", "low_latency",
                                                    "two_sided"};

struct Rank {
  support::World world;
  Communication communication;
  DispatchResult result;  // of the good rounds
};

std::unique_ptr<Rank> make_rank(std::string_view backend, DispatchFormat format) {
  const Contract& contract = find_backend(backend).contract;
  support::WorldSpec spec{.params = {.num_experts = contract.num_experts_multiple_of > 1 ? 8 : 5,
                                     .top_k = 3,
                                     .hidden_size = 20,
                                     .max_tokens_per_rank = kMaxTokens,
                                     .dispatch_format = format},
                          .num_tokens = {4}};
  if (support::takes_extras(contract)) spec.extra_row_bytes = {kExtraBytes};
  if (contract.takes_eplb_stats) spec.eplb_entries = spec.params.num_experts;
  return std::make_unique<Rank>(
      Rank{.world = support::make_world(spec),
           .communication = support::communication_for(Group::in_process(1).front(), backend, spec),
           .result = {}});
}

std::vector<std::unique_ptr<Rank>>& all_ranks() {
  static std::vector<std::unique_ptr<Rank>> all = [] {
    std::vector<std::unique_ptr<Rank>> made;
    for (const std::string_view backend : kBackends) {
      made.push_back(make_rank(backend, DispatchFormat::kNone));
      made.push_back(make_rank(backend, DispatchFormat::kFp8Block128));
    }
    return made;
  }();
  return all;
}

std::int64_t id_at(const TensorView& ids, std::int64_t row, std::int64_t slot) {
  const auto* bytes = ids.as<const std::byte>() + (row * ids.strides[0] + slot * ids.strides[1]) * size_of(ids.dtype);
  std::int64_t wide = 0;
  std::int32_t narrow = 0;
  ids.dtype == Dtype::kI64 ? std::memcpy(&wide, bytes, sizeof wide) : std::memcpy(&narrow, bytes, sizeof narrow);
  return ids.dtype == Dtype::kI64 ? wide : narrow;
}

bool travels(const Call& call, std::int64_t token) {
  bool live = false;
  for (std::int64_t slot = 0; slot < call.input.topk_ids.shape[1]; ++slot)
    live = live || id_at(call.input.topk_ids, token, slot) >= 0;
  return live;
}

std::int64_t picks_of(const Call& call, std::int64_t token, std::int64_t expert) {
  std::int64_t picks = 0;
  for (std::int64_t slot = 0; slot < call.input.topk_ids.shape[1]; ++slot)
    picks += id_at(call.input.topk_ids, token, slot) == expert ? 1 : 0;
  return picks;
}

// One row of the result: the bytes that were sent, or what the cast's definition makes of them.
void check_row(const Call& call, const DispatchResult& result, std::int64_t token, std::int64_t place) {
  const TensorView& sent = call.input.hidden_states;
  const std::byte* from = sent.as<const std::byte>() + token * sent.row_stride_bytes();
  const std::string what = "row " + std::to_string(place);
  if (call.options.cast == DispatchCast::kNone) {
    return support::check_bytes(support::row_of(result.hidden_states, place),
                                {from, static_cast<std::size_t>(sent.row_bytes())}, what);
  }
  std::vector<float> values;
  for (std::int64_t column = 0; column < sent.shape[1]; ++column)
    values.push_back(support::load(sent.dtype, from, column));
  const reference::CastRow cast = reference::cast_row(values, call.options.cast);
  support::check_bytes(support::row_of(result.hidden_states, place), cast.values, what);
  support::check_bytes(support::row_of(result.hidden_states_scale, place), cast.scales, what + ", scales");
}

// The rows that a rank that is alone must get: in order, those of tokens with an expert, or all.
void check_rows_came(const Communication& communication, const Call& call, const DispatchResult& result) {
  const Contract& contract = communication.contract();
  const bool routed = contract.id_space != IdSpace::kCargo;
  const bool rank_major = contract.output_layout == OutputLayout::kRankMajor;
  const std::int64_t tokens = call.input.hidden_states.shape[0];
  std::int64_t row = 0;
  for (std::int64_t token = 0; token < tokens; ++token) {
    if (routed && !travels(call, token)) continue;
    const std::int64_t place = rank_major ? token : row;
    ++row;
    if (row > result.counts.num_rows) continue;  // beyond num_worst_tokens
    check_row(call, result, token, place);
  }
  const std::int64_t rows = call.options.num_worst_tokens.value_or(row);
  check(rank_major || result.hidden_states.shape[0] == rows, "the result is " + result.hidden_states.describe());
  check_eq(result.counts.num_rows + result.counts.dropped_rows, row, "rows of the result");
}

// The same by expert: in each block the tokens that chose the expert, in order.
void check_experts_came(const Communication& communication, const Call& call, const DispatchResult& result) {
  const std::int64_t tokens = call.input.hidden_states.shape[0];
  std::int64_t travelled = 0;
  for (std::int64_t token = 0; token < tokens; ++token)
    travelled += travels(call, token) ? 1 : 0;
  check_eq(result.counts.num_rows, travelled, "rows of the result");
  for (std::int64_t expert = 0; expert < communication.params().num_experts; ++expert) {
    std::int64_t row = 0;
    for (std::int64_t token = 0; token < tokens; ++token) {
      if (picks_of(call, token, expert) == 0) continue;
      const std::int64_t place = expert * kMaxTokens + row++;
      check_row(call, result, token, place);
      check_eq(result.source_tokens.as<const std::int32_t>()[place], token, "token of row " + std::to_string(place));
    }
    check_eq(result.counts.rows_per_expert.at(static_cast<std::size_t>(expert)), row, "rows of an expert");
    const auto* range = result.source_ranges.as<const std::int32_t>() + expert * 2;
    check(range[0] == 0 && range[1] == row, "range of the source in block " + std::to_string(expert));
  }
}

std::vector<std::int32_t> numbers_in(const TensorView& list) {
  if (list.num_dims != 1) return {};
  const auto* first = list.as<const std::int32_t>();
  return {first, first + list.shape[0]};
}

void check_routes_counted(const Call& call, const std::vector<std::int32_t>& before) {
  const std::vector<std::int32_t> after = numbers_in(call.options.routes_per_expert);
  for (std::size_t expert = 0; expert < before.size(); ++expert) {
    std::int64_t wanted = before[expert];
    for (std::int64_t token = 0; token < call.input.hidden_states.shape[0]; ++token)
      wanted += picks_of(call, token, static_cast<std::int64_t>(expert));
    check_eq(after[expert], std::min<std::int64_t>(wanted, 0x7FFF'FFFF), "routes to expert " + std::to_string(expert));
  }
}

void check_statistics_gathered(const Call& call, const DispatchResult& result) {
  const TensorView& sent = call.input.eplb_local_stats;
  check_eq(result.eplb_gathered_stats.num_elements(), sent.num_elements(), "entries of statistics");
  if (sent.num_elements() == 0) return;
  support::check_bytes(result.eplb_gathered_stats.as<const std::byte>(),
                       {sent.as<const std::byte>(), static_cast<std::size_t>(sent.num_elements() * 4)}, "statistics");
}

void check_kind(const Error& error) {
  const ErrorCode code = error.code();
  check(code == ErrorCode::kInvalidArgument || code == ErrorCode::kCapacity || code == ErrorCode::kInvalidState,
        "an Error of another kind: " + std::string(name(code)) + ": " + error.what());
}

// Whether a round is open afterwards.
bool dispatch(Communication& communication, Call& call, DispatchResult& result) {
  const bool list = !call.wrong && call.options.routes_per_expert.dtype == Dtype::kI32;
  const std::vector<std::int32_t> routes =
      list ? numbers_in(call.options.routes_per_expert) : std::vector<std::int32_t>();
  try {
    const Status status = communication.dispatch(call.input, call.options, result);
    check(!call.wrong, "a dispatch takes what is wrong");
    check(status.ok() || status.code == StatusCode::kOverflow, "a rank that is alone waits: " + status.message());
    if (!status.ok()) return false;
  } catch (const Error& error) {
    check_kind(error);
    return false;
  }
  check_eq(result.counts.tokens_per_source.at(0), call.input.hidden_states.shape[0], "tokens of the source");
  const bool by_expert = communication.contract().output_layout == OutputLayout::kExpertMajor;
  by_expert ? check_experts_came(communication, call, result) : check_rows_came(communication, call, result);
  if (by_expert) check_routes_counted(call, routes);
  check_statistics_gathered(call, result);
  return true;
}

void combine(Input& input, Communication& communication, const Call& call, DispatchResult& result) {
  CombineCall combined;
  draw_combine(input, communication, call, result, combined);
  TensorView output = combined.output.view;
  try {
    const Status status = communication.combine(result.handle, combined.input, {}, output);
    check(!combined.wrong, "a combine takes what is wrong");
    check(status.ok(), "a rank that is alone waits: " + status.message());
  } catch (const Error& error) {
    check_kind(error);
  }
}

}  // namespace

void run_target(std::span<const std::byte> bytes) {
  Input input(bytes);
  auto& ranks = all_ranks();
  Rank& rank = *ranks[static_cast<std::size_t>(input.below(std::ssize(ranks)))];
  Call call;
  draw_call(input, rank.communication, call);
  DispatchResult result;
  if (dispatch(rank.communication, call, result)) combine(input, rank.communication, call, result);
  result.handle = Handle();
  (void)support::play_round(rank.communication, rank.world, {}, rank.result);
}

}  // namespace tokenyard::fuzz
