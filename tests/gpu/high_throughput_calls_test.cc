// SPDX-License-Identifier: Apache-2.0
// `high_throughput` on GPUs beside plain rounds: handles that replay and combine again, tensors that are too small,
// calls that ranks give up or do not agree in.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/device_ranks.h"
#include "support/casts.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using support::check;
using support::check_eq;
using support::check_ok;
using support::RankTensors;
using support::RoundPlan;
using support::Tensor;
using support::World;

constexpr Shape kShape{.num_ranks = 3, .hidden_size = 128, .top_k = 4, .num_experts = 10};

World world_of(const Shape& shape, std::uint64_t seed) {
  return support::make_world({.params = params_of(shape), .num_ranks = shape.num_ranks, .seed = seed});
}

TEST(HighThroughputCallsOnGpu, HandlesReplayTheirRoutes) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const World world = world_of(kShape, 3);
    RoundPlan plan = rounds.through_device({.weights_back = true, .num_biases = 1});
    DispatchResult first;
    play_round(communication, world, plan, first);
    DispatchResult other;
    for (std::uint64_t round = 0; round < 4; ++round) {
      play_round(communication, world_of(kShape, 90 + round), plan, other);
      const World changed = support::with_new_rows(world, 50 + round);
      const RankTensors tensors(changed, communication.rank(), round % 2 == 1);
      DispatchResult again;
      DispatchOptions options{.replay = &first.handle};
      RoundPlan replay = plan;
      replay.seed = 70 + round;
      if (round % 2 == 1) options.num_worst_tokens = replay.num_worst_tokens = kShape.num_ranks * kShape.max_tokens;
      check_ok(rounds.dispatch(communication, tensors.input(false), options, again), "replay");
      support::check_result(communication, changed, replay, again, false);
      support::combine_and_check(communication, changed, replay, again, again.handle);
    }
  });
}

// Who has fixed rows waits for nothing on the host, and still tells the others what theirs wait for.
TEST(HighThroughputCallsOnGpu, RowsMayBeFixedOnSomeRanksOnly) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < 6; ++round) {
      RoundPlan plan{.weights_back = true};
      if ((communication.rank() + round) % 3 == 0) plan.num_worst_tokens = kShape.num_ranks * kShape.max_tokens;
      play_round(communication, world_of(kShape, 20 + static_cast<std::uint64_t>(round)), rounds.through_device(plan),
                 result);
    }
  });
}

TEST(HighThroughputCallsOnGpu, AHandleCombinesAgain) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  for (const bool zero_copy : {false, true}) {
    run_on_devices(kShape, HighThroughputConfig{}, {.zero_copy = zero_copy},
                   [&](Communication& communication, DeviceRounds& rounds) {
                     const World world = world_of(kShape, 4);
                     RoundPlan plan = rounds.through_device({.weights_back = true});
                     DispatchResult result;
                     for (int round = 0; round < 2; ++round) {
                       dispatch_and_check(communication, world, plan, result);
                       for (std::uint64_t seed = 1; seed < 5; ++seed) {
                         plan.seed = seed;
                         combine_and_check(communication, world, plan, result, result.handle);
                       }
                     }
                   });
  }
}

TEST(HighThroughputCallsOnGpu, OverflowKeepsTheRowsForASecondReceive) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const RoundPlan plan = rounds.through_device({});
    DispatchResult result;
    for (std::uint64_t round = 0; round < 3; ++round) {
      const World world = world_of(kShape, 30 + round);
      const RankTensors tensors(world, communication.rank(), false);
      const auto expected = expect_dispatch(world, communication.rank(), support::layout_rule(communication, plan));
      check(expected.total_rows > 1, "too few rows for this test");
      Tensor few(Dtype::kBf16, {expected.total_rows - 1, kShape.hidden_size});
      Tensor enough(Dtype::kBf16, {expected.total_rows + 2, kShape.hidden_size});
      DispatchResult small;
      small.hidden_states = few.view();
      DispatchResult large;
      large.hidden_states = enough.view();
      const Status status = rounds.dispatch(communication, tensors.input(), {.into = &small}, result);
      check(status.code == StatusCode::kOverflow, "expected overflow, got: " + status.message());
      check_eq(status.needed_rows, expected.total_rows, "needed_rows");
      check_ok(rounds.receive(communication, {.into = &large}, result), "second dispatch_receive");
      support::check_result(communication, world, plan, result);
      check_eq(result.hidden_states.data, enough.view().data, "address of the caller's rows");
      enough.check_guards("the tensor that was large enough");
      support::combine_and_check(communication, world, plan, result, result.handle);
    }
  });
}

