// SPDX-License-Identifier: Apache-2.0
// C121, C122, C124, C125 without a GPU: a plan of fixed tensors and shapes, replayed with other rows, ids and counts.
// What a captured graph would keep, addresses and sizes above all, must be the same in every round.
#include <optional>

#include "cases/static_shape_rank.h"

namespace tokenyard::support {
namespace {

constexpr std::int64_t kReplays = 12;

class StaticShapes : public EachBackend {};

bool capturable(const Contract& contract) {
  return contract.capturable && contract.output_layout == OutputLayout::kRankMajor;
}

// The shape does not come from the tokens: runtime_max_tokens_per_rank is absent, so blocks have max_tokens_per_rank
// rows.
void check_shape(const DispatchResult& result) {
  for (const TensorView* view : {&result.hidden_states, &result.topk_ids, &result.topk_weights}) {
    check_lists_eq(std::vector<std::int64_t>(view->shape.begin(), view->shape.begin() + 2),
                   std::vector<std::int64_t>{kStaticRanks, 8}, "blocks and rows of " + view->describe());
  }
  check_eq(result.counts.tokens_per_rank, 8, "tokens_per_rank");
}

// Twelve replays equal rounds of a communication that sees its tensors for the first time, bit for bit (C121).
TEST_P(StaticShapes, ReplaysEqualFreshRounds) {
  EXPECT_NO_THROW(run_ranks(kStaticRanks, [&](const Group& group) {
    StaticShapeRank recorded(group, GetParam(), kReplays);
    DispatchResult result;
    for (std::int64_t replay = 0; replay < kReplays; ++replay) {
      check(recorded.replay(replay, result), "replay " + std::to_string(replay));
      check(recorded.output_is_right(replay), "y of replay " + std::to_string(replay));
      const World world = static_world(replay);
      Communication fresh = communication_for(group, GetParam(), world.spec);
      DispatchResult once;
      dispatch_and_check(fresh, world, {}, once);
      const std::vector<std::byte> y = moe_combine(fresh, world, {}, once, Experts::kIdentity);
      check_bytes(recorded.output().row(0), y, "y against a fresh round");
    }
  }));
}

// Every replay's rows, ids of unused rows and counts are its own, at the addresses of the first (C121, C124).
TEST_P(StaticShapes, AddressesAndShapesStay) {
  EXPECT_NO_THROW(run_ranks(kStaticRanks, [&](const Group& group) {
    StaticShapeRank recorded(group, GetParam(), kReplays);
    DispatchResult result;
    std::optional<std::vector<void*>> first;
    for (std::int64_t replay = 0; replay < kReplays; ++replay) {
      recorded.load(replay);
      check(recorded.dispatch(result), "dispatch");
      check_result(recorded.communication(), static_world(replay), {}, result);
      check_shape(result);
      const TensorView rows = recorded.communication().combine_input(result.handle, Dtype::kF32);
      check_eq(rows.defined(), gives_combine_input(recorded.communication().contract()), "combine_input is given");
      const std::vector<void*> now{result.hidden_states.data, result.topk_ids.data, result.topk_weights.data,
                                   rows.data};
      if (!first) first = now;
      check_lists_eq(now, *first, "addresses");
      result.handle = Handle();
      check(recorded.replay(replay, result) && recorded.output_is_right(replay), "the whole round");
    }
  }));
}

// The result and its handle die in every round, what they gave back is overwritten, and the next round finds its route
// and its addresses all the same (C122).
TEST_P(StaticShapes, NothingLivesInTheHandle) {
  EXPECT_NO_THROW(run_ranks(kStaticRanks, [&](const Group& group) {
    StaticShapeRank recorded(group, GetParam(), kReplays);
    void* first = nullptr;
    for (std::int64_t replay = 0; replay < kReplays; ++replay) {
      {
        DispatchResult result;
        check(recorded.replay(replay, result), "replay");
        if (first == nullptr) first = result.hidden_states.data;
        check_eq(result.hidden_states.data, first, "address of the rows");
      }
      std::vector<std::vector<std::byte>> poison;
      for (std::size_t bytes = 8; bytes <= 4096; bytes *= 2)
        poison.emplace_back(bytes, kPoison);
      check(recorded.output_is_right(replay), "y of replay " + std::to_string(replay));
    }
  }));
}

// Nothing is made late: making room is refused while a round is open, and says what stands in the way (C125).
TEST_P(StaticShapes, NothingIsMadeInsideARound) {
  EXPECT_NO_THROW(run_ranks(kStaticRanks, [&](const Group& group) {
    StaticShapeRank recorded(group, GetParam(), 2);
    Growth* growth = recorded.communication().get<Growth>();
    if (growth == nullptr) return;
    DispatchResult result;
    recorded.load(0);
    check(recorded.dispatch(result), "dispatch");
    MoeParams wanted = recorded.communication().params();
    wanted.max_tokens_per_rank *= 2;
    check_throws(ErrorCode::kInvalidState, {"open"}, [&] { growth->reserve(wanted, 0); });
    result.handle = Handle();
    check(recorded.replay(1, result) && recorded.output_is_right(1), "a replay after the refusal");
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, StaticShapes, ::testing::ValuesIn(moving_backends_that(capturable)), backend_name);

// A route that is kept for replays must be there: an empty handle is refused by every rank, a kept one works when the
// result it came with is gone (C122).
class KeptRoute : public EachBackend {};

TEST_P(KeptRoute, OutlivesItsResult) {
  const World world = static_world(0);
  EXPECT_NO_THROW(run_ranks(kStaticRanks, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    Handle kept;
    {
      DispatchResult first;
      moe_round(communication, world, {}, first, Experts::kIdentity);
      kept = std::move(first.handle);
    }
    const std::vector<std::byte> poison(4096, kPoison);
    const RankTensors tensors(world, group.rank(), false);
    DispatchInput input = tensors.input(false);
    input.topk_weights = {};
    DispatchResult result;
    const Handle empty;
    check_throws(ErrorCode::kInvalidState, {"empty"},
                 [&] { (void)communication.dispatch(input, {.replay = &empty}, result); });
    for (int replay = 0; replay < 12; ++replay) {
      check_ok(communication.dispatch(input, {.replay = &kept}, result), "replay");
      combine_and_check(communication, world, {.expert_dtype = Dtype::kF32, .output_dtype = Dtype::kF32}, result,
                        result.handle);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         KeptRoute,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.handle_use == HandleUse::kReplay;
                         })),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
