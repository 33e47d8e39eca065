// SPDX-License-Identifier: Apache-2.0
// Wrong gather calls: what they say, and that the other ranks learn of it at once and everything works on.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "manager/gather_ranks.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::manager_tests {
namespace {

using support::check;
using support::check_fault;
using support::check_throws;
using support::run_ranks;

constexpr int kRanks = 4;
constexpr std::chrono::milliseconds kSoon{5'000};

// One rank's tensors for a step, and a manager over data-parallel ranks.
struct Layer {
  explicit Layer(const Group& group)
      : manager(create_all2all_manager("all_gather", gather_options(group, {.dp = group}))), rank(group.rank()) {}

  Status dispatch(const std::vector<std::int64_t>& list, std::int64_t own) {
    manager.set_step_num_tokens(list);
    auto hidden = cargo_matrix<float>(Dtype::kF32, 1, rank, own, 8);
    auto weights = cargo_matrix<float>(Dtype::kF32, 2, rank, own, 2);
    return manager.gather_calls().dispatch(hidden.view(), weights.view(), weights.view(), {}, result);
  }

  Status combine(const std::vector<std::int64_t>& list, std::int64_t rows) {
    manager.set_step_num_tokens(list);
    auto experts = expert_output(rank, rows, 8);
    return manager.gather_calls().combine(experts.view(), output);
  }

  void good_round() {
    const std::vector<std::int64_t> sizes{2, 1, 0, 3};
    support::check_ok(dispatch(sizes, sizes[static_cast<std::size_t>(rank)]), "dispatch");
    check_gathered<float>(result.hidden_states, Dtype::kF32, 1, {0, 1, 2, 3}, sizes);
    support::check_ok(combine(sizes, 6), "combine");
    check_combined(output, {0, 1, 2, 3}, sizes, static_cast<std::size_t>(rank));
  }

  All2AllManager manager;
  int rank;
  GatherResult result{};
  TensorView output{};
};

TEST(GatherMisuse, ListsAreChecked) {
  EXPECT_NO_THROW(run_ranks(kRanks, [](const Group& group) {
    Layer layer(group);
    const std::int64_t own = group.rank() + 1;
    check_throws(ErrorCode::kInvalidState, {"no list of token counts", "set_step_num_tokens", "4 ranks"},
                 [&] { (void)layer.dispatch({}, own); });
    check_throws(ErrorCode::kInvalidArgument, {"has 3 entries", "joins 4 ranks"}, [&] {
      (void)layer.dispatch({1, 2, 3}, own);
    });
    check_throws(ErrorCode::kInvalidArgument,
                 {"says 9 rows for rank " + std::to_string(group.rank()), "hidden_states has " + std::to_string(own)},
                 [&] {
                   (void)layer.dispatch({9, 9, 9, 9}, own);
                 });
    check_throws(ErrorCode::kInvalidState, {"no list of token counts"}, [&] { (void)layer.combine({}, 10); });
    check_throws(ErrorCode::kInvalidArgument, {"has 5 entries", "joins 4 ranks"}, [&] {
      (void)layer.combine({1, 2, 3, 4, 5}, 15);
    });
    check_throws(ErrorCode::kInvalidArgument, {"adds up to 10 rows", "hidden_states has 11"}, [&] {
      (void)layer.combine({1, 2, 3, 4}, 11);
    });
    check_throws(ErrorCode::kInvalidArgument, {"rank 1 of the step's list has -2 tokens"}, [&] {
      layer.manager.set_step_num_tokens(std::vector<std::int64_t>{1, -2, 3, 4});
    });
    layer.good_round();
  }));
}

TEST(GatherMisuse, OneDataParallelRankNeedsRowsThatDivide) {
  const RankCube cube(1, 4, 1);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    All2AllManager manager =
        create_all2all_manager("all_gather", gather_options(group, cube.groups_of(group.rank(), true)));
    auto experts = expert_output(group.rank(), 10, 8);
    TensorView output;
    check_throws(ErrorCode::kInvalidArgument, {"hidden_states has 10 rows", "do not divide by the 4 ranks"},
                 [&] { (void)manager.gather_calls().combine(experts.view(), output); });
    check(!manager.gather_calls().allocate_combine_input(10, 8, Dtype::kF32).defined(), "memory for rows in halves");
  }));
}

