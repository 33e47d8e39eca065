// SPDX-License-Identifier: Apache-2.0
// Two communications on the same queues, for tests of how they get in each other's way.
// Thread rule: one object per rank.
#pragma once

#include "conformance/small_spec.h"

namespace tokenyard::support {

inline constexpr int kQueueRanks = 3;

// Two communications of different widths on the same queues, and a world of each in which all ranks owe all others.
struct QueuePair {
  explicit QueuePair(const Group& group, const CommunicationOptions& options = test_options())
      : world(make_world(spec_of(24))),
        other_world(make_world(spec_of(40))),
        tensors(world, group.rank(), false),
        other_tensors(other_world, group.rank(), false),
        one(communication_for(group, "two_sided", world.spec, options)),
        other(communication_for(group, "two_sided", other_world.spec, options)) {}

  static WorldSpec spec_of(int hidden_size) {
    WorldSpec spec = all_to_all_spec(kQueueRanks, 4);
    spec.params.hidden_size = hidden_size;
    return spec;
  }

  void play_both() {
    play_round(one, world, {}, result);
    play_round(other, other_world, {}, other_result);
  }

  void reset_both(const Group& group) {
    group.barrier();
    check_ok(one.reset(), "reset");
    check_ok(other.reset(), "reset of the other");
    check_ok(one.poll(), "poll after the resets");
    check_ok(other.poll(), "poll of the other after the resets");
    for (int round = 0; round < 3; ++round)
      play_both();
  }

  World world, other_world;
  RankTensors tensors, other_tensors;
  Communication one, other;
  DispatchResult result, other_result;
};

// Memory for the expert output and the output of a round of `QueuePair`.
struct CombineTensors {
  explicit CombineTensors(int hidden_size)
      : rows(Dtype::kBf16, {kQueueRanks * 6, hidden_size}), output(Dtype::kBf16, {6, hidden_size}) {}

  [[nodiscard]] CombineInput input() const { return {.expert_output = rows.view()}; }

  Tensor rows, output;
  TensorView view = output.view();
};

}  // namespace tokenyard::support