// The rank that made the mistake throws, the others hear of it, with counts on the host or not, and go on.
TEST(HighThroughputCallsOnGpu, MisuseAbortsTheRoundForAll) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const World world = world_of(kShape, 5);
    const RankTensors tensors(world, communication.rank(), false);
    const RoundPlan plan = rounds.through_device({});
    DispatchResult result;
    for (int round = 0; round < 4; ++round) {
      DispatchOptions options;
      if (round % 2 == 1) options.num_worst_tokens = kShape.num_ranks * kShape.max_tokens;
      if (communication.rank() == round % kShape.num_ranks) {
        DispatchInput wrong = tensors.input();
        wrong.hidden_states.shape[1] -= 1;
        support::check_throws(ErrorCode::kInvalidArgument, {"hidden_states"},
                              [&] { (void)rounds.dispatch(communication, wrong, options, result); });
      } else {
        const Status status = rounds.dispatch(communication, tensors.input(), options, result);
        check(status.code == StatusCode::kAborted, "expected aborted, got: " + status.message());
        check_eq(status.fault.peer, round % kShape.num_ranks, "who gave up");
      }
      play_round(communication, world, plan, result);
    }
  });
}

TEST(HighThroughputCallsOnGpu, DisagreementIsAnErrorOnAll) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const World world = world_of(kShape, 6);
    const RankTensors tensors(world, communication.rank(), false);
    const RoundPlan plan = rounds.through_device({});
    DispatchResult result;
    for (int round = 0; round < 2; ++round) {
      DispatchOptions options;
      if (round == 1) options.num_worst_tokens = kShape.num_ranks * kShape.max_tokens;
      DispatchInput input = tensors.input();
      if (communication.rank() == 1) input.topk_weights = {};
      support::check_throws(ErrorCode::kMismatch, {"rank"},
                            [&] { (void)rounds.dispatch(communication, input, options, result); });
      play_round(communication, world, plan, result);
    }
  });
}

TEST(HighThroughputCallsOnGpu, AWrongCombineEndsTheRoundForAll) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const World world = world_of(kShape, 7);
    const RoundPlan plan = rounds.through_device({});
    DispatchResult result;
    for (int round = 0; round < 2; ++round) {
      dispatch_and_check(communication, world, plan, result);
      const std::int64_t rows = result.counts.num_rows + (communication.rank() == 2 ? 1 : 0);
      const Tensor expert_output(Dtype::kBf16, {rows, kShape.hidden_size});
      Tensor sums(Dtype::kBf16, {world.rank(communication.rank()).num_tokens, kShape.hidden_size});
      TensorView output = sums.view();
      const auto combine = [&] {
        return rounds.combine(communication, result.handle, {.expert_output = expert_output.view()}, {}, output);
      };
      if (communication.rank() == 2) {
        support::check_throws(ErrorCode::kInvalidArgument, {"expert_output"}, [&] { (void)combine(); });
      } else {
        const Status status = combine();
        check(status.code == StatusCode::kAborted, "expected aborted, got: " + status.message());
      }
      play_round(communication, world, plan, result);
    }
  });
}

// As the result of a dispatch says it.
TEST(HighThroughputCallsOnGpu, RoutesMayBeAskedFor) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_on_devices(kShape, HighThroughputConfig{}, {}, [&](Communication& communication, DeviceRounds& rounds) {
    auto* query = communication.get<RouteQuery>();
    check(query != nullptr, "no RouteQuery");
    const int rank = communication.rank();
    for (const bool strided : {false, true}) {
      const World world = world_of(kShape, strided ? 8 : 9);
      const RankTensors tensors(world, rank, strided);
      const TensorView ids = rounds.to_device(tensors.input().topk_ids);
      rounds.synchronize();
      const Layout layout = query->layout(ids);
      std::vector<std::int32_t> per_rank(static_cast<std::size_t>(kShape.num_ranks), 0);
      const std::int64_t tokens = world.rank(rank).num_tokens;
      check_eq(layout.is_token_in_rank.num_rows(), tokens, "rows of is_token_in_rank");
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int to = 0; to < kShape.num_ranks; ++to) {
          const bool sent = support::travels(world, rank, token, to, OutputLayout::kCompact);
          per_rank[static_cast<std::size_t>(to)] += sent ? 1 : 0;
          const int flag = std::to_integer<int>(support::row_of(layout.is_token_in_rank, token)[to]);
          check_eq(flag, sent ? 1 : 0, "is_token_in_rank");
        }
      }
      for (int to = 0; to < kShape.num_ranks; ++to) {
        check_eq(layout.num_tokens_per_rank[static_cast<std::size_t>(to)], per_rank[static_cast<std::size_t>(to)],
                 "num_tokens_per_rank");
      }
      DispatchResult result;
      play_round(communication, world, rounds.through_device({}), result);
    }
  });
}

// What experts that give back their rows make of a token: its row, as many times as there are ranks that it went to.
std::vector<std::byte> echoed(const World& world, int rank, std::int64_t token) {
  int copies = 0;
  for (int to = 0; to < world.spec.num_ranks; ++to)
    copies += support::travels(world, rank, token, to, OutputLayout::kCompact) ? 1 : 0;
  const support::Rows& rows = world.rank(rank).hidden;
  std::vector<std::byte> sums(static_cast<std::size_t>(rows.row_bytes()));
  for (std::int64_t i = 0; i < rows.columns; ++i) {
    float sum = 0;
    for (int copy = 0; copy < copies; ++copy)
      sum += support::load(rows.dtype, rows.row(token).data(), i);
    support::store(rows.dtype, sums.data(), i, sum);
  }
  return sums;
}

