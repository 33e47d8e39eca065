// SPDX-License-Identifier: Apache-2.0
// Ranks that disagree about shapes, or make a mistake, where rounds take several sub-rounds: errors on every rank, no
// hang, and a communication that works on.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "conformance/byte_budget.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = kCutRanks;
constexpr int kCulprit = 1;

// What one rank's tensors or options say otherwise than the others'.
struct Disagreement {
  std::string name;
  std::vector<std::string> message_parts;
  std::function<void(WorldSpec&)> change;
};

const std::vector<Disagreement>& disagreements() {
  static const std::vector<Disagreement> all{
      {"num_experts", {"num_experts", "8", "9"}, [](WorldSpec& spec) { spec.params.num_experts = 9; }},
      {"top_k", {"digests"}, [](WorldSpec& spec) { spec.params.top_k = 2; }},
      {"hidden_size", {"digests"}, [](WorldSpec& spec) { spec.params.hidden_size = 334; }},
      {"dtype_of_the_same_width", {"digests"}, [](WorldSpec& spec) { spec.params.dtype = Dtype::kF16; }},
      {"wider_dtype", {"digests"}, [](WorldSpec& spec) { spec.params.dtype = Dtype::kF32; }},
      {"format", {"digests"}, [](WorldSpec& spec) { spec.params.dispatch_format = DispatchFormat::kFp8Block128; }},
      {"weights", {"digests"}, [](WorldSpec& spec) { spec.with_weights = false; }},
      {"dtype_of_weights", {"digests"}, [](WorldSpec& spec) { spec.weight_dtype = Dtype::kBf16; }},
  };
  return all;
}

class BudgetDisagreement : public ::testing::TestWithParam<std::size_t> {};

