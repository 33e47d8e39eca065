// SPDX-License-Identifier: Apache-2.0
// What only two_sided promises: queues of any size that no skew can block, and statistics of all experts.
#include <gtest/gtest.h>

#include <cstring>

#include "conformance/small_spec.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

// Entries of two rows: every rank waits for room again and again, whoever all the tokens go to.
TEST(SmallQueues, NeverBlock) {
  for (int skew = 0; skew < kNumSkews; ++skew) {
    WorldSpec spec = small_spec(4, 3);
    spec.params.max_tokens_per_rank = 150;
    spec.skew = static_cast<Skew>(skew);
    spec.num_tokens = {150, 0, 149, 1};
    EXPECT_NO_THROW(run_ranks(4, [&](const Group& group) {
      Communication communication =
          create_communication(group, spec.params, TwoSidedConfig{.queue_bytes_per_peer = 2 * 192}, test_options());
      DispatchResult result;
      for (std::uint64_t round = 0; round < 4; ++round)
        play_round(communication, make_world(with_seed(spec, round)), {.seed = round}, result);
    })) << name(spec.skew);
  }
}

// A send half fills queues that the receiver has not come to drain, and drains those of others meanwhile: here every
// rank sends its dispatch while others are still between the halves of the combine before it.
TEST(SmallQueues, DrainBothPhasesWhileTheyWait) {
  WorldSpec spec = all_to_all_spec(3, 4);
  spec.params.max_tokens_per_rank = 40;
  spec.num_tokens = {40, 40, 40};
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication =
        create_communication(group, spec.params, TwoSidedConfig{.queue_bytes_per_peer = 3 * 256}, test_options());
    auto* split = communication.get<SplitPhases>();
    DispatchResult first;
    DispatchResult second;
    for (std::uint64_t round = 0; round < 5; ++round) {
      const World world = make_world(with_seed(spec, round));
      const RankTensors tensors(world, group.rank(), false);
      dispatch_and_check(communication, world, {}, first);
      Tensor rows(Dtype::kBf16, {num_flat_rows(first.hidden_states), spec.params.hidden_size});
      std::memset(rows.view().data, 0, static_cast<std::size_t>(rows.view().num_rows() * 48));
      check_ok(split->combine_send(first.handle, {.expert_output = rows.view()}, {}), "combine_send");
      check_ok(split->dispatch_send(tensors.input(), {}, second), "dispatch_send");
      Tensor output(Dtype::kBf16, {40, spec.params.hidden_size});
      TensorView view = output.view();
      check_ok(split->combine_receive(first.handle, view), "combine_receive");
      check_ok(split->dispatch_receive({}, second), "dispatch_receive");
      check_result(communication, world, {}, second);
      combine_and_check(communication, world, {.seed = round}, second, second.handle);
    }
  }));
}

TEST(QueueBytes, HoldTwoRowsAtLeast) {
  const MoeParams params{.num_experts = 4, .top_k = 1, .hidden_size = 7168, .max_tokens_per_rank = 3};
  try {
    (void)window_bytes(params, TwoSidedConfig{.queue_bytes_per_peer = 20'000}, 2);
    FAIL() << "a queue of one row was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("20000"), std::string::npos) << error.what();
  }
  EXPECT_GT(window_bytes(params, TwoSidedConfig{}, 2), 0);
  MoeParams wide = params;
  wide.hidden_size = 1 << 20;  // rows of 2 MiB
  EXPECT_GT(window_bytes(wide, TwoSidedConfig{}, 2), 2 * 4 * (std::int64_t{2} << 20));
}

TEST(ExpertsOfTwoSided, AreAMultipleOfFour) {
  const MoeParams params{.num_experts = 10, .top_k = 1, .hidden_size = 8, .max_tokens_per_rank = 3};
  try {
    (void)window_bytes(params, TwoSidedConfig{}, 2);
    FAIL() << "10 experts were taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("10"), std::string::npos) << error.what();
  }
}

TEST(StatisticsOfTwoSided, CoverAllExperts) {
  WorldSpec spec = all_to_all_spec(2, 5);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, "two_sided", spec);
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    DispatchInput input = tensors.input();
    std::vector<std::int32_t> statistics(3, 1);
    input.eplb_local_stats = {statistics.data(), Dtype::kI32, {3}};
    if (group.rank() == 0) {
      check_throws(ErrorCode::kInvalidArgument, {"eplb_local_stats", "3", "4"},
                   [&] { (void)communication.dispatch(input, {}, result); });
    } else {
      check_fault(communication.dispatch(tensors.input(), {}, result), StatusCode::kAborted, 0, Phase::kDispatch);
    }
    play_round(communication, world, {}, result);
  }));
}

}  // namespace
}  // namespace tokenyard::support
