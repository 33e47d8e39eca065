// SPDX-License-Identifier: Apache-2.0
#include "cases/static_shape_rank.h"

#include <cstring>

#include "support/casts.h"

namespace tokenyard::support {
namespace {

constexpr int kTokens = 8;
constexpr int kTopK = 2;
constexpr int kHidden = 24;
constexpr std::int64_t kExperts = 6 * 2;  // a multiple of four and of the ranks

// The weighted identity of one row on one rank.
std::vector<std::byte> own_share(const World& world, const ExpectedRow& row, int rank) {
  std::vector<std::byte> bytes(kHidden * sizeof(float));
  const RankData& data = world.rank(row.source);
  for (std::int64_t column = 0; column < kHidden; ++column) {
    float sum = 0.0F;
    for (int slot = 0; slot < kTopK; ++slot) {
      if (owner_of(world.id(row.source, row.token, slot), world.spec.params, world.spec.num_ranks) != rank) continue;
      sum += load(Dtype::kF32, data.weights.row(row.token).data(), slot) *
             load(Dtype::kF32, data.hidden.row(row.token).data(), column);
    }
    store(Dtype::kF32, bytes.data(), column, sum);
  }
  return bytes;
}

// All experts' shares of this rank's tokens. Values and weights are such that no sum rounds.
std::vector<std::byte> expected_y(const World& world, int rank) {
  const RankData& data = world.rank(rank);
  std::vector<std::byte> y(data.hidden.bytes.size());
  for (std::int64_t token = 0; token < data.num_tokens; ++token) {
    for (std::int64_t column = 0; column < kHidden; ++column) {
      float sum = 0.0F;
      for (int slot = 0; slot < kTopK; ++slot) {
        if (world.id(rank, token, slot) < 0) continue;
        sum += load(Dtype::kF32, data.weights.row(token).data(), slot) *
               load(Dtype::kF32, data.hidden.row(token).data(), column);
      }
      store(Dtype::kF32, y.data(), token * kHidden + column, sum);
    }
  }
  return y;
}

void copy_rows(const Tensor& to, const std::vector<std::byte>& from) {
  if (!from.empty()) std::memcpy(to.row(0), from.data(), from.size());
}

}  // namespace

World static_world(std::int64_t replay) {
  CaseWorld made;
  made.params = {.num_experts = kExperts,
                 .top_k = kTopK,
                 .hidden_size = kHidden,
                 .max_tokens_per_rank = kTokens,
                 .dtype = Dtype::kF32};
  for (std::int64_t rank = 0; rank < kStaticRanks; ++rank) {
    IdTable table;
    const bool empty = replay % 4 == 3 && rank == replay / 4 % kStaticRanks;
    const std::int64_t tokens = empty ? 0 : kTokens - (replay + rank) % 3;
    for (std::int64_t token = 0; token < tokens; ++token) {
      std::vector<std::int64_t> row{(2 * token + rank + replay) % kExperts, (5 * token + 3 * rank + 1) % kExperts};
      if (replay % 4 == 1) row = {replay % kExperts, (replay + 1) % kExperts};  // all to one or two ranks
      if (replay % 4 == 2 && token % 2 == 1) row = {-1, -1};
      if (row[0] == row[1]) row[1] = -1;
      table.push_back(row);
    }
    made.ids.push_back(table);
    made.weights.emplace_back(table.size(), std::vector<float>{0.5F, 0.25F});
  }
  World world = made.make();
  for (RankData& data : world.ranks) {
    for (std::int64_t i = 0; i < data.num_tokens * kHidden; ++i) {
      const float value = load(Dtype::kF32, data.hidden.bytes.data(), i);
      store(Dtype::kF32, data.hidden.bytes.data(), i, value + 64 * static_cast<float>(replay + 1));
    }
  }
  return world;
}

StaticShapeRank::StaticShapeRank(const Group& group, std::string_view backend, std::int64_t num_replays)
    : communication_(communication_for(group, backend, static_world(0).spec)),
      hidden_(Dtype::kF32, {kTokens, kHidden}),
      ids_(Dtype::kI64, {kTokens, kTopK}),
      weights_(Dtype::kF32, {kTokens, kTopK}),
      expert_output_(Dtype::kF32, {kStaticRanks, kTokens, kHidden}, {.poison = kNanPoison}),
      output_(Dtype::kF32, {kTokens, kHidden}) {
  for (std::int64_t replay = 0; replay < num_replays; ++replay)
    prepared_.push_back(prepare(static_world(replay)));
}

StaticShapeRank::Prepared StaticShapeRank::prepare(const World& world) const {
  const int rank = communication_.rank();
  const RankData& data = world.rank(rank);
  Prepared prepared{.num_tokens = data.num_tokens,
                    .hidden = data.hidden.bytes,
                    .ids = id_bytes(data.ids, Dtype::kI64),
                    .weights = data.weights.bytes,
                    .y = expected_y(world, rank)};
  for (const ExpectedRow& row : expect_dispatch(world, rank, layout_rule(communication_, {})).rows)
    prepared.expert_rows.push_back({.position = row.position, .bytes = own_share(world, row, rank)});
  return prepared;
}

void StaticShapeRank::load(std::int64_t index) {
  const Prepared& prepared = prepared_[static_cast<std::size_t>(index)];
  num_tokens_ = prepared.num_tokens;
  copy_rows(hidden_, prepared.hidden);
  copy_rows(ids_, prepared.ids);
  copy_rows(weights_, prepared.weights);
}

bool StaticShapeRank::dispatch(DispatchResult& result) {
  const DispatchInput input{.hidden_states = hidden_.view().rows(0, num_tokens_),
                            .topk_ids = ids_.view().rows(0, num_tokens_),
                            .topk_weights = weights_.view().rows(0, num_tokens_)};
  return communication_.dispatch(input, {}, result).ok();
}

bool StaticShapeRank::replay(std::int64_t index, DispatchResult& result) {
  load(index);
  if (!dispatch(result)) return false;
  for (const Placed& row : prepared_[static_cast<std::size_t>(index)].expert_rows)
    std::memcpy(expert_output_.row(row.position), row.bytes.data(), row.bytes.size());
  TensorView output = output_.view().rows(0, num_tokens_);
  return communication_.combine(result.handle, {.expert_output = expert_output_.view()}, {}, output).ok();
}

bool StaticShapeRank::output_is_right(std::int64_t index) const {
  const std::vector<std::byte>& y = prepared_[static_cast<std::size_t>(index)].y;
  return y.empty() || std::memcmp(output_.row(0), y.data(), y.size()) == 0;
}

}  // namespace tokenyard::support
