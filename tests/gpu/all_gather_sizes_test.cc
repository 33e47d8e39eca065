// SPDX-License-Identifier: Apache-2.0
// `all_gather` on GPUs: sizes that ranks are told or find out, what ends a round that goes wrong, and what only a GPU
// has: counts in device memory, graphs.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "gpu/device_ranks.h"
#include "support/casts.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using support::RoundPlan;
using support::World;
using support::WorldSpec;

constexpr AllGatherConfig kConfig{.extra_payload_bytes_per_token = 24};

const Shape kSmall{.num_ranks = 3, .hidden_size = 64, .max_tokens = 30};

class AllGatherSizes : public testing::Test {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(kSmall); }

  static WorldSpec spec() {
    return {.params = params_of(kSmall),
            .num_ranks = kSmall.num_ranks,
            .extra_row_bytes = {24},
            .num_tokens = {9, 0, 30},
            .seed = 5};
  }

  static void play(Communication& communication, DeviceRounds& rounds, DispatchResult& result, bool told) {
    const RoundPlan plan{.seed = 2, .tell_num_tokens = told};
    play_round(communication, support::make_world(spec()), rounds.through_device(plan), result);
  }
};

// What each rank is told, or nothing.
using Told = std::vector<std::vector<std::int64_t>>;

TEST_F(AllGatherSizes, AreCheckedAgainstWhatRanksSend) {
  const std::vector<Told> wrong{
      {{9, 1, 30}, {9, 0, 30}, {9, 0, 30}},    // one rank expects another's to be other than they are
      {{9, 30, 29}, {8, 0, 29}, {8, 30, 30}},  // all do
      {{9, 1, 30}, {}, {}},                    // those that do not know find out that one knows wrong
      {{9, 1, 30}, {}, {9, 1, 30}},            // and that two do
  };
  const World world = support::make_world(spec());
  run_on_devices(kSmall, kConfig, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (const Told& told : wrong) {
      const support::RankTensors tensors(world, communication.rank(), false);
      const auto& own = told[static_cast<std::size_t>(communication.rank())];
      support::check_throws(ErrorCode::kMismatch, {}, [&] {
        (void)rounds.dispatch(communication, tensors.input(), {.num_tokens_per_rank = own}, result);
      });
      play(communication, rounds, result, true);
      play(communication, rounds, result, false);
    }
  });
}

TEST_F(AllGatherSizes, NeedNotBeToldToAll) {
  run_on_devices(kSmall, kConfig, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < 4; ++round)
      play(communication, rounds, result, communication.rank() == round % 3);
  });
}

TEST_F(AllGatherSizes, BeyondTheWindowAreMisuseThatOthersHearOf) {
  const World world = support::make_world(spec());
  run_on_devices(kSmall, kConfig, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < 4; ++round) {
      const support::RankTensors tensors(world, communication.rank(), false);
      std::vector<std::int64_t> sizes{9, 0, 30};
      if (communication.rank() == 2) {
        sizes[1] = round % 2 == 0 ? 31 : -1;
        support::check_throws(ErrorCode::kInvalidArgument, {"num_tokens_per_rank", "for rank 1"}, [&] {
          (void)rounds.dispatch(communication, tensors.input(), {.num_tokens_per_rank = sizes}, result);
        });
      } else {
        if (round < 2) sizes.clear();
        support::check_fault(rounds.dispatch(communication, tensors.input(), {.num_tokens_per_rank = sizes}, result),
                             StatusCode::kAborted, 2, Phase::kDispatch);
      }
      play(communication, rounds, result, round % 2 == 0);
    }
  });
}

TEST_F(AllGatherSizes, OfTheCallersTensorsMayBeTooSmallAtFirst) {
  const World world = support::make_world(spec());
  run_on_devices(kSmall, kConfig, {.halves = true}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (const bool told : {true, false}) {
      const std::vector<std::int64_t> sizes{9, 0, 30};
      support::Tensor small(Dtype::kBf16, {38, kSmall.hidden_size});
      DispatchResult into;
      into.hidden_states = small.view();
      DispatchOptions options{.into = &into};
      if (told) options.num_tokens_per_rank = sizes;
      const support::RankTensors tensors(world, communication.rank(), false);
      const Status status = rounds.dispatch(communication, tensors.input(), options, result);
      support::check(status.code == StatusCode::kOverflow && status.needed_rows == 39, "one row too few");
      DispatchOptions with_room{.stream = {rounds.stream()}};
      support::check(communication.get<SplitPhases>()->dispatch_receive(with_room, result).ok(), "received again");
      rounds.synchronize();
      support::check_ok(communication.poll(), "received again");
      support::Tensor got(Dtype::kBf16, {39, kSmall.hidden_size});
      rounds.to_host(got.view(), result.hidden_states);
      rounds.synchronize();
      std::int64_t row = 0;
      for (const support::RankData& data : world.ranks) {
        for (std::int64_t token = 0; token < data.num_tokens; ++token, ++row)
          support::check_bytes(got.row(row), data.hidden.row(token), "row " + std::to_string(row));
      }
      play(communication, rounds, result, told);
    }
  });
}

