// SPDX-License-Identifier: Apache-2.0
// C94: combine returns [num_tokens, hidden], summed over the chosen experts once. C95: weights act once, before or
// after the expert as the caller wishes.
#include <cstring>

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class AppliedOnce : public EachBackend {};

// Two halves of the identity are the input: on one rank, on two, and with both experts the same one.
TEST_P(AppliedOnce, HalvesMakeAWhole) {
  for (const std::vector<std::int64_t>& row : {std::vector<std::int64_t>{0, 1}, {1, 2}, {3, 3}}) {
    CaseWorld made{.ids = std::vector<IdTable>(2, repeated(4, row)),
                   .weights = std::vector<WeightTable>(2, WeightTable(4, {0.5F, 0.5F}))};
    made.params.top_k = 2;
    const World world = made.make();
    EXPECT_NO_THROW(run_ranks(2,
                              [&](const Group& group) {
                                Communication communication = communication_for(group, GetParam(), world.spec);
                                DispatchResult result;
                                for (int round = 0; round < 3; ++round) {
                                  dispatch_and_check(communication, world, {}, result);
                                  const std::vector<std::byte> y =
                                      moe_combine(communication, world, {}, result, Experts::kIdentity);
                                  const std::vector<std::byte>& x = world.rank(group.rank()).hidden.bytes;
                                  check_eq(y.size(), x.size(), "bytes of y");
                                  check_bytes(y.data(), x, "y against x");
                                }
                              }))
        << row[0] << " and " << row[1];
  }
}

// Weight 0.5: x becomes 0.5 x, and 0.25 x^2 or 0.5 x^2 when the expert squares what it gets.
void check_weight_acts_once(std::string_view backend, Experts experts, float factor, bool squared) {
  const World world = CaseWorld{.ids = std::vector<IdTable>(2, repeated(3, {2})),
                                .weights = std::vector<WeightTable>(2, WeightTable(3, {0.5F}))}
                          .make();
  run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, backend, world.spec);
    DispatchResult result;
    dispatch_and_check(communication, world, {}, result);
    const std::vector<std::byte> y = moe_combine(communication, world, {}, result, experts);
    for (std::int64_t token = 0; token < 3; ++token) {
      for (std::int64_t column = 0; column < 16; ++column) {
        const float x = case_value(group.rank(), token, column);
        float got = 0;
        std::memcpy(&got, y.data() + (token * 16 + column) * 4, 4);
        check_eq(got, factor * (squared ? x * x : x), "y of x = " + std::to_string(x));
      }
    }
  });
}

TEST_P(AppliedOnce, AWeightAfterTheExpert) {
  EXPECT_NO_THROW(check_weight_acts_once(GetParam(), Experts::kIdentity, 0.5F, false));
  EXPECT_NO_THROW(check_weight_acts_once(GetParam(), Experts::kSquare, 0.5F, true));
}

INSTANTIATE_TEST_SUITE_P(Backends, AppliedOnce, ::testing::ValuesIn(kMovingBackends), backend_name);

// Only where the caller applies weights may that be before the expert.
class AppliedOnceByTheCaller : public EachBackend {};

TEST_P(AppliedOnceByTheCaller, AWeightBeforeTheExpert) {
  EXPECT_NO_THROW(check_weight_acts_once(GetParam(), Experts::kSquareOfWeighted, 0.25F, true));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         AppliedOnceByTheCaller,
                         ::testing::ValuesIn(moving_backends_that([](const Contract& contract) {
                           return contract.weights_applied_by == WeightRule::kCaller;
                         })),
                         backend_name);

}  // namespace
}  // namespace tokenyard::support
