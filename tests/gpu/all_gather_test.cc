// SPDX-License-Identifier: Apache-2.0
// `all_gather` on GPUs: every round against the plain reference, byte for byte, as the host engine is checked; and what
// only a GPU has: counts in device memory, graphs.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/device_ranks.h"
#include "support/casts.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

using support::RoundPlan;
using support::Skew;
using support::World;
using support::WorldSpec;

constexpr AllGatherConfig kConfig{.extra_payload_bytes_per_token = 31};

WorldSpec spec_of(const Shape& shape, std::uint64_t seed) {
  return {.params = params_of(shape),
          .num_ranks = shape.num_ranks,
          .skew = static_cast<Skew>(seed % support::kNumSkews),
          .id_dtype = seed % 2 == 1 ? Dtype::kI64 : Dtype::kI32,
          .extra_row_bytes = {24, 7},
          .router_columns = seed % 3 == 0 ? shape.num_experts : 0,
          .seed = seed};
}

// The reference takes long for many tokens.
int rounds_of(const Shape& shape, int num_rounds) {
  return shape.max_tokens > 500 || shape.kind == support::RankKind::kProcesses ? 3 : num_rounds;
}

class AllGatherOnGpu : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam()); }
};

TEST_P(AllGatherOnGpu, RoundsEqualTheReference) {
  const Shape shape = GetParam();
  run_on_devices(shape, kConfig, {}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < rounds_of(shape, 12); ++round) {
      const World world = support::make_world(spec_of(shape, static_cast<std::uint64_t>(round) + 11));
      const bool odd = round % 2 == 1;
      const RoundPlan plan{.seed = static_cast<std::uint64_t>(round) + 5,
                           .expert_dtype = round % 4 == 3 ? Dtype::kF32 : shape.dtype,
                           .output_dtype = odd ? Dtype::kF32 : shape.dtype,
                           .strided = round % 3 == 1,
                           .caller_tensors = round % 4 == 2,
                           .tell_num_tokens = round % 3 != 0};
      play_round(communication, world, rounds.through_device(plan), result);
    }
  });
}

TEST_P(AllGatherOnGpu, ExpertOutputMayLieInTheWindow) {
  const Shape shape = GetParam();
  run_on_devices(shape, kConfig, {.zero_copy = true}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < rounds_of(shape, 4); ++round) {
      WorldSpec spec = spec_of(shape, static_cast<std::uint64_t>(round) + 1);
      // The window has room for expert output when all ranks bring as much.
      if (round % 4 != 3) spec.num_tokens.assign(static_cast<std::size_t>(shape.num_ranks), shape.max_tokens - round);
      const World world = support::make_world(spec);
      const RoundPlan plan{.seed = spec.seed,
                           .expert_dtype = shape.dtype,
                           .output_dtype = shape.dtype,
                           .tell_num_tokens = round % 2 == 0};
      play_round(communication, world, rounds.through_device(plan), result);
    }
  });
}

TEST_P(AllGatherOnGpu, AnyNumberOfMultiprocessorsGivesTheSameBytes) {
  const Shape shape = GetParam();
  for (const int num_sms : {1, 3}) {
    run_on_devices(shape, kConfig, {.num_sms = num_sms}, [&](Communication& communication, DeviceRounds& rounds) {
      DispatchResult result;
      for (const bool told : {false, true}) {
        const World world = support::make_world(spec_of(shape, 3));
        const RoundPlan plan{
            .seed = 9, .expert_dtype = shape.dtype, .output_dtype = shape.dtype, .tell_num_tokens = told};
        play_round(communication, world, rounds.through_device(plan), result);
      }
    });
  }
}

TEST_P(AllGatherOnGpu, PhasesMayGoInHalves) {
  const Shape shape = GetParam();
  run_on_devices(shape, kConfig, {.halves = true}, [&](Communication& communication, DeviceRounds& rounds) {
    DispatchResult result;
    for (int round = 0; round < rounds_of(shape, 4); ++round) {
      const World world = support::make_world(spec_of(shape, static_cast<std::uint64_t>(round) + 21));
      const RoundPlan plan{.seed = 4,
                           .expert_dtype = shape.dtype,
                           .output_dtype = shape.dtype,
                           .caller_tensors = round == 1,
                           .tell_num_tokens = round % 2 == 0};
      play_round(communication, world, rounds.through_device(plan), result);
    }
  });
}

std::string title(const testing::TestParamInfo<Shape>& info) {
  return title_of(info.param);
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const bool spread : {false, true}) {
    for (const int num_ranks : {1, 2, 3, 4, 8})
      all.push_back({.num_ranks = num_ranks, .hidden_size = 128, .spread = spread});
    for (const int hidden_size : {7, 2048, 2880, 7168, 16384})
      all.push_back({.hidden_size = hidden_size, .max_tokens = 20, .spread = spread});
    for (const Dtype dtype : {Dtype::kF16, Dtype::kF32})
      all.push_back({.hidden_size = 520, .dtype = dtype, .spread = spread});
    // Many tokens for the blocks there are, so that rows move in bulk: dense ones, and odd ones beside them.
    all.push_back({.hidden_size = 256, .max_tokens = 1500, .spread = spread});
    all.push_back({.num_ranks = 4, .hidden_size = 1001, .max_tokens = 600, .spread = spread});
    all.push_back({.hidden_size = 8200, .max_tokens = 530, .spread = spread});
    for (const int num_ranks : {2, 4})
      all.push_back(
          {.num_ranks = num_ranks, .hidden_size = 512, .spread = spread, .kind = support::RankKind::kProcesses});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, AllGatherOnGpu, testing::ValuesIn(shapes()), title);

const Shape kSmall{.num_ranks = 3, .hidden_size = 64, .max_tokens = 30};

class AllGatherSizes : public testing::Test {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(kSmall); }

  static WorldSpec spec() {
    WorldSpec spec = spec_of(kSmall, 5);
    spec.num_tokens = {9, 0, 30};
    return spec;
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
  run_on_devices(kSmall, kConfig, {}, [&](Communication& communication, DeviceRounds& rounds) {
    const int rank = communication.rank();
    cudaStream_t stream = rounds.stream();
    const std::vector<std::int64_t> sizes(3, kTokens);
    support::Tensor host = rows_of(rank, 0);
    const TensorView rows = rounds.to_device(host.view());
    support::Tensor sums(Dtype::kBf16, {kTokens, kSmall.hidden_size});
    TensorView output = rounds.to_device(sums.view());
    support::Tensor count(Dtype::kI32, {1, 1});
    const TensorView on_device = rounds.to_device(count.view());
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
    check_cuda(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
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