TEST_F(AllGatherSizes, CombineTakesMemoryOfTheWindowBeforeTheDispatch) {
  WorldSpec equal = spec();
  equal.num_tokens = {30, 30, 30};
  const World world = support::make_world(equal);
  run_on_devices(kSmall, kConfig, {.zero_copy = true}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < 5; ++round) {
      const TensorView window = communication.combine_input(90, Dtype::kBf16);
      support::check(window.defined(), "memory of the window");
      // Written before the other ranks are heard of: they may still read what the last combine left there.
      check_cuda(cudaMemsetAsync(window.data, 0xFF, 128, rounds.stream()), "cudaMemsetAsync");
      const RoundPlan plan{.seed = static_cast<std::uint64_t>(round), .tell_num_tokens = round % 2 == 0};
      play_round(communication, world, rounds.through_device(plan), result);
    }
  });
}

TEST_F(AllGatherSizes, OfARankThatStaysAwayAreATimeoutThatNamesIt) {
  const World world = support::make_world(spec());
  support::run(kSmall.kind, kSmall.num_ranks, [&](const Group& group) {
    DeviceRounds rounds({});
    CommunicationOptions options = cuda_options(0);
    options.deadline = options.first_round_deadline = patient(std::chrono::milliseconds(300));
    Communication communication = create_communication(group, params_of(kSmall), kConfig, options);
    DispatchResult result;
    const std::vector<std::int64_t> sizes{9, 0, 30};
    for (const bool told : {false, true}) {
      const support::RankTensors tensors(world, group.rank(), false);
      DispatchOptions dispatch;
      if (told) dispatch.num_tokens_per_rank = sizes;
      if (group.rank() != 2) {
        support::check_fault(rounds.dispatch(communication, tensors.input(), dispatch, result), StatusCode::kTimeout, 2,
                             Phase::kDispatch);
      }
      group.barrier();
      support::check_ok(communication.reset(), "reset");
      play(communication, rounds, result, told);
      support::check_ok(rounds.dispatch(communication, tensors.input(), dispatch, result), "dispatch");
      const std::int64_t own = sizes[static_cast<std::size_t>(group.rank())];
      const support::Tensor rows(Dtype::kBf16, {39, kSmall.hidden_size});
      const support::Tensor sums(Dtype::kBf16, {own, kSmall.hidden_size});
      TensorView output = sums.view();
      if (group.rank() == 0) {
        support::check_fault(rounds.combine(communication, result.handle, {.expert_output = rows.view()}, {}, output),
                             StatusCode::kTimeout, 2, Phase::kCombine);
      } else if (group.rank() == 1) {  // without tokens it waits for nobody
        support::check_ok(rounds.combine(communication, result.handle, {.expert_output = rows.view()}, {}, output),
                          "combine");
      }
      group.barrier();
      support::check_ok(communication.reset(), "reset");
      play(communication, rounds, result, !told);
    }
    support::check_ok(communication.destroy(), "destroy");
  });
}

class AllGatherInGraphs : public AllGatherSizes {
 protected:
  static constexpr std::int64_t kTokens = 30;

  // Row t of `rank` in replay n, of bytes that no other row has all of.
  static std::vector<std::byte> row_bytes(int rank, std::int64_t token, int replay) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(kSmall.hidden_size) * 2);
    for (std::size_t i = 0; i < bytes.size(); i += 2) {
      const int value = 0x3F00 + rank * 40 + static_cast<int>(token) + 7 * replay + static_cast<int>(i % 16);
      bytes[i] = static_cast<std::byte>(value & 0xFF);
      bytes[i + 1] = static_cast<std::byte>(value >> 8);
    }
    return bytes;
  }

  static support::Tensor rows_of(int rank, int replay) {
    support::Tensor rows(Dtype::kBf16, {kTokens, kSmall.hidden_size});
    for (std::int64_t token = 0; token < kTokens; ++token) {
      const std::vector<std::byte> bytes = row_bytes(rank, token, replay);
      std::copy(bytes.begin(), bytes.end(), rows.row(token));
    }
    return rows;
  }
};

