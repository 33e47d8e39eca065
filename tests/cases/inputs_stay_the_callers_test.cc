// SPDX-License-Identifier: Apache-2.0
// C100: neither phase writes or aliases what the caller gave it, and after dispatch the inputs are free for other use.
#include <algorithm>
#include <functional>

#include "cases/case_round.h"

namespace tokenyard::support {
namespace {

class InputsStayTheCallers : public EachBackend {
 protected:
  static WorldSpec spec() {
    WorldSpec spec;
    spec.params = {.num_experts = 8, .top_k = 3, .hidden_size = 40, .max_tokens_per_rank = 6};
    spec.num_ranks = 3;
    spec.num_tokens = {6, 6, 6};
    return spec;
  }
};

bool overlap(const TensorView& one, const TensorView& other) {
  if (!one.defined() || !other.defined() || one.num_elements() == 0 || other.num_elements() == 0) return false;
  const auto end = [](const TensorView& view) {
    const std::int64_t rows = num_flat_rows(view);
    return row_of(view, rows - 1) + last_dim_bytes(view);
  };
  return std::less<>()(row_of(one, 0), end(other)) && std::less<>()(row_of(other, 0), end(one));
}

void check_apart(const DispatchInput& input, const DispatchResult& result) {
  for (const TensorView* given : {&input.hidden_states, &input.topk_ids, &input.topk_weights}) {
    for (const TensorView* got : {&result.hidden_states, &result.topk_ids, &result.topk_weights})
      check(!overlap(*given, *got), "a result lies in an input: " + got->describe());
  }
}

TEST_P(InputsStayTheCallers, ThroughTheWholeRound) {
  for (const bool strided : {false, true}) {
    for (const bool zero_copy : {false, true}) {
      const World world = make_world(spec());
      EXPECT_NO_THROW(run_ranks(3,
                                [&](const Group& group) {
                                  Communication communication = communication_for(group, GetParam(), world.spec);
                                  DispatchResult result;
                                  for (int round = 0; round < 3; ++round) {
                                    const RankTensors tensors(world, group.rank(), strided);
                                    const DispatchInput input = tensors.input();
                                    check_ok(communication.dispatch(input, {}, result), "dispatch");
                                    check_result(communication, world, {}, result);
                                    check_apart(input, result);
                                    combine_and_check(communication, world, {.zero_copy = zero_copy}, result,
                                                      result.handle);
                                    tensors.check_unchanged();
                                  }
                                }))
          << strided << " " << zero_copy;
    }
  }
}

// Every rank overwrites its inputs as soon as dispatch returns, while others may still read and combine.
TEST_P(InputsStayTheCallers, AreFreeAfterDispatch) {
  const World world = make_world(spec());
  EXPECT_NO_THROW(run_ranks(3, [&](const Group& group) {
    Communication communication = communication_for(group, GetParam(), world.spec);
    DispatchResult result;
    for (int round = 0; round < 10; ++round) {
      RankTensors tensors(world, group.rank(), false);
      const DispatchInput input = tensors.input();
      check_ok(communication.dispatch(input, {}, result), "dispatch");
      for (const TensorView* view : {&input.hidden_states, &input.topk_ids, &input.topk_weights}) {
        for (std::int64_t row = 0; row < num_flat_rows(*view); ++row)
          std::fill_n(row_of(*view, row), last_dim_bytes(*view), kPoison);
      }
      check_result(communication, world, {}, result);
      combine_and_check(communication, world, {}, result, result.handle);
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Backends, InputsStayTheCallers, ::testing::ValuesIn(kMovingBackends), backend_name);

}  // namespace
}  // namespace tokenyard::support
