// SPDX-License-Identifier: Apache-2.0
// Misuse by one rank: a clear Error there before anything is sent, kAborted naming that rank elsewhere within a second,
// and a communication that works in the next round.
#include <gtest/gtest.h>

#include <chrono>
#include <tuple>

#include "conformance/bad_calls.h"
#include "conformance/small_spec.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/run_ranks.h"

namespace tokenyard::support {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 3;
constexpr int kCulprit = 1;

using MisuseParam = std::tuple<std::string_view, std::size_t>;

class DispatchMisuse : public ::testing::TestWithParam<MisuseParam> {};

TEST_P(DispatchMisuse, IsAnErrorHereAndAbortedElsewhere) {
  const auto [backend, index] = GetParam();
  const BadDispatchCase& bad = bad_dispatches()[index];
  const WorldSpec spec = all_to_all_spec(kRanks, 3);
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&, name = backend](const Group& group) {
    Communication communication = communication_for(group, name, spec);
    DispatchResult result;
    for (int round = 0; round < 2; ++round) {
      play_round(communication, world, {}, result);
      const RankTensors tensors(world, group.rank(), false);
      const Stopwatch stopwatch;
      if (group.rank() == kCulprit) {
        BadDispatch call{.world = &world, .rank = kCulprit, .input = tensors.input()};
        bad.spoil(call);
        check_throws(bad.code, bad.message_parts,
                     [&] { (void)communication.dispatch(call.input, call.options, result); });
      } else {
        check_fault(communication.dispatch(tensors.input(), {}, result), StatusCode::kAborted, kCulprit,
                    Phase::kDispatch);
      }
      stopwatch.check_below(milliseconds(1'000), "the failed dispatch");
      check_ok(communication.poll(), "an abort is not sticky");
    }
    play_round(communication, world, {}, result);
  }));
}

// Of each backend, what is misuse of its contract.
std::vector<MisuseParam> misuses() {
  std::vector<MisuseParam> all;
  for (const std::string_view backend : kMovingBackends) {
    const Contract& contract = find_backend(backend).contract;
    for (std::size_t i = 0; i < bad_dispatches().size(); ++i) {
      if (bad_dispatches()[i].applies(contract)) all.emplace_back(backend, i);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cases, DispatchMisuse, ::testing::ValuesIn(misuses()), [](const auto& misuse) {
  return std::string(std::get<0>(misuse.param)) + "_" + bad_dispatches()[std::get<1>(misuse.param)].name;
});

// Arguments that must agree travel as a digest: a difference is the same error on every rank.
class Disagreement : public ::testing::TestWithParam<std::string_view> {};

TEST_P(Disagreement, IsAMismatchOnEveryRank) {
  WorldSpec spec = all_to_all_spec(kRanks, 4);
  const Contract& contract = find_backend(GetParam()).contract;
  const World world = make_world(spec);
  WorldSpec with_extra = spec;
  with_extra.extra_row_bytes = {16};
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), with_extra);
    DispatchResult result;
    play_round(communication, world, {}, result);
    const RankTensors tensors(world, group.rank(), false);
    DispatchInput input = tensors.input();
    DispatchOptions options;
    Tensor extra(Dtype::kU8, {6, group.rank() == kCulprit ? 12 : 16});
    const std::vector<TensorView> extras{extra.view()};
    if (contract.takes_extra_payloads) {
      input.extra_payloads = extras;
    } else if (group.rank() == kCulprit) {
      input.topk_weights = {};
    }
    const Stopwatch stopwatch;
    check_throws(ErrorCode::kMismatch, {"rank"}, [&] { (void)communication.dispatch(input, options, result); });
    stopwatch.check_below(milliseconds(1'000), "the mismatch");
    play_round(communication, world, {}, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, Disagreement, ::testing::ValuesIn(kMovingBackends), [](const auto& backend) {
  return std::string(backend.param);
});

class RuntimeMaxTokensDisagreement : public ::testing::TestWithParam<std::string_view> {};

TEST_P(RuntimeMaxTokensDisagreement, IsAMismatchOnEveryRank) {
  WorldSpec spec = small_spec(kRanks, 4);
  spec.num_tokens = {3, 3, 3};
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), spec);
    DispatchResult result;
    for (int round = 0; round < 2; ++round) {
      const RankTensors tensors(world, group.rank(), false);
      const std::int64_t tokens = group.rank() == kCulprit ? 5 : 4;
      check_throws(ErrorCode::kMismatch, {"rank"}, [&] {
        (void)communication.dispatch(tensors.input(), {.runtime_max_tokens_per_rank = tokens}, result);
      });
      play_round(communication, world, {}, result);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         RuntimeMaxTokensDisagreement,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.takes_runtime_max_tokens;
                         })),
                         [](const auto& backend) { return std::string(backend.param); });

