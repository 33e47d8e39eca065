// SPDX-License-Identifier: Apache-2.0
// A dispatch that one rank asks for before it has ended the rounds that it has open: it is refused, the peers hear
// nothing of it, and no round is lost, within a round and between the halves of a dispatch.
#include <gtest/gtest.h>

#include "gpu/backend_case.h"
#include "support/backends.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/tensor.h"

namespace tokenyard::gpu_tests {
namespace {

using support::check;
using support::check_ok;
using support::World;

class EarlyDispatchesOnGpu : public testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam().shape); }

  [[nodiscard]] static const Shape& shape() { return GetParam().shape; }

  struct Rank {
    Communication& communication;
    DeviceRounds& rounds;
    int index;

    void ask_early(int early, const World& world) const {
      if (index != early) return;
      const support::RankTensors tensors(world, index, false);
      DispatchResult extra;
      support::check_throws(ErrorCode::kInvalidState, {"in flight"}, [&] {
        static_cast<void>(communication.dispatch(tensors.input(), {.stream = {rounds.stream()}}, extra));
      });
    }
  };

  template <class Body>
  static void play(const Body& body) {
    const World world = world_up_to(shape(), shape().max_tokens, 5);
    run_with_devices(shape(), [&](const Group& group, int device) {
      const int depth = find_backend(GetParam().backend).contract.max_in_flight;
      DeviceRounds rounds({.device = device, .rounds_in_flight = depth});
      Communication communication = create_communication(
          group, params_of(shape()), support::config_for(GetParam().backend, world.spec), cuda_options(device));
      std::vector<DispatchResult> open(static_cast<std::size_t>(depth));
      for (int early = 0; early < shape().num_ranks; ++early) {
        for (int time = 0; time < 3; ++time)
          body(Rank{communication, rounds, group.rank()}, early, world, open);
        DispatchResult result;
        for (int time = 0; time < depth; ++time)
          play_round(communication, world, rounds.through_device({}), result);
      }
      check_ok(communication.destroy(), "destroy");
    });
  }
};

TEST_P(EarlyDispatchesOnGpu, LoseNothingWithinARound) {
  play([](const Rank& rank, int early, const World& world, std::vector<DispatchResult>& open) {
    const support::RoundPlan plan = rank.rounds.through_device({});
    for (DispatchResult& result : open)
      dispatch_and_check(rank.communication, world, plan, result);
    rank.ask_early(early, world);
    for (DispatchResult& result : open)
      combine_and_check(rank.communication, world, plan, result, result.handle);
  });
}

TEST_P(EarlyDispatchesOnGpu, LoseNothingBetweenHalves) {
  play([](const Rank& rank, int early, const World& world, std::vector<DispatchResult>& open) {
    auto* split = rank.communication.get<SplitPhases>();
    const support::RankTensors tensors(world, rank.index, false);
    const support::RoundPlan plan = rank.rounds.through_device({});
    const DispatchOptions options{.stream = {rank.rounds.stream()}};
    DispatchInput input = tensors.input();
    for (TensorView* view : {&input.hidden_states, &input.topk_ids, &input.topk_weights, &input.hidden_states_scale})
      *view = rank.rounds.to_device(*view);
    for (DispatchResult& result : open)
      check(split->dispatch_send(input, options, result).ok(), "dispatch_send");
    rank.ask_early(early, world);
    for (DispatchResult& result : open) {
      check_ok(rank.rounds.receive(rank.communication, options, result), "dispatch_receive");
      check_result(rank.communication, world, plan, result);
    }
    for (DispatchResult& result : open)
      combine_and_check(rank.communication, world, plan, result, result.handle);
  });
}

std::vector<BackendCase> cases() {
  std::vector<BackendCase> all;
  for (const std::string_view backend : {"one_sided", "two_sided", "low_latency"}) {
    for (const bool spread : {false, true})
      all.push_back({backend, {.num_ranks = 2, .hidden_size = 128, .max_tokens = 40, .spread = spread}});
    all.push_back({backend, {.num_ranks = 3, .hidden_size = 128, .num_experts = 48, .max_tokens = 600}});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, EarlyDispatchesOnGpu, testing::ValuesIn(cases()), [](const auto& of) {
  return title_of_case(of.param);
});

}  // namespace
}  // namespace tokenyard::gpu_tests
