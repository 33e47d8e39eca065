// SPDX-License-Identifier: Apache-2.0
// Gather calls over every choice of ranks, with as many rows as each of them has.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "manager/gather_ranks.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::manager_tests {
namespace {

using support::check;
using support::check_eq;
using support::run_ranks;

constexpr int kRanks = 8;

// One choice of ranks: how the eight are split, what the call says, and whom it then joins.
struct Choice {
  std::string name;
  int dp, pcp, tp;
  bool use_ep, sequence_parallel;
  std::vector<int> (*ranks_of)(const RankCube&, int rank);
};

std::vector<int> ep_ranks(const RankCube& cube, int /*rank*/) {
  return cube.ep_ranks();
}

std::vector<int> dp_ranks(const RankCube& cube, int rank) {
  return cube.dp_ranks(rank);
}

std::vector<int> pcp_ranks(const RankCube& cube, int rank) {
  return cube.pcp_ranks(rank);
}

std::vector<Choice> choices() {
  return {{"DataParallel", 8, 1, 1, true, false, dp_ranks},
          {"DataParallelOfTensorParallel", 4, 1, 2, true, false, dp_ranks},
          {"DataParallelWithoutExpertParallel", 4, 2, 1, false, false, dp_ranks},
          {"ExpertParallelWithContext", 4, 2, 1, true, false, ep_ranks},
          {"SequenceParallel", 4, 1, 2, true, true, ep_ranks},
          {"SequenceParallelWithContext", 2, 2, 2, true, true, ep_ranks},
          {"ContextParallel", 1, 8, 1, true, false, pcp_ranks},
          {"ContextParallelOfTensorParallel", 1, 4, 2, false, false, pcp_ranks},
          {"SequenceParallelAlone", 1, 1, 8, true, true, ep_ranks},
          {"Nobody", 1, 1, 8, false, false, pcp_ranks}};
}

std::int64_t position_of(const std::vector<int>& ranks, int rank) {
  return std::ranges::find(ranks, rank) - ranks.begin();
}

// Rows of each member; equal ones where there is one data-parallel rank and so no list.
std::vector<std::int64_t> sizes_of(const Choice& choice, std::size_t members, int step) {
  std::vector<std::int64_t> sizes(members);
  for (std::size_t i = 0; i < members; ++i)
    sizes[i] = choice.dp == 1 ? step : (static_cast<std::int64_t>(i) * 3 + step) % 6;
  return sizes;
}

class GatherChoices : public ::testing::TestWithParam<Choice> {};

void gather_and_combine(GatherCalls& calls, const Choice& choice, const RankCube& cube, int rank, int step) {
  const std::vector<int> ranks = choice.ranks_of(cube, rank);
  const auto index = static_cast<std::size_t>(position_of(ranks, rank));
  const std::vector<std::int64_t> sizes = sizes_of(choice, ranks.size(), step);
  auto hidden = cargo_matrix<float>(Dtype::kF32, 1, rank, sizes[index], 12);
  auto weights = cargo_matrix<float>(Dtype::kF32, 2, rank, sizes[index], 3);
  auto ids = cargo_matrix<std::int64_t>(Dtype::kI64, 3, rank, sizes[index], 3);
  auto scales = cargo_matrix<std::uint8_t>(Dtype::kE8m0, 4, rank, sizes[index], 5);
  const std::vector<TensorView> extras{scales.view(), ids.view()};
  GatherResult result;
  support::check_ok(calls.dispatch(hidden.view(), weights.view(), ids.view(),
                                   {.sequence_parallel = choice.sequence_parallel, .extra_tensors = extras}, result),
                    "dispatch");
  check_gathered<float>(result.hidden_states, Dtype::kF32, 1, ranks, sizes);
  check_gathered<float>(result.topk_weights, Dtype::kF32, 2, ranks, sizes);
  check_gathered<std::int64_t>(result.topk_ids, Dtype::kI64, 3, ranks, sizes);
  check(result.extra_tensors && result.extra_tensors->size() == 2, "two extras come back as a list of two");
  check_gathered<std::uint8_t>((*result.extra_tensors)[0], Dtype::kE8m0, 4, ranks, sizes);
  check_gathered<std::int64_t>((*result.extra_tensors)[1], Dtype::kI64, 3, ranks, sizes);
  check(!result.router_logits.defined(), "router logits that nobody gave");

  const std::int64_t all = result.hidden_states.num_rows();
  auto experts = expert_output(rank, all, 12);
  TensorView output;
  support::check_ok(calls.combine(experts.view(), output, choice.sequence_parallel), "combine");
  check_combined(output, ranks, sizes, index);
}

TEST_P(GatherChoices, JoinTheRightRanks) {
  const Choice& choice = GetParam();
  const RankCube cube(choice.dp, choice.pcp, choice.tp);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    All2AllManager manager =
        create_all2all_manager("all_gather", gather_options(group, cube.groups_of(group.rank(), choice.use_ep)));
    check(!manager.initialized(), "communications are made on first use");
    auto* calls = manager.get<GatherCalls>();
    check(calls != nullptr && calls == &manager.gather_calls(), "all_gather has no gather calls");
    for (const int step : {4, 0, 5, 1}) {
      const std::size_t members = choice.ranks_of(cube, group.rank()).size();
      if (choice.dp > 1) manager.set_step_num_tokens(sizes_of(choice, members, step));
      gather_and_combine(*calls, choice, cube, group.rank(), step);
    }
    check(manager.initialized(), "there is a communication now");
    check(manager.destroy().ok(), "destroy");
  }));
}

