// SPDX-License-Identifier: Apache-2.0
// Faults on GPUs: a rank that does not come is named within the deadline, misuse and disagreement are told, and in each
// case the device stays usable and the communication works again.
// Public bug reports of this kind: a rank that never dispatches leaves busy ranks stuck (C08), ids outside of the
// experts (C16, C26), a timeout without a reason that the next library call is blamed for (C134).
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <thread>

#include "gpu/backend_case.h"
#include "support/backends.h"
#include "support/check.h"
#include "support/errors.h"
#include "support/tensor.h"

namespace tokenyard::gpu_tests {
namespace {

using std::chrono::milliseconds;
using support::check;
using support::check_eq;
using support::check_fault;
using support::check_throws;
using support::RankTensors;
using support::RoundPlan;
using support::World;

constexpr int kCulprit = 1;
const milliseconds kDeadline = patient(milliseconds(300));
const milliseconds kLimit = 2 * kDeadline + milliseconds(500);

class FaultsOnGpu : public testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam().shape); }

  [[nodiscard]] static const Shape& shape() { return GetParam().shape; }

  // Every rank has tokens for every other.
  [[nodiscard]] static World world(std::uint64_t seed) {
    support::WorldSpec spec{.params = params_of(shape()), .num_ranks = shape().num_ranks, .seed = seed};
    for (int rank = 0; rank < shape().num_ranks; ++rank)
      spec.num_tokens.push_back(shape().max_tokens - rank);
    return support::make_world(spec);
  }

  [[nodiscard]] static RoundPlan plan() { return {.expert_dtype = shape().dtype, .output_dtype = shape().dtype}; }

  using Rank = std::function<void(const Group&, Communication&, DeviceRounds&)>;

  static void on_ranks(const Rank& body) {
    run_with_devices(shape(), [&](const Group& group, int device) {
      DeviceRounds rounds({.device = device});
      CommunicationOptions options = cuda_options(device);
      options.deadline = kDeadline;
      support::WorldSpec spec = world(1).spec;
      spec.extra_row_bytes = {32};
      Communication communication =
          create_communication(group, params_of(shape()), support::config_for(GetParam().backend, spec), options);
      play(communication, rounds, 1);  // loading and first deadlines are over
      group.barrier();
      body(group, communication, rounds);
      play(communication, rounds, 2);
      play(communication, rounds, 3);
      support::check_ok(communication.destroy(), "destroy");
    });
  }

  static void play(Communication& communication, DeviceRounds& rounds, std::uint64_t seed) {
    DispatchResult result;
    play_round(communication, world(seed), rounds.through_device(plan()), result);
  }

  // Copies, and a kernel that fills.
  static void check_device_works(DeviceRounds& rounds) {
    const std::byte value{0x5A};
    std::byte* memory = rounds.keep(64);
    std::byte seen{};
    check_cuda(cudaMemsetAsync(memory, static_cast<int>(value), 64, rounds.stream()), "cudaMemsetAsync after a fault");
    check_cuda(cudaMemcpyAsync(&seen, memory + 63, 1, cudaMemcpyDeviceToHost, rounds.stream()),
               "cudaMemcpyAsync after a fault");
    rounds.synchronize();
    check(seen == value, "what was copied after a fault");
    check_cuda(cudaGetLastError(), "what CUDA remembers of a fault");
  }

  static void reset(const Group& group, Communication& communication) {
    group.barrier();
    support::check_ok(communication.reset(), "reset");
    support::check_ok(communication.poll(), "poll after reset");
  }
};

TEST_P(FaultsOnGpu, RankThatNeverDispatchesIsNamed) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    if (group.rank() != kCulprit) {
      const World sent = world(4);
      const RankTensors tensors(sent, group.rank(), false);
      DispatchResult result;
      const support::Stopwatch stopwatch;
      const Status status = rounds.dispatch(communication, tensors.input(), {}, result);
      stopwatch.check_below(kLimit, "dispatch without rank 1");
      check_fault(status, StatusCode::kTimeout, kCulprit, Phase::kDispatch);
      check_eq(status.fault.rank, group.rank(), "the rank that reports");
      check_eq(status.fault.epoch, cuda_options(0).initial_epoch + 2, "the epoch");
      check(status.fault.waited >= kDeadline, "waited says less than the deadline");
      check(status.fault.waited < 2 * kDeadline, "waited says more than two deadlines");
      check_device_works(rounds);
      const support::Stopwatch again;
      check_fault(rounds.dispatch(communication, tensors.input(), {}, result), StatusCode::kTimeout, kCulprit,
                  Phase::kDispatch);
      again.check_below(kDeadline, "a call after a fault");
    }
    reset(group, communication);
  });
}