TEST(GatherMisuse, TensorParallelRanksMustSplitTheirTokens) {
  const RankCube cube(2, 2, 2);
  EXPECT_NO_THROW(run_ranks(8, [&](const Group& group) {
    All2AllManager manager =
        create_all2all_manager("all_gather", gather_options(group, cube.groups_of(group.rank(), true)));
    auto rows = expert_output(group.rank(), 8, 8);
    TensorView output;
    const std::vector<std::string> parts{"tp_size = 2", "require sequence-parallel inputs", "sequence_parallel = true"};
    manager.set_step_num_tokens(std::vector<std::int64_t>(8, 1));
    check_throws(ErrorCode::kInvalidArgument, parts,
                 [&] { (void)manager.gather_calls().combine(rows.view(), output); });
    GatherResult result;
    check_throws(ErrorCode::kInvalidArgument, parts,
                 [&] { (void)manager.gather_calls().dispatch_router_logits(rows.view(), rows.view(), {}, result); });
    check(!manager.gather_calls().allocate_combine_input(8, 8, Dtype::kF32).defined(), "memory for no group");
    support::check_ok(manager.gather_calls().combine(rows.view(), output, true), "sequence-parallel combine");
    check_combined(output, cube.ep_ranks(), std::vector<std::int64_t>(8, 1), static_cast<std::size_t>(group.rank()));
  }));
}

TEST(GatherMisuse, TensorsAreChecked) {
  EXPECT_NO_THROW(run_ranks(kRanks, [](const Group& group) {
    Layer layer(group);
    layer.manager.set_step_num_tokens(std::vector<std::int64_t>{2, 2, 2, 2});
    auto rows = cargo_matrix<float>(Dtype::kF32, 1, group.rank(), 2, 8);
    auto ids = cargo_matrix<std::int32_t>(Dtype::kI32, 1, group.rank(), 2, 8);
    GatherCalls& calls = layer.manager.gather_calls();
    GatherResult result;
    const auto dispatch = [&](const TensorView& hidden, const TensorView& weights, const GatherOptions& options) {
      (void)calls.dispatch(hidden, weights, ids.view(), options, result);
    };
    check_throws(ErrorCode::kInvalidArgument, {"hidden_states is not given"}, [&] { dispatch({}, rows.view(), {}); });
    check_throws(ErrorCode::kInvalidArgument, {"topk_weights is not given"}, [&] { dispatch(rows.view(), {}, {}); });
    check_throws(ErrorCode::kInvalidArgument, {"topk_ids is not given"},
                 [&] { (void)calls.dispatch(rows.view(), rows.view(), {}, {}, result); });
    check_throws(ErrorCode::kInvalidArgument, {"router_logits is not given"},
                 [&] { (void)calls.dispatch_router_logits(rows.view(), {}, {}, result); });
    const std::vector<TensorView> many(15, rows.view());
    check_throws(ErrorCode::kInvalidArgument, {"15 extra tensors", "at most 14"},
                 [&] { dispatch(rows.view(), rows.view(), {.extra_tensors = many}); });
    const std::vector<TensorView> hole(1);
    check_throws(ErrorCode::kInvalidArgument, {"extra tensor is not given"},
                 [&] { dispatch(rows.view(), rows.view(), {.extra_tensors = hole}); });
    TensorView flat(rows.values.data(), Dtype::kF32, {16});
    check_throws(ErrorCode::kInvalidArgument, {"hidden_states is f32[16]", "[num_tokens, row]"},
                 [&] { dispatch(flat, rows.view(), {}); });
    TensorView output;
    check_throws(ErrorCode::kInvalidArgument, {"hidden_states is not given"}, [&] { (void)calls.combine({}, output); });
    check_throws(ErrorCode::kInvalidArgument, {"hidden_states is i32[2, 8]", "bf16, f16 or f32"},
                 [&] { (void)calls.combine(ids.view(), output); });
    layer.good_round();
  }));
}