// With fewer tokens at each launch.
void launch_rounds(Communication& communication,
                   const DeviceRounds& rounds,
                   const World& world,
                   const TensorView& count,
                   const TensorView& output,
                   cudaGraphExec_t captured) {
  const int rank = communication.rank();
  const std::int64_t all = world.rank(rank).num_tokens;
  Tensor sums(Dtype::kBf16, {all, kShape.hidden_size});
  Tensor num_tokens(Dtype::kI32, {1, 1});
  const std::vector<std::byte> untouched(static_cast<std::size_t>(sums.row_bytes()), std::byte{0xFF});
  for (std::int64_t round = 0; round < 5; ++round) {
    const auto now = static_cast<std::int32_t>(std::max<std::int64_t>(all - round * (rank + 1), 0));
    std::memcpy(num_tokens.row(0), &now, sizeof(now));
    check_cuda(cudaMemcpyAsync(count.data, num_tokens.row(0), sizeof(now), cudaMemcpyHostToDevice, rounds.stream()),
               "cudaMemcpyAsync");
    check_cuda(cudaMemsetAsync(output.data, 0xFF, static_cast<std::size_t>(all * sums.row_bytes()), rounds.stream()),
               "cudaMemsetAsync");
    check_cuda(cudaGraphLaunch(captured, rounds.stream()), "cudaGraphLaunch");
    rounds.to_host(sums.view(), output);
    rounds.synchronize();
    check_ok(communication.poll(), "poll");
    for (std::int64_t token = 0; token < all; ++token) {
      const std::vector<std::byte> expected = token < now ? echoed(world, rank, token) : untouched;
      check(std::memcmp(sums.row(token), expected.data(), expected.size()) == 0,
            "row " + std::to_string(token) + " of launch " + std::to_string(round));
    }
  }
}

TEST(HighThroughputCallsOnGpu, RoundsOfFixedRowsMayBeCaptured) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  run_with_devices(kShape, [&](const Group& group, int device) {
    DeviceRounds rounds({.device = device});
    Communication communication =
        create_communication(group, params_of(kShape), HighThroughputConfig{}, cuda_options(device));
    const World world = world_of(kShape, 12);
    const RankTensors tensors(world, communication.rank(), false);
    const Tensor some(Dtype::kI32, {1, 1});
    const Tensor sums(Dtype::kBf16, {world.rank(communication.rank()).num_tokens, kShape.hidden_size});
    const TensorView count = rounds.to_device(some.view());
    TensorView output = rounds.to_device(sums.view());
    DispatchInput input = tensors.input();
    input.hidden_states = rounds.to_device(input.hidden_states);
    input.topk_ids = rounds.to_device(input.topk_ids);
    input.topk_weights = {};
    input.num_tokens_on_device = count.as<std::int32_t>();
    rounds.synchronize();
    const Stream stream{rounds.stream()};
    DispatchResult result;
    check_cuda(cudaStreamBeginCapture(rounds.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    const DispatchOptions options{.num_worst_tokens = kShape.num_ranks * kShape.max_tokens, .stream = stream};
    const Status sent = communication.dispatch(input, options, result);
    const Status back =
        communication.combine(result.handle, {.expert_output = result.hidden_states}, {.stream = stream}, output);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t captured = nullptr;
    check_cuda(cudaStreamEndCapture(rounds.stream(), &graph), "cudaStreamEndCapture");
    check(sent.ok() && back.ok(), "dispatch and combine of a captured round");
    check_cuda(cudaGraphInstantiate(&captured, graph, 0), "cudaGraphInstantiate");
    group.barrier();  // a graph is not made beside kernels that wait for its rank
    launch_rounds(communication, rounds, world, count, output, captured);
    group.barrier();
    check_cuda(cudaGraphExecDestroy(captured), "cudaGraphExecDestroy");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    result.handle = Handle();
    check_ok(communication.destroy(), "destroy");
  });
}

TEST(HighThroughputCallsOnGpu, MoreExpertsThanKernelsTellApartAreRefused) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  support::run_ranks(1, [](const Group& group) {
    support::check_throws(ErrorCode::kUnsupported, {"num_experts is 65536", "at most 65535"}, [&] {
      (void)create_communication(group,
                                 params_of({.num_ranks = 1, .hidden_size = 16, .num_experts = 65536, .max_tokens = 4}),
                                 HighThroughputConfig{}, cuda_options(0));
    });
  });
}

TEST(HighThroughputCallsOnGpu, ByteBudgetsAreRefused) {
  TOKENYARD_NEEDS_DEVICES_OF(kShape);
  support::run_ranks(1, [](const Group& group) {
    support::check_throws(ErrorCode::kUnsupported, {"buffer_bytes"}, [&] {
      (void)create_communication(group, params_of({.num_ranks = 1}), HighThroughputConfig{.buffer_bytes = 64 << 20},
                                 cuda_options(0));
    });
  });
}

}  // namespace
}  // namespace tokenyard::gpu_tests
