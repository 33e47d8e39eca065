// SPDX-License-Identifier: Apache-2.0
// C19: i32 and i64 ids give the same routes; other dtypes are refused before anything is sent.
#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class IdDtypes : public EachBackend {};

TEST_P(IdDtypes, BothIntegersWork) {
  CaseWorld made{.ids = {repeated(3, {0}), repeated(2, {3})}};
  const World wide = made.make();
  made.id_dtype = Dtype::kI32;
  EXPECT_NO_THROW(play_worlds(GetParam(), {made.make(), wide, made.make()}));
}

TEST_P(IdDtypes, OthersAreRefused) {
  const World world = CaseWorld{.ids = std::vector<IdTable>(2, repeated(2, {1}))}.make();
  EXPECT_NO_THROW(run_ranks(2, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kU8, Dtype::kF8e4m3, Dtype::kE8m0}) {
      const RankTensors tensors(world, group.rank(), false);
      DispatchInput input = tensors.input();
      const Tensor ids(dtype, {2, 1});
      input.topk_ids = ids.view();
      check_throws(ErrorCode::kInvalidArgument, {std::string(name(dtype)), "i32", "i64"},
                   [&] { (void)communication.dispatch(input, {}, result); });
    }
    moe_round(communication, world, {}, result);
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, IdDtypes, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
