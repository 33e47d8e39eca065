// SPDX-License-Identifier: Apache-2.0
// Who is blamed when ranks wait for each other: the one that holds up all, by all, also by those that wait for a rank
// that waits itself; and nobody when they wait in a circle.
// Public bug reports of this kind: a rank that never comes leaves busy ranks stuck (C08), a timeout without a reason
// that the next library call is blamed for (C134).
#include <gtest/gtest.h>

#include "gpu/backend_case.h"
#include "support/backends.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/tensor.h"

namespace tokenyard::gpu_tests {
namespace {

using support::check_fault;
using support::RankTensors;
using support::World;

const std::chrono::milliseconds kDeadline = patient(std::chrono::milliseconds(300));

class CulpritsOnGpu : public testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam().shape); }

  [[nodiscard]] static const Shape& shape() { return GetParam().shape; }

  // The tokens of rank 0 go to the first ranks only; all others go everywhere.
  [[nodiscard]] static World world(int ranks) {
    support::WorldSpec spec{.params = params_of(shape()), .num_ranks = shape().num_ranks, .seed = 3};
    spec.num_tokens.assign(static_cast<std::size_t>(shape().num_ranks), shape().max_tokens);
    World made = support::make_world(spec);
    const int near = shape().num_experts / shape().num_ranks * ranks;
    for (std::int64_t& id : made.rank(0).ids)
      id %= near;
    return made;
  }

  struct Rank {
    Communication& communication;
    DeviceRounds& rounds;
    const RankTensors& tensors;

    Status dispatch(DispatchResult& result) const {
      return rounds.dispatch(communication, tensors.input(), {}, result);
    }

    Status combine(DispatchResult& result) const {
      const support::Tensor given = expert_output_for(shape(), result);
      const support::Tensor sums(shape().dtype, {tensors.num_tokens(), shape().hidden_size});
      TensorView output = sums.view();
      return rounds.combine(communication, result.handle, {.expert_output = given.view()}, {}, output);
    }

    void play() const {
      DispatchResult result;
      support::check_ok(dispatch(result), "dispatch");
      support::check_ok(combine(result), "combine");
    }
  };

  // Several times: whose wait runs out first is chance.
  template <class Body>
  static void play_faults(int ranks_of_first, const Body& body) {
    run_with_devices(shape(), [&](const Group& group, int device) {
      DeviceRounds rounds({.device = device});
      CommunicationOptions options = cuda_options(device);
      options.deadline = kDeadline;
      const World sent = world(ranks_of_first);
      Communication communication =
          create_communication(group, params_of(shape()), support::config_for(GetParam().backend, sent.spec), options);
      const RankTensors tensors(sent, group.rank(), false);
      const Rank rank{communication, rounds, tensors};
      rank.play();  // loading and first deadlines are over
      for (int time = 0; time < 2; ++time) {
        DispatchResult result;
        support::check_ok(rank.dispatch(result), "dispatch");
        group.barrier();
        body(group.rank(), rank, result);
        group.barrier();
        result.handle = Handle();
        support::check_ok(communication.reset(), "reset");
        rank.play();
      }
      support::check_ok(communication.destroy(), "destroy");
    });
  }
};

// Rank 1 waits for the rows of the last rank, which does not combine; rank 0 needs only those of rank 1, and waits for
// both in its next dispatch.
TEST_P(CulpritsOnGpu, OneThatHoldsUpAllIsBlamedByAll) {
  const int last = shape().num_ranks - 1;
  play_faults(2, [last](int index, const Rank& rank, DispatchResult& result) {
    if (index == last) return;
    const Status combined = rank.combine(result);
    if (index == 0) {
      support::check_ok(combined, "the combine of rank 0");
      DispatchResult next;
      check_fault(rank.dispatch(next), StatusCode::kTimeout, last, Phase::kDispatch);
      check_fault(rank.communication.poll(), StatusCode::kTimeout, last, Phase::kDispatch);
    } else {
      check_fault(combined, StatusCode::kTimeout, last, Phase::kCombine);
    }
  });
}

// Where two rounds may be in flight.
using CirclesOnGpu = CulpritsOnGpu;

// Rank 0 waits for the combine of the others, who wait for its next dispatch.
TEST_P(CirclesOnGpu, HaveNoCulprit) {
  play_faults(2, [](int index, const Rank& rank, DispatchResult& result) {
    DispatchResult next;
    const Status status = index == 0 ? rank.combine(result) : rank.dispatch(next);
    support::check(status.code == StatusCode::kAborted, "got " + status.message());
    support::check_eq(status.fault.peer, -1, "the rank at fault (" + status.message() + ")");
  });
}

std::vector<BackendCase> cases(const std::vector<std::string_view>& backends) {
  std::vector<BackendCase> all;
  for (const std::string_view backend : backends) {
    Shape shape{.num_ranks = 3, .hidden_size = 128, .num_experts = 48};
    all.push_back({backend, shape});
    shape.spread = true;
    all.push_back({backend, shape});
    shape.max_tokens = 600;
    all.push_back({backend, shape});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes,
                         CulpritsOnGpu,
                         testing::ValuesIn(cases({"one_sided", "two_sided", "high_throughput", "low_latency"})),
                         [](const auto& of) { return title_of_case(of.param); });
INSTANTIATE_TEST_SUITE_P(Shapes, CirclesOnGpu, testing::ValuesIn(cases({"low_latency"})), [](const auto& of) {
  return title_of_case(of.param);
});

}  // namespace
}  // namespace tokenyard::gpu_tests