TEST_P(BudgetDisagreement, IsAMismatchOnEveryRank) {
  const Disagreement& disagreement = disagreements()[GetParam()];
  const WorldSpec spec = cut_spec(9);
  WorldSpec other = spec;
  disagreement.change(other);
  const World worlds[] = {make_world(spec), make_world(other)};
  for (const RankKind kind : {RankKind::kThreads, RankKind::kProcesses}) {
    EXPECT_NO_THROW(run(kind, kRanks, [&](const Group& group) {
      Communication communication = budget_made(group, cutting_budget());
      DispatchResult result;
      for (const World& next : worlds) {
        const World& own = worlds[group.rank() == kCulprit ? 1 : 0];
        const RankTensors tensors(own, group.rank(), false);
        const Stopwatch stopwatch;
        check_throws(ErrorCode::kMismatch, disagreement.message_parts,
                     [&] { (void)communication.dispatch(tensors.input(), of_experts(own.spec), result); });
        stopwatch.check_below(milliseconds(1'000), "the mismatch");
        play_round(communication, next, {.expert_dtype = next.spec.params.dtype}, result);
      }
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases,
                         BudgetDisagreement,
                         ::testing::Range(std::size_t{0}, disagreements().size()),
                         [](const auto& index) { return disagreements()[index.param].name; });

struct Mistake {
  std::string name;
  ErrorCode code = ErrorCode::kInvalidArgument;
  std::vector<std::string> message_parts;
  std::function<void(DispatchInput&, DispatchOptions&)> make;
};

const std::vector<Mistake>& mistakes() {
  static const std::vector<Mistake> all{
      {"no_experts",
       ErrorCode::kInvalidArgument,
       {"num_experts is not given", "byte budget"},
       [](DispatchInput&, DispatchOptions& options) { options.num_experts = 0; }},
      {"negative_experts",
       ErrorCode::kInvalidArgument,
       {"num_experts is -3"},
       [](DispatchInput&, DispatchOptions& options) { options.num_experts = -3; }},
      {"no_rows",
       ErrorCode::kInvalidArgument,
       {"hidden_states is not given"},
       [](DispatchInput& input, DispatchOptions&) { input.hidden_states = {}; }},
      {"no_ids",
       ErrorCode::kInvalidArgument,
       {"topk_ids is not given"},
       [](DispatchInput& input, DispatchOptions&) { input.topk_ids = {}; }},
      {"rows_of_integers",
       ErrorCode::kInvalidArgument,
       {"hidden_states", "bf16, f16 or f32"},
       [](DispatchInput& input, DispatchOptions&) { input.hidden_states.dtype = Dtype::kI32; }},
      {"fewer_weights",
       ErrorCode::kInvalidArgument,
       {"topk_weights", "top_k = 3"},
       [](DispatchInput& input, DispatchOptions&) { input.topk_weights.shape[1] = 2; }},
      // Of the last token, which only the last sub-round would move.
      {"id_of_the_last_token",
       ErrorCode::kInvalidArgument,
       {"topk_ids[39, 1] is 8", "[0, 8)"},
       [](DispatchInput& input, DispatchOptions&) {
         static std::vector<std::int32_t> ids(40 * 3, 1);
         ids[39 * 3 + 1] = 8;
         input.topk_ids = TensorView(ids.data(), Dtype::kI32, {40, 3});
       }},
      {"rows_too_wide",
       ErrorCode::kCapacity,
       {"buffer_bytes is " + std::to_string(cutting_budget()), "one token of each rank", "take"},
       [](DispatchInput& input, DispatchOptions&) {
         static std::vector<std::byte> memory(40 * 30'000);
         input.hidden_states = TensorView(memory.data(), Dtype::kBf16, {40, 15'000});
       }},
      {"a_row_wider_than_the_window",
       ErrorCode::kCapacity,
       {"buffer_bytes is " + std::to_string(cutting_budget()), "one row of bf16[40, 50000]"},
       [](DispatchInput& input, DispatchOptions&) {
         static std::vector<std::byte> memory(40 * 100'000);
         input.hidden_states = TensorView(memory.data(), Dtype::kBf16, {40, 50'000});
       }},
  };
  return all;
}

class BudgetMisuse : public ::testing::TestWithParam<std::size_t> {};

TEST_P(BudgetMisuse, IsAnErrorHereAndAbortedElsewhere) {
  const Mistake& mistake = mistakes()[GetParam()];
  WorldSpec spec = cut_spec(10);
  spec.num_tokens = {5, 40, 33};
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = budget_made(group, cutting_budget());
    DispatchResult result;
    for (int round = 0; round < 2; ++round) {
      const RankTensors tensors(world, group.rank(), false);
      DispatchInput input = tensors.input();
      DispatchOptions options = of_experts(spec);
      const Stopwatch stopwatch;
      if (group.rank() == kCulprit) {
        mistake.make(input, options);
        check_throws(mistake.code, mistake.message_parts,
                     [&] { (void)communication.dispatch(input, options, result); });
      } else {
        check_fault(communication.dispatch(input, options, result), StatusCode::kAborted, kCulprit, Phase::kDispatch);
      }
      stopwatch.check_below(milliseconds(1'000), "the failed dispatch");
      play_round(communication, world, {}, result);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Cases, BudgetMisuse, ::testing::Range(std::size_t{0}, mistakes().size()), [](const auto& i) {
  return mistakes()[i.param].name;
});

// A combine that one rank gives up ends it for those whom that rank owes rows, in whichever sub-round; epochs stay
// aligned for the next rounds.
TEST(BudgetCombineMisuse, EndsTheRoundAndNoMore) {
  for (const bool wrong_width : {false, true}) {
    WorldSpec spec = cut_spec(11);
    spec.num_tokens = {40, 40, 40};
    const World world = make_world(spec);
    EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
      Communication communication = budget_made(group, cutting_budget());
      DispatchResult result;
      for (int round = 0; round < 3; ++round) {
        dispatch_and_check(communication, world, {}, result);
        const bool culprit = group.rank() == kCulprit;
        Zeros zeros(result, 40, spec.params.hidden_size + (culprit && wrong_width ? 1 : 0));
        if (culprit && !wrong_width) zeros.rows = Tensor(Dtype::kBf16, {result.counts.num_rows + 1, 333});
        TensorView output = zeros.output.view();
        const Stopwatch stopwatch;
        const auto combine = [&] { return communication.combine(result.handle, zeros.input(), {}, output); };
        if (culprit) {
          check_throws(ErrorCode::kInvalidArgument, {"expert_output"}, [&] { (void)combine(); });
        } else {
          check_fault(combine(), StatusCode::kAborted, kCulprit, Phase::kCombine);
        }
        stopwatch.check_below(milliseconds(1'000), "the failed combine");
        check_ok(communication.poll(), "an abort is not sticky");
        play_round(communication, world, {}, result);
      }
    }));
  }
}

// u8 rows do not tell combine's width, so ranks may differ in it: an error on the ranks that see it, and no hang.
TEST(BudgetCombineMisuse, WidthsOfQuantisedRowsMustAgree) {
  WorldSpec spec = cut_spec(12);
  spec.params.dispatch_format = DispatchFormat::kMxfp4;
  spec.params.num_experts = spec.params.top_k = kRanks;  // everyone owes rows to everyone
  spec.num_tokens = {40, 40, 40};
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = budget_made(group, budget_for(spec, 9));
    DispatchResult result;
    for (int round = 0; round < 2; ++round) {
      dispatch_and_check(communication, world, {}, result);
      Zeros zeros(result, 40, group.rank() == kCulprit ? 300 : 333);
      TensorView output = zeros.output.view();
      check_throws(ErrorCode::kMismatch, {"300", "333"},
                   [&] { (void)communication.combine(result.handle, zeros.input(), {}, output); });
      play_round(communication, world, {}, result);
    }
  }));
}

TEST(BudgetFault, AnAbsentRankIsNamed) {
  const WorldSpec spec = cut_spec(13);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    CommunicationOptions options = test_options();
    options.deadline = options.first_round_deadline = milliseconds(300);
    Communication communication = budget_made(group, cutting_budget(), Dtype::kBf16, options);
    DispatchResult result;
    play_round(communication, world, {}, result);
    group.barrier();
    const RankTensors tensors(world, group.rank(), false);
    if (group.rank() != kCulprit) {
      const Status status = communication.dispatch(tensors.input(), of_experts(spec), result);
      check_fault(status, StatusCode::kTimeout, kCulprit, Phase::kDispatch);
    }
    group.barrier();
    check_ok(communication.reset(), "reset");
    play_round(communication, world, {}, result);
  }));
}

}  // namespace
}  // namespace tokenyard::support