INSTANTIATE_TEST_SUITE_P(Splits, GatherChoices, ::testing::ValuesIn(choices()), [](const auto& choice) {
  return choice.param.name;
});

TEST(GatherCallsTest, RouterLogitsAndLists) {
  EXPECT_NO_THROW(run_ranks(4, [](const Group& group) {
    Flat flat(group);
    const std::int64_t own = flat.step({2, 0, 5, 1});
    auto hidden = cargo_matrix<float>(Dtype::kF32, 1, flat.rank, own, 6);
    auto logits = cargo_matrix<float>(Dtype::kF32, 5, flat.rank, own, 33);
    GatherResult& result = flat.result;
    support::check_ok(flat.calls.dispatch_router_logits(hidden.view(), logits.view(), {}, result), "dispatch");
    check_gathered<float>(result.hidden_states, Dtype::kF32, 1, flat.ranks, flat.sizes);
    check_gathered<float>(result.router_logits, Dtype::kF32, 5, flat.ranks, flat.sizes);
    check(!result.extra_tensors && !result.topk_ids.defined() && !result.topk_weights.defined(), "nothing else");
    const std::vector<TensorView> none;
    support::check_ok(flat.calls.dispatch_router_logits(hidden.view(), logits.view(), {.extra_tensors = none}, result),
                      "dispatch");
    check(result.extra_tensors && result.extra_tensors->empty(), "an empty list is given back as a list");
    std::vector<TensorView> many(15, logits.view());
    many[14] = hidden.view();
    support::check_ok(flat.calls.dispatch_router_logits(hidden.view(), logits.view(), {.extra_tensors = many}, result),
                      "dispatch");
    check_eq(result.extra_tensors->size(), 15U, "extras");
    check_gathered<float>((*result.extra_tensors)[13], Dtype::kF32, 5, flat.ranks, flat.sizes);
    check_gathered<float>((*result.extra_tensors)[14], Dtype::kF32, 1, flat.ranks, flat.sizes);
    flat.combine(6);
  }));
}

TEST(GatherCallsTest, ProcessesGatherToo) {
  EXPECT_NO_THROW(support::run_processes(kRanks, [](const Group& group) {
    Flat flat(group);
    for (int step = 0; step < 4; ++step) {
      flat.step({0, 1, 2, 3, 4, 5, 6, step});
      flat.dispatch(20);
      flat.combine(20);
    }
    check(flat.manager.destroy().ok(), "destroy");
  }));
}

// Layers need not come in pairs of dispatch and combine, nor all in one shape; the list may change in between.
TEST(GatherCallsTest, CombineNeedsNoDispatch) {
  EXPECT_NO_THROW(run_ranks(kRanks, [](const Group& group) {
    Flat flat(group);
    flat.step({3, 3, 0, 1, 2, 8, 4, 5});
    flat.combine(16);  // nothing was dispatched ever
    flat.dispatch(16);
    flat.combine(16);
    flat.combine(16);  // nothing is left to combine
    flat.dispatch(16);
    flat.dispatch(16);  // the first of two is dropped
    flat.step({1, 0, 7, 1, 1, 1, 1, 1});
    flat.combine(16);  // other rows than those dispatched
    flat.dispatch(16);
    flat.combine(40);  // other width than that dispatched
    flat.combine(16);
  }));
}

TEST(GatherCallsTest, CombineWritesIntoTheCallersTensor) {
  EXPECT_NO_THROW(run_ranks(4, [](const Group& group) {
    Flat flat(group);
    const std::int64_t own = flat.step({2, 6, 0, 3});
    flat.dispatch(10);
    auto experts = expert_output(flat.rank, flat.all(), 10);
    support::Tensor output(Dtype::kF32, {own, 10}, {.padding_elements = 3});
    TensorView view = output.view();
    support::check_ok(flat.calls.combine_into_output(experts.view(), view), "combine_into_output");
    check(view.data == output.view().data, "the output moved");
    check_combined(view, flat.ranks, flat.sizes, static_cast<std::size_t>(flat.rank));
    output.check_guards("output");
  }));
}