TEST(TokensPerRankDisagreement, IsCheckedAgainstWhatRanksSend) {
  WorldSpec spec = small_spec(kRanks, 4);
  spec.num_tokens = {3, 4, 5};
  const World world = make_world(spec);
  EXPECT_NO_THROW(run_ranks(kRanks, [&](const Group& group) {
    Communication communication = communication_for(group, "all_gather", spec);
    DispatchResult result;
    const RankTensors tensors(world, group.rank(), false);
    std::vector<std::int64_t> wrong{3, 4, 6};
    wrong[static_cast<std::size_t>(group.rank())] = world.rank(group.rank()).num_tokens;
    if (group.rank() == 2) wrong[0] = 1;
    check_throws(ErrorCode::kMismatch, {},
                 [&] { (void)communication.dispatch(tensors.input(), {.num_tokens_per_rank = wrong}, result); });
    play_round(communication, world, {.tell_num_tokens = true}, result);
  }));
}

class CombineMisuse : public ::testing::TestWithParam<std::tuple<std::string_view, int>> {
 protected:
  // 0: too few rows, 1: wrong dtype, 2: too wide, 3: output of other rows, 4: output of bytes, 5: not given.
  static void spoil(int which, std::list<Tensor>& storage, CombineInput& input, TensorView& output) {
    const auto add = [&](Dtype dtype, std::vector<std::int64_t> shape) {
      return storage.emplace_back(dtype, std::move(shape)).view();
    };
    if (which == 0) input.expert_output = add(Dtype::kBf16, {2, 24});
    if (which == 1) input.expert_output = add(Dtype::kI32, {input.expert_output.shape[0], 24});
    if (which == 2) input.expert_output = add(Dtype::kBf16, {input.expert_output.shape[0], 25});
    if (which == 3) output = add(Dtype::kBf16, {5, 24});
    if (which == 4) output = add(Dtype::kU8, {6, 24});
    if (which == 5) input.expert_output = {};
  }
};

TEST_P(CombineMisuse, IsAnErrorHereAndAbortedElsewhere) {
  const WorldSpec spec = all_to_all_spec(kRanks, 5);
  const World world = make_world(spec);
  const auto [backend, which] = GetParam();
  EXPECT_NO_THROW(run_ranks(kRanks, [&, name = backend, kind = which](const Group& group) {
    Communication communication = communication_for(group, name, spec);
    DispatchResult result;
    play_round(communication, world, {}, result);
    dispatch_and_check(communication, world, {}, result);
    std::list<Tensor> storage;
    const std::vector<std::int64_t> shape{num_flat_rows(result.hidden_states), 24};
    CombineInput input{.expert_output = storage.emplace_back(Dtype::kBf16, shape).view()};
    TensorView output = storage.emplace_back(Dtype::kBf16, std::vector<std::int64_t>{6, 24}).view();
    const Stopwatch stopwatch;
    if (group.rank() == kCulprit) {
      spoil(kind, storage, input, output);
      check_throws(ErrorCode::kInvalidArgument, {},
                   [&] { (void)communication.combine(result.handle, input, {}, output); });
    } else {
      check_fault(communication.combine(result.handle, input, {}, output), StatusCode::kAborted, kCulprit,
                  Phase::kCombine);
    }
    stopwatch.check_below(milliseconds(1'000), "the failed combine");
    play_round(communication, world, {}, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Cases,
                         CombineMisuse,
                         ::testing::Combine(::testing::ValuesIn(kMovingBackends), ::testing::Range(0, 6)),
                         [](const auto& misuse) {
                           return std::string(std::get<0>(misuse.param)) + "_" +
                                  std::to_string(std::get<1>(misuse.param));
                         });

}  // namespace
}  // namespace tokenyard::support