// Rank 1 gives a wrong list or tensor; where the others are by then depends on what there is.
TEST(GatherMisuse, OneRanksMistakeReachesTheOthersAtOnce) {
  EXPECT_NO_THROW(run_ranks(kRanks, [](const Group& group) {
    Layer layer(group);
    const std::vector<std::int64_t> sizes{2, 1, 4, 3};  // a rank without rows would wait for nobody in combine
    const std::int64_t own = sizes[static_cast<std::size_t>(group.rank())];
    const bool wrong = group.rank() == 1;
    const support::Stopwatch stopwatch;
    // No window yet: the others are making one.
    check_throws(wrong ? ErrorCode::kInvalidArgument : ErrorCode::kPeerFailed,
                 {"says 1 rows for rank 1 and hidden_states has 2"},
                 [&] { (void)layer.dispatch(sizes, wrong ? 2 : own); });
    check(!layer.manager.initialized(), "half a window");
    layer.good_round();
    // With a window, in dispatch.
    if (wrong) {
      check_throws(ErrorCode::kInvalidArgument, {"hidden_states has 2"}, [&] { (void)layer.dispatch(sizes, 2); });
    } else {
      check_fault(layer.dispatch(sizes, own), StatusCode::kAborted, 1, Phase::kDispatch);
    }
    layer.good_round();
    // In the combine of a dispatch.
    support::check_ok(layer.dispatch(sizes, own), "dispatch");
    if (wrong) {
      check_throws(ErrorCode::kInvalidArgument, {"adds up to 10", "has 7"}, [&] { (void)layer.combine(sizes, 7); });
    } else {
      check_fault(layer.combine(sizes, 10), StatusCode::kAborted, 1, Phase::kCombine);
    }
    layer.good_round();
    // In a combine without one.
    if (wrong) {
      check_throws(ErrorCode::kInvalidState, {"no list"}, [&] { (void)layer.combine({}, 10); });
    } else {
      check_fault(layer.combine(sizes, 10), StatusCode::kAborted, 1, Phase::kDispatch);
    }
    layer.good_round();
    // While the others grow.
    const std::vector<std::int64_t> many{20, 20, 20, 20};
    check_throws(wrong ? ErrorCode::kInvalidArgument : ErrorCode::kPeerFailed, {"says 20 rows for rank 1"},
                 [&] { (void)layer.dispatch(many, wrong ? 19 : 20); });
    layer.good_round();
    stopwatch.check_below(kSoon, "five mistakes");
  }));
}

TEST(GatherMisuse, ListsThatDifferFailEverywhere) {
  EXPECT_NO_THROW(run_ranks(kRanks, [](const Group& group) {
    Layer layer(group);
    layer.good_round();
    std::vector<std::int64_t> sizes{2, 1, 0, 3};
    const std::int64_t own = sizes[static_cast<std::size_t>(group.rank())];
    if (group.rank() == 3) sizes[0] = 1;  // what it says of another rank
    check_throws(ErrorCode::kMismatch, {"num_tokens_per_rank"}, [&] { (void)layer.dispatch(sizes, own); });
    layer.good_round();
    // So large that windows must grow, to sizes that differ: all keep the old one.
    sizes = {2, 1, 0, 3};
    sizes[group.rank() == 3 ? 0 : 1] = group.rank() == 3 ? 100 : 20;
    check_throws(ErrorCode::kMismatch, {"max_tokens_per_rank", "rank 2: 32", "rank 3: 128"},
                 [&] { (void)layer.combine(sizes, std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0})); });
    layer.good_round();
  }));
}

TEST(GatherMisuse, NothingWorksAfterDestroy) {
  EXPECT_NO_THROW(run_ranks(kRanks, [](const Group& group) {
    Layer layer(group);
    layer.good_round();
    check(layer.manager.destroy().ok(), "destroy");
    check(layer.manager.destroy().ok(), "second destroy");
    const std::vector<std::string> parts{"this manager was destroyed"};
    check_throws(ErrorCode::kDestroyed, parts, [&] { (void)layer.dispatch({2, 2, 2, 2}, 2); });
    auto rows = expert_output(group.rank(), 8, 8);
    TensorView output;
    GatherCalls& calls = *layer.manager.get<GatherCalls>();
    check_throws(ErrorCode::kDestroyed, parts, [&] { (void)calls.combine(rows.view(), output); });
    check_throws(ErrorCode::kDestroyed, parts, [&] { (void)calls.combine_into_output(rows.view(), output); });
    check_throws(ErrorCode::kDestroyed, parts, [&] { (void)calls.allocate_combine_input(8, 8, Dtype::kF32); });
  }));
}

}  // namespace
}  // namespace tokenyard::manager_tests