TEST_F(AllGatherInGraphs, RoundsReplayWithNewRowsAndCounts) {
  support::run(kSmall.kind, kSmall.num_ranks, [&](const Group& group) {
    DeviceRounds rounds({});
    Communication communication = create_communication(group, params_of(kSmall), kConfig, cuda_options(0));
    const int rank = communication.rank();
    cudaStream_t stream = rounds.stream();
    const std::vector<std::int64_t> sizes(3, kTokens);
    support::Tensor host = rows_of(rank, 0);
    const TensorView rows = rounds.to_device(host.view());
    support::Tensor sums(Dtype::kBf16, {kTokens, kSmall.hidden_size});
    TensorView output = rounds.to_device(sums.view());
    support::Tensor count(Dtype::kI32, {1, 1});
    const TensorView on_device = rounds.to_device(count.view());
    rounds.synchronize();
    DispatchResult result;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    DispatchInput input;
    input.hidden_states = rows;
    input.num_tokens_on_device = on_device.as<std::int32_t>();
    const Status sent = communication.dispatch(input, {.num_tokens_per_rank = sizes, .stream = {stream}}, result);
    support::check(sent.code == StatusCode::kEnqueued, "dispatch in a capture");
    support::check_eq(result.hidden_states.shape[0], 3 * kTokens, "rows of the result");
    const TensorView gathered = result.hidden_states;
    const TensorView counts = result.counts.tokens_per_source_on_device;
    const Status combined =
        communication.combine(result.handle, {.expert_output = gathered}, {.stream = {stream}}, output);
    support::check(combined.code == StatusCode::kEnqueued, "combine in a capture");
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    check_cuda(cudaGraphUpload(exec, stream), "cudaGraphUpload");
    rounds.synchronize();
    group.barrier();  // making a graph may wait for the device, on which another rank's kernel would wait for this one
    for (int replay = 0; replay < 5; ++replay) {
      host = rows_of(rank, replay);
      check_cuda(cudaMemcpyAsync(rows.data, host.view().data, static_cast<std::size_t>(kTokens) * 128,
                                 cudaMemcpyHostToDevice, stream),
                 "cudaMemcpyAsync");
      count.view().as<std::int32_t>()[0] = static_cast<std::int32_t>((replay * 13 + rank * 7) % (kTokens + 1));
      check_cuda(cudaMemcpyAsync(on_device.data, count.view().data, 4, cudaMemcpyHostToDevice, stream),
                 "cudaMemcpyAsync");
      check_cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
      support::Tensor got(Dtype::kBf16, {3 * kTokens, kSmall.hidden_size});
      support::Tensor tokens(Dtype::kI32, {1, 3});
      rounds.to_host(got.view(), gathered);
      rounds.to_host(tokens.view(), counts);
      rounds.to_host(sums.view(), output);
      rounds.synchronize();
      support::check_ok(communication.poll(), "a replay");
      for (int source = 0; source < 3; ++source) {
        const int expected = static_cast<int>((replay * 13 + source * 7) % (kTokens + 1));
        support::check_eq(tokens.view().as<std::int32_t>()[source], expected, "tokens of a source");
        for (std::int64_t token = 0; token < expected; ++token) {
          support::check_bytes(got.row(source * kTokens + token), row_bytes(source, token, replay), "a gathered row");
        }
      }
      // Three equal rows: exact in fp32, and rounded once.
      const auto own = static_cast<std::int64_t>((replay * 13 + rank * 7) % (kTokens + 1));
      for (std::int64_t token = 0; token < own; ++token) {
        for (std::int64_t column = 0; column < kSmall.hidden_size; ++column) {
          const float value = support::load(Dtype::kBf16, host.row(token), column);
          const auto want = support::encode(Dtype::kBf16, value + value + value);
          const auto* bits = reinterpret_cast<const std::uint16_t*>(sums.row(token));
          support::check_eq(std::uint32_t{bits[column]}, want, "a sum");
        }
      }
    }
    group.barrier();
    check_cuda(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    support::check_ok(communication.destroy(), "destroy");
  });
}

TEST_F(AllGatherInGraphs, RefuseToWaitForSizes) {
  run_on_devices(kSmall, kConfig, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    play(communication, rounds, result, true);
    support::Tensor host = rows_of(communication.rank(), 0);
    DispatchInput input;
    input.hidden_states = rounds.to_device(host.view());
    cudaStream_t captured = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cudaStreamBeginCapture(captured, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    support::check_throws(ErrorCode::kInvalidState, {"num_tokens_per_rank"},
                          [&] { (void)communication.dispatch(input, {.stream = {captured}}, result); });
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(captured, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    play(communication, rounds, result, false);
    check_cuda(cudaStreamDestroy(captured), "cudaStreamDestroy");
  });
}

}  // namespace
}  // namespace tokenyard::gpu_tests