TEST_P(FaultsOnGpu, RankThatNeverCombinesIsNamed) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    const World sent = world(4);
    DispatchResult result;
    dispatch_and_check(communication, sent, rounds.through_device(plan()), result);
    if (group.rank() != kCulprit) {
      const support::Tensor rows = expert_output_for(shape(), result);
      support::Tensor output(shape().dtype, {sent.rank(group.rank()).num_tokens, shape().hidden_size});
      TensorView view = output.view();
      const support::Stopwatch stopwatch;
      const Status status = rounds.combine(communication, result.handle, {.expert_output = rows.view()}, {}, view);
      stopwatch.check_below(kLimit, "combine without rank 1");
      check_fault(status, StatusCode::kTimeout, kCulprit, Phase::kCombine);
      check(status.fault.waited >= kDeadline, "waited says less than the deadline");
      check_device_works(rounds);
    }
    reset(group, communication);
    if (group.rank() == kCulprit) {
      TensorView nowhere;
      check_throws(ErrorCode::kInvalidState, {"aborted"},
                   [&] { static_cast<void>(communication.combine(result.handle, {}, {}, nowhere)); });
    }
  });
}

TEST_P(FaultsOnGpu, LateIsNotAbsent) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    for (int round = 0; round < 3; ++round) {
      if (group.rank() == round % shape().num_ranks) std::this_thread::sleep_for(kDeadline / 2);
      play(communication, rounds, 5);
    }
    check_eq(communication.statistics().num_dispatches, 4, "num_dispatches");
  });
}

// The others learn of it from poll; their combine of that round does nothing, and so may its handle's end.
TEST_P(FaultsOnGpu, DispatchThatOneRankMisusesIsAbortedElsewhere) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    for (int time = 0; time < 4; ++time) {
      const World sent = world(6);
      const RankTensors tensors(sent, group.rank(), false);
      DispatchResult result;
      DispatchInput input = tensors.input();
      if (group.rank() == kCulprit) {
        input.hidden_states.shape[1] -= 1;
        input.topk_ids.shape[1] -= 1;
        check_throws(ErrorCode::kInvalidArgument, {},
                     [&] { static_cast<void>(rounds.dispatch(communication, input, {}, result)); });
      } else {
        const support::Stopwatch stopwatch;
        check_fault(rounds.dispatch(communication, input, {}, result), StatusCode::kAborted, kCulprit,
                    Phase::kDispatch);
        stopwatch.check_below(kDeadline, "a dispatch that rank 1 gave up");
        support::check_ok(communication.poll(), "an abort is told once");
        // A dispatch that waited for counts on the host has ended without a handle.
        if (time % 2 == 0 && GetParam().backend == "one_sided") {
          const support::Tensor rows = expert_output_for(shape(), result);
          support::Tensor output(shape().dtype, {tensors.num_tokens(), shape().hidden_size});
          TensorView view = output.view();
          support::check_ok(rounds.combine(communication, result.handle, {.expert_output = rows.view()}, {}, view),
                            "the combine of an aborted round");
        }
      }
      result.handle = Handle();
      if (time > 1) play(communication, rounds, 7);
    }
  });
}

// Everybody's combine of the round ends, also that of ranks that the culprit owes nothing.
TEST_P(FaultsOnGpu, CombineThatOneRankMisusesIsAbortedElsewhere) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    for (int time = 0; time < 2; ++time) {
      const World sent = world(8);
      DispatchResult result;
      dispatch_and_check(communication, sent, rounds.through_device(plan()), result);
      const support::Tensor rows = expert_output_for(shape(), result);
      support::Tensor output(shape().dtype, {sent.rank(group.rank()).num_tokens, shape().hidden_size});
      TensorView view = output.view();
      if (group.rank() == kCulprit) {
        view.shape[0] -= 1;
        check_throws(ErrorCode::kInvalidArgument, {}, [&] {
          static_cast<void>(rounds.combine(communication, result.handle, {.expert_output = rows.view()}, {}, view));
        });
      } else {
        const support::Stopwatch stopwatch;
        check_fault(rounds.combine(communication, result.handle, {.expert_output = rows.view()}, {}, view),
                    StatusCode::kAborted, kCulprit, Phase::kCombine);
        stopwatch.check_below(kDeadline, "a combine that rank 1 gave up");
      }
      play(communication, rounds, 9);
    }
  });
}