TEST(GatherCallsTest, QuantisedRowsComeBackAsTheyCame) {
  EXPECT_NO_THROW(run_ranks(4, [](const Group& group) {
    ManagerOptions options = gather_options(group, {.dp = group});
    options.params.hidden_size = 32;
    options.params.dtype = Dtype::kF32;
    All2AllManager manager = create_all2all_manager("all_gather", options);
    const std::vector<int> ranks{0, 1, 2, 3};
    const std::vector<std::int64_t> sizes{4, 0, 2, 3};
    manager.set_step_num_tokens(sizes);
    const std::int64_t own = sizes[static_cast<std::size_t>(group.rank())];
    auto rows = cargo_matrix<std::uint8_t>(Dtype::kU8, 1, group.rank(), own, 16);  // 4 bits an element
    auto weights = cargo_matrix<float>(Dtype::kF32, 2, group.rank(), own, 2);
    auto scales = cargo_matrix<std::uint8_t>(Dtype::kF8e4m3, 4, group.rank(), own, 2);
    const std::vector<TensorView> extras{scales.view()};
    GatherResult result;
    support::check_ok(
        manager.gather_calls().dispatch(rows.view(), weights.view(), weights.view(), {.extra_tensors = extras}, result),
        "dispatch");
    check_gathered<std::uint8_t>(result.hidden_states, Dtype::kU8, 1, ranks, sizes);
    check_gathered<std::uint8_t>((*result.extra_tensors)[0], Dtype::kF8e4m3, 4, ranks, sizes);
    auto experts = expert_output(group.rank(), 9, 32);
    TensorView output;
    support::check_ok(manager.gather_calls().combine(experts.view(), output), "combine");
    check_combined(output, ranks, sizes, static_cast<std::size_t>(group.rank()));
    auto wide = cargo_matrix<std::uint8_t>(Dtype::kU8, 1, group.rank(), own, 129);
    support::check_throws(ErrorCode::kInvalidArgument, {"rows of 129 bytes", "hidden_size 32 of f32"}, [&] {
      (void)manager.gather_calls().dispatch(wide.view(), weights.view(), weights.view(), {}, result);
    });
  }));
}

TEST(GatherCallsTest, CallersAllocatorServesEveryOutput) {
  EXPECT_NO_THROW(run_ranks(2, [](const Group& group) {
    std::vector<std::vector<std::byte>> given;
    ManagerOptions options = gather_options(group, {.dp = group});
    options.communication.allocate_output = [&](std::int64_t bytes, Device /*device*/) {
      return static_cast<void*>(given.emplace_back(static_cast<std::size_t>(bytes)).data());
    };
    All2AllManager manager = create_all2all_manager("all_gather", options);
    const std::vector<std::int64_t> sizes{3, 2};
    manager.set_step_num_tokens(sizes);
    auto experts = expert_output(group.rank(), 5, 8);
    TensorView output;
    support::check_ok(manager.gather_calls().combine(experts.view(), output), "combine");
    check_combined(output, {0, 1}, sizes, static_cast<std::size_t>(group.rank()));
    check_eq(given.size(), 1U, "outputs of a combine");
    check(output.data == given[0].data(), "the output is elsewhere");
  }));
}

// More rows, wider rows and more cargo than the window was made for: it grows, also round by round.
TEST(GatherCallsTest, WindowsGrowWithTheSteps) {
  const std::int64_t before = memfd_mappings();
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Flat flat(group, 2);
    for (const std::int64_t most : {2, 3, 5, 4, 17, 1}) {
      std::vector<std::int64_t> sizes(kRanks, 1);
      sizes[static_cast<std::size_t>(most) % kRanks] = most;
      flat.step(sizes);
      flat.dispatch(24);
      flat.combine(24);
      flat.dispatch(24, most == 5 ? 300 : 2);  // 2400 bytes of weights and ids a row
      group.barrier();
      check_eq(memfd_mappings(), before + kRanks, "windows");
      group.barrier();
    }
    flat.dispatch(48);  // another width has its own
    flat.combine(48);
    flat.dispatch(24);
    flat.combine(24);
    check(flat.manager.destroy().ok(), "destroy");
  }));
  EXPECT_EQ(memfd_mappings(), before);
}

}  // namespace
}  // namespace tokenyard::manager_tests
