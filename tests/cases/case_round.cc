// SPDX-License-Identifier: Apache-2.0
#include "cases/case_round.h"

#include <cstring>

#include "support/casts.h"

namespace tokenyard::support {
namespace {

float expert_factor(std::int64_t expert, Experts experts) {
  return experts == Experts::kIdentity ? 1.0F : static_cast<float>(expert + 1);
}

std::int64_t id_at(const TensorView& ids, std::int64_t row, int slot) {
  const std::byte* bytes = row_of(ids, row) + slot * size_of(ids.dtype);
  if (ids.dtype == Dtype::kI64) {
    std::int64_t id = 0;
    std::memcpy(&id, bytes, sizeof id);
    return id;
  }
  std::int32_t id = 0;
  std::memcpy(&id, bytes, sizeof id);
  return id;
}

// Weighted sum of this rank's experts for one received row.
void apply_experts(const Communication& communication,
                   const DispatchResult& result,
                   std::int64_t row,
                   Experts experts,
                   std::vector<float>& sums) {
  const MoeParams& params = communication.params();
  const bool local = communication.contract().id_space == IdSpace::kLocal;
  std::fill(sums.begin(), sums.end(), 0.0F);
  for (int slot = 0; slot < params.top_k; ++slot) {
    std::int64_t expert = id_at(result.topk_ids, row, slot);
    if (local && expert >= 0) expert += first_expert_of(params, communication.rank(), communication.num_ranks());
    if (owner_of(expert, params, communication.num_ranks()) != communication.rank()) continue;
    const float weight = load(result.topk_weights.dtype, row_of(result.topk_weights, row), slot);
    for (std::size_t column = 0; column < sums.size(); ++column) {
      const float x = load(params.dtype, row_of(result.hidden_states, row), static_cast<std::int64_t>(column));
      sums[column] += weight * (expert_factor(expert, experts) * x);
    }
  }
}

// What one expert makes of one of its rows; weights are combine's affair.
void apply_expert(const Communication& communication,
                  const DispatchResult& result,
                  const ExpectedRow& row,
                  Experts experts,
                  std::vector<float>& sums) {
  const MoeParams& params = communication.params();
  const std::int64_t first = first_expert_of(params, communication.rank(), communication.num_ranks());
  for (std::size_t column = 0; column < sums.size(); ++column) {
    const std::byte* from = row_of(result.hidden_states, row.position);
    sums[column] =
        expert_factor(first + row.expert, experts) * load(params.dtype, from, static_cast<std::int64_t>(column));
  }
}

std::vector<std::byte> expected_output(const World& world, int rank, Dtype dtype, Experts experts) {
  const MoeParams& params = world.spec.params;
  const RankData& data = world.rank(rank);
  std::vector<std::byte> output(static_cast<std::size_t>(data.num_tokens * params.hidden_size * size_of(dtype)));
  for (std::int64_t token = 0; token < data.num_tokens; ++token) {
    for (std::int64_t column = 0; column < params.hidden_size; ++column) {
      float y = 0.0F;
      const float x = load(params.dtype, data.hidden.row(token).data(), column);
      for (int slot = 0; slot < params.top_k; ++slot) {
        const std::int64_t expert = world.id(rank, token, slot);
        if (expert < 0 || expert >= params.num_experts) continue;
        y += load(Dtype::kF32, data.weights.row(token).data(), slot) * (expert_factor(expert, experts) * x);
      }
      store(dtype, output.data(), token * params.hidden_size + column, y);
    }
  }
  return output;
}

RankData case_rank(const CaseWorld& world, int rank) {
  const auto at = static_cast<std::size_t>(rank);
  const IdTable& table = world.ids[at];
  RankData data{.num_tokens = std::ssize(table)};
  data.hidden = {.dtype = world.params.dtype, .columns = world.params.hidden_size};
  data.hidden.bytes.resize(static_cast<std::size_t>(data.num_tokens * data.hidden.row_bytes()));
  data.weights = {.dtype = Dtype::kF32, .columns = world.params.top_k};
  data.weights.bytes.resize(static_cast<std::size_t>(data.num_tokens * data.weights.row_bytes()));
  for (std::int64_t token = 0; token < data.num_tokens; ++token) {
    const std::vector<std::int64_t>& row = table[static_cast<std::size_t>(token)];
    check_eq(std::ssize(row), std::int64_t{world.params.top_k}, "slots of a case's token");
    data.ids.insert(data.ids.end(), row.begin(), row.end());
    for (std::int64_t column = 0; column < world.params.hidden_size; ++column) {
      store(world.params.dtype, data.hidden.bytes.data(), token * world.params.hidden_size + column,
            case_value(rank, token, column));
    }
    for (std::size_t slot = 0; slot < row.size(); ++slot) {
      const float live = row[slot] >= 0 && row[slot] < world.params.num_experts ? 1.0F : 0.0F;
      const float weight = world.weights.empty() ? live : world.weights[at][static_cast<std::size_t>(token)][slot];
      store(Dtype::kF32, data.weights.bytes.data(), token * world.params.top_k + static_cast<std::int64_t>(slot),
            weight);
    }
  }
  return data;
}

}  // namespace

World CaseWorld::make() const {
  World world{.spec = {.params = params, .num_ranks = static_cast<int>(ids.size()), .id_dtype = id_dtype}, .ranks = {}};
  for (int rank = 0; rank < world.spec.num_ranks; ++rank)
    world.ranks.push_back(case_rank(*this, rank));
  return world;
}

float case_value(int rank, std::int64_t token, std::int64_t column) {
  return static_cast<float>((37 * rank + 11 * token + column) % 61 - 30);
}

IdTable repeated(std::int64_t num_tokens, const std::vector<std::int64_t>& row) {
  IdTable table(static_cast<std::size_t>(num_tokens), row);
  return table;
}

void moe_round(
    Communication& communication, const World& world, const RoundPlan& plan, DispatchResult& result, Experts experts) {
  const MoeParams& params = communication.params();
  dispatch_and_check(communication, world, plan, result);
  const std::int64_t rows = num_flat_rows(result.hidden_states);
  Tensor expert_output(params.dtype, {rows, params.hidden_size}, {.poison = kNanPoison});
  std::vector<float> sums(static_cast<std::size_t>(params.hidden_size));
  const ExpectedDispatch expected = expect_dispatch(world, communication.rank(), layout_rule(communication, plan));
  for (const ExpectedRow& row : expected.rows) {  // the others stay NaN
    if (row.expert >= 0) {
      apply_expert(communication, result, row, experts, sums);
    } else {
      apply_experts(communication, result, row.position, experts, sums);
    }
    for (std::int64_t column = 0; column < params.hidden_size; ++column) {
      store(params.dtype, expert_output.row(row.position), column, sums[static_cast<std::size_t>(column)]);
    }
  }
  Tensor output(params.dtype, {world.rank(communication.rank()).num_tokens, params.hidden_size});
  TensorView view = output.view();
  check_ok(communication.combine(result.handle, {.expert_output = expert_output.view()}, {}, view), "combine");
  output.check_guards("the output of combine");
  check_elements(view, expected_output(world, communication.rank(), params.dtype, experts), "y");
}

void play_worlds(std::string_view backend, const std::vector<World>& worlds, const RoundPlan& plan, Experts experts) {
  run_ranks(worlds.front().spec.num_ranks, [&](const Group& group) {
    Communication communication = communication_for(group, backend, worlds.front().spec);
    DispatchResult result;
    for (const World& world : worlds)
      moe_round(communication, world, plan, result, experts);
    check_ok(communication.destroy(), "destroy");
  });
}

}  // namespace tokenyard::support
