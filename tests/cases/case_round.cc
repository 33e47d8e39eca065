// SPDX-License-Identifier: Apache-2.0
#include "cases/case_round.h"

#include <cstring>

#include "support/casts.h"

namespace tokenyard::support {
namespace {

// What expert `expert` makes of one element.
float expert_value(Experts experts, std::int64_t expert, float x) {
  switch (experts) {
    case Experts::kScale:
      return static_cast<float>(expert + 1) * x;
    case Experts::kIdentity:
      return x;
    case Experts::kSquare:
    case Experts::kSquareOfWeighted:
      return x * x;
  }
  return x;
}

float weighted_value(Experts experts, std::int64_t expert, float weight, float x) {
  if (experts == Experts::kSquareOfWeighted) return expert_value(experts, expert, weight * x);
  return weight * expert_value(experts, expert, x);
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

struct ReceivedRow {
  const DispatchResult& result;
  std::int64_t row = 0;
};

// Expert-major rows belong to one expert each, and combine weighs them. The world's params count: the communication may
// have been made for more.
void apply_own_expert(const Communication& communication,
                      const MoeParams& params,
                      const ReceivedRow& received,
                      Experts experts,
                      std::vector<float>& values) {
  const auto& [result, row] = received;
  const std::int64_t expert =
      first_expert_of(params, communication.rank(), communication.num_ranks()) + row / result.hidden_states.shape[1];
  for (std::size_t column = 0; column < values.size(); ++column) {
    const float x = load(params.dtype, row_of(result.hidden_states, row), static_cast<std::int64_t>(column));
    values[column] = expert_value(experts, expert, x);
  }
}

// Weighted sum of this rank's experts for one received row.
void apply_experts(const Communication& communication,
                   const MoeParams& params,
                   const ReceivedRow& received,
                   Experts experts,
                   std::vector<float>& sums) {
  if (communication.contract().output_layout == OutputLayout::kExpertMajor) {
    apply_own_expert(communication, params, received, experts, sums);
    return;
  }
  const auto& [result, row] = received;
  const bool local = communication.contract().id_space == IdSpace::kLocal;
  std::fill(sums.begin(), sums.end(), 0.0F);
  for (int slot = 0; slot < params.top_k; ++slot) {
    std::int64_t expert = id_at(result.topk_ids, row, slot);
    if (local && expert >= 0) expert += first_expert_of(params, communication.rank(), communication.num_ranks());
    if (owner_of(expert, params, communication.num_ranks()) != communication.rank()) continue;
    const float weight = load(result.topk_weights.dtype, row_of(result.topk_weights, row), slot);
    for (std::size_t column = 0; column < sums.size(); ++column) {
      const float x = load(params.dtype, row_of(result.hidden_states, row), static_cast<std::int64_t>(column));
      sums[column] += weighted_value(experts, expert, weight, x);
    }
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
        y += weighted_value(experts, expert, load(Dtype::kF32, data.weights.row(token).data(), slot), x);
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

Tensor expert_rows(const Communication& communication,
                   const World& world,
                   const RoundPlan& plan,
                   const DispatchResult& result,
                   Experts experts) {
  const MoeParams& params = world.spec.params;
  std::vector<std::int64_t> shape{num_flat_rows(result.hidden_states), params.hidden_size};
  if (communication.contract().output_layout == OutputLayout::kExpertMajor) {
    shape = {result.hidden_states.shape[0], result.hidden_states.shape[1], params.hidden_size};
  }
  Tensor rows(params.dtype, shape, {.poison = kNanPoison});
  std::vector<float> sums(static_cast<std::size_t>(params.hidden_size));
  const ExpectedDispatch expected = expect_dispatch(world, communication.rank(), layout_rule(communication, plan));
  for (const ExpectedRow& row : expected.rows) {  // the others stay NaN
    apply_experts(communication, params, {result, row.position}, experts, sums);
    for (std::int64_t column = 0; column < params.hidden_size; ++column) {
      store(params.dtype, rows.row(row.position), column, sums[static_cast<std::size_t>(column)]);
    }
  }
  return rows;
}

void check_y(const TensorView& y, const World& world, int rank, Experts experts) {
  check_elements(y, expected_output(world, rank, y.dtype, experts), "y");
}

std::vector<std::byte> moe_combine(
    Communication& communication, const World& world, const RoundPlan& plan, DispatchResult& result, Experts experts) {
  const MoeParams& params = world.spec.params;
  const Tensor rows = expert_rows(communication, world, plan, result, experts);
  Tensor output(params.dtype, {world.rank(communication.rank()).num_tokens, params.hidden_size});
  TensorView view = output.view();
  check_ok(communication.combine(result.handle, {.expert_output = rows.view()}, {}, view), "combine");
  output.check_guards("the output of combine");
  check_y(view, world, communication.rank(), experts);
  return output.bytes();
}

void moe_round(
    Communication& communication, const World& world, const RoundPlan& plan, DispatchResult& result, Experts experts) {
  dispatch_and_check(communication, world, plan, result);
  moe_combine(communication, world, plan, result, experts);
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
