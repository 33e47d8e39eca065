// SPDX-License-Identifier: Apache-2.0
// C56: layers of different hidden size, top-k and experts use one manager in any order.
#include "tokenyard/manager.h"

#include "cases/case_round.h"
#include "support/casts.h"

namespace tokenyard::support {
namespace {

constexpr int kRanks = 4;

World layer(int hidden_size, int top_k, int num_experts) {
  CaseWorld made{.params = {.num_experts = num_experts,
                            .top_k = top_k,
                            .hidden_size = hidden_size,
                            .max_tokens_per_rank = 8,
                            .dtype = Dtype::kF32}};
  for (int rank = 0; rank < kRanks; ++rank) {
    IdTable table;
    for (int token = 0; token < 2 * rank + 1; ++token) {
      std::vector<std::int64_t> row;
      for (int slot = 0; slot < top_k; ++slot)
        row.push_back((3 * token + rank + 5 * slot) % num_experts);
      table.push_back(row);
    }
    made.ids.push_back(table);
  }
  return made.make();
}

const std::vector<World>& layers() {
  static const std::vector<World> worlds{layer(16, 2, 8), layer(64, 4, 16)};
  return worlds;
}

ManagerOptions options_for(const Group& group) {
  ManagerOptions options{.group = group, .parallel = {.dp = group}, .communication = test_options()};
  options.params.dtype = Dtype::kF32;
  return options;
}

using Order = std::vector<std::size_t>;

class LayersShareOneManager : public ::testing::TestWithParam<Order> {};

TEST_P(LayersShareOneManager, ByGrowth) {
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    All2AllManager manager = create_all2all_manager("one_sided", options_for(group));
    DispatchResult result;
    for (const std::size_t at : GetParam()) {
      const MoeParams& params = layers()[at].spec.params;
      manager.initialize({.max_num_tokens = params.max_tokens_per_rank,
                          .top_k = params.top_k,
                          .num_experts = params.num_experts,
                          .hidden_size = params.hidden_size});
      moe_round(manager.get_communication(), layers()[at], {}, result);
    }
    check_eq(manager.get_communication().params().hidden_size, 64, "the larger of both layers");
  }));
}

// What every rank holds is gathered to all; each gives x times (its rank + 1), so the sum is 10 x.
void gather_layer(GatherCalls& calls, const World& world, int rank) {
  const RankTensors tensors(world, rank, true);
  const DispatchInput input = tensors.input();
  GatherResult result;
  check_ok(calls.dispatch(input.hidden_states, input.topk_weights, input.topk_ids, {}, result), "dispatch");
  const std::int64_t columns = world.spec.params.hidden_size;
  check_eq(result.topk_ids.shape[1], std::int64_t{world.spec.params.top_k}, "top_k of gathered ids");
  Tensor experts(Dtype::kF32, {result.hidden_states.num_rows(), columns});
  std::int64_t at = 0;
  for (int source = 0; source < kRanks; ++source) {
    for (std::int64_t token = 0; token < world.rank(source).num_tokens; ++token, ++at) {
      for (std::int64_t column = 0; column < columns; ++column) {
        const float value = load(Dtype::kF32, row_of(result.hidden_states, at), column);
        check_eq(value, case_value(source, token, column), "gathered row " + std::to_string(at));
        store(Dtype::kF32, experts.row(at), column, value * static_cast<float>(rank + 1));
      }
    }
  }
  Tensor output(Dtype::kF32, {world.rank(rank).num_tokens, columns});
  TensorView view = output.view();
  check_ok(calls.combine_into_output(experts.view(), view), "combine");
  for (std::int64_t token = 0; token < output.num_rows(); ++token) {
    for (std::int64_t column = 0; column < columns; ++column) {
      const float value = load(Dtype::kF32, output.row(token), column);
      check_eq(value, 10.0F * case_value(rank, token, column), "combined token " + std::to_string(token));
    }
  }
  output.check_guards("the output of combine");
  tensors.check_unchanged();
}

TEST_P(LayersShareOneManager, ByGatherCalls) {
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    All2AllManager manager = create_all2all_manager("all_gather", options_for(group));
    for (const std::size_t at : GetParam()) {
      std::vector<std::int64_t> sizes;
      for (const RankData& data : layers()[at].ranks)
        sizes.push_back(data.num_tokens);
      manager.set_step_num_tokens(sizes);
      gather_layer(manager.gather_calls(), layers()[at], group.rank());
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Orders, LayersShareOneManager, ::testing::Values(Order{0, 1, 0}, Order{1, 0, 1}));

}  // namespace
}  // namespace tokenyard::support