TEST_P(FaultsOnGpu, OtherPayloadsAreAMismatchOnEveryRank) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    const World sent = world(10);
    const RankTensors tensors(sent, group.rank(), false);
    // Others have weights alone to differ in.
    for (int time = communication.contract().takes_extra_payloads ? 0 : 1; time < 2; ++time) {
      DispatchInput input = tensors.input();
      support::Tensor extra(Dtype::kU8, {tensors.num_tokens(), group.rank() == kCulprit ? 12 : 16});
      const std::vector<TensorView> extras{extra.view()};
      if (time == 0) {
        input.extra_payloads = extras;
      } else if (group.rank() == kCulprit) {
        input.topk_weights = {};
      }
      DispatchResult result;
      check_throws(ErrorCode::kMismatch, {"rank 1"},
                   [&] { static_cast<void>(rounds.dispatch(communication, input, {}, result)); });
      support::check_ok(communication.poll(), "a mismatch is told once");
      result.handle = Handle();
      if (time == 0) play(communication, rounds, 11);
    }
  });
}

TEST_P(FaultsOnGpu, OtherSizesAreAMismatchOnEveryRank) {
  if (GetParam().backend != "one_sided") GTEST_SKIP() << "only one_sided is told a size that must agree";
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    support::WorldSpec spec = world(12).spec;
    spec.num_tokens.assign(static_cast<std::size_t>(shape().num_ranks), 3);
    const World sent = support::make_world(spec);
    const RankTensors tensors(sent, group.rank(), false);
    for (int time = 0; time < 2; ++time) {
      DispatchOptions options;
      options.runtime_max_tokens_per_rank = group.rank() == kCulprit ? 5 : 4;
      DispatchResult result;
      check_throws(ErrorCode::kMismatch, {"rank 1"},
                   [&] { static_cast<void>(rounds.dispatch(communication, tensors.input(), options, result)); });
      result.handle = Handle();
      play(communication, rounds, 13);
    }
  });
}

// Dropped as the invalid ids are, and counted; those are not, for they say that there is no expert.
TEST_P(FaultsOnGpu, IdsOutsideOfTheExpertsAreCounted) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    const std::int64_t outside[] = {shape().num_experts, -2, std::int64_t{1} << 40,
                                    std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int64_t>::min()};
    std::int64_t expected = 0;
    for (std::uint64_t seed = 20; seed < 23; ++seed) {
      World given = world(seed);
      given.spec.id_dtype = Dtype::kI64;
      World meant = given;  // what is left when those ids name nothing
      for (int rank = 0; rank < shape().num_ranks; ++rank) {
        for (std::size_t i = 0; i < given.rank(rank).ids.size(); i += 7) {
          given.rank(rank).ids[i] = outside[i % 5];
          meant.rank(rank).ids[i] = -1;
          if (rank == group.rank()) ++expected;
        }
      }
      const RankTensors wrong(given, group.rank(), false);
      RoundPlan through = rounds.through_device(plan());
      through.dispatch_with = [&](Communication& with, const DispatchInput& input, const DispatchOptions& options,
                                  DispatchResult& result) {
        DispatchInput spoilt = input;
        spoilt.topk_ids = wrong.input().topk_ids;
        return rounds.dispatch(with, spoilt, options, result);
      };
      DispatchResult result;
      play_round(communication, meant, through, result);
      check_eq(communication.statistics().num_invalid_ids, expected, "num_invalid_ids");
    }
    reset(group, communication);
    check_eq(communication.statistics().num_invalid_ids, expected, "num_invalid_ids after a reset");
  });
}

// A fault is one communication's own.
TEST_P(FaultsOnGpu, OtherCommunicationsGoOn) {
  on_ranks([](const Group& group, Communication& communication, DeviceRounds& rounds) {
    CommunicationOptions options = cuda_options(rounds.device());
    Communication other = create_communication(group, params_of(shape()),
                                               support::config_for(GetParam().backend, world(1).spec), options);
    if (group.rank() != kCulprit) {
      const World sent = world(4);
      const RankTensors tensors(sent, group.rank(), false);
      DispatchResult result;
      check_fault(rounds.dispatch(communication, tensors.input(), {}, result), StatusCode::kTimeout, kCulprit,
                  Phase::kDispatch);
    }
    group.barrier();
    play(other, rounds, 14);
    support::check_ok(other.poll(), "poll of another communication");
    reset(group, communication);
    play(other, rounds, 15);
    support::check_ok(other.destroy(), "destroy");
  });
}

std::vector<Shape> shapes() {
  return {{.num_ranks = 3, .hidden_size = 128, .max_tokens = 40},
          {.num_ranks = 2, .hidden_size = 128, .max_tokens = 600},
          {.num_ranks = 2, .hidden_size = 128, .max_tokens = 40, .spread = true}};
}

std::vector<BackendCase> cases() {
  std::vector<BackendCase> all = cases_of(shapes());
  for (const Shape& shape : shapes())
    all.push_back({"high_throughput", shape});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, FaultsOnGpu, testing::ValuesIn(cases()), [](const auto& of) {
  return title_of_case(of.param);
});

}  // namespace
}  // namespace tokenyard::gpu_tests
