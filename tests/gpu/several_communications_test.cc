// SPDX-License-Identifier: Apache-2.0
// Several communications of one device, on one stream and on two, and rounds that end without a combine.
// Public bug reports of this kind: two buffers in one process (C119), micro-batches side by side (C115), the second
// layer's dispatch hangs (C116).
#include <gtest/gtest.h>

#include <optional>

#include "gpu/backend_case.h"
#include "gpu/device_world.h"
#include "support/backends.h"
#include "support/check.h"
#include "support/errors.h"

namespace tokenyard::gpu_tests {
namespace {

// Launches far ahead of a rank of the same process can block this one's thread inside the driver, with what the other
// needs to launch: sooner, the more ranks there are and the more parameters a kernel has.
constexpr int kRoundsBetweenWaits = 15;

// One communication with all that its rounds need.
struct Lane {
  Lane(const Group& group, DeviceRounds& rounds, std::string_view backend, const Shape& shape)
      : communication(create_communication(group,
                                           params_of(shape),
                                           support::config_for(backend, world_up_to(shape, 1, 1).spec),
                                           cuda_options(rounds.device()))) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      worlds.push_back(std::make_unique<DeviceWorld>(rounds, world_up_to(shape, shape.max_tokens, seed), group.rank(),
                                                     shape.max_tokens));
    }
  }

  [[nodiscard]] DeviceWorld& world(int round) { return *worlds[static_cast<std::size_t>(round) % worlds.size()]; }

  void check(cudaStream_t stream) {
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    support::check_ok(communication.poll(), "poll");
    for (const auto& each : worlds)
      each->check_outputs(stream);
  }

  Communication communication;
  std::vector<std::unique_ptr<DeviceWorld>> worlds;
};

class SeveralOnGpu : public testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(GetParam().shape); }

  [[nodiscard]] static const Shape& shape() { return GetParam().shape; }

  [[nodiscard]] static Shape other_shape() {
    Shape other = shape();
    other.hidden_size = shape().hidden_size / 2 + 8;
    other.top_k = 3;
    other.max_tokens = shape().max_tokens > 512 ? 30 : 600;
    return other;
  }
};

TEST_P(SeveralOnGpu, RoundsOfTwoMayInterleaveOnAStream) {
  run_with_devices(shape(), [](const Group& group, int device) {
    DeviceRounds rounds({.device = device});
    Lane one(group, rounds, GetParam().backend, shape());
    std::optional<Lane> other;
    other.emplace(group, rounds, GetParam().backend, other_shape());
    group.barrier();
    cudaStream_t stream = rounds.stream();
    for (int round = 0; round < 60; ++round) {
      one.world(round).dispatch(one.communication, stream);
      other->world(round).dispatch(other->communication, stream);
      one.world(round).combine(one.communication, stream);
      other->world(round).combine(other->communication, stream);
    }
    one.check(stream);
    other->check(stream);
    support::check_ok(other->communication.destroy(), "destroy of the other");
    other.reset();
    for (int round = 0; round < 5; ++round)
      one.world(round).round(one.communication, stream);
    one.check(stream);
    support::check_ok(one.communication.destroy(), "destroy");
  });
}

// Side by side they must fit the device together: each takes its share of multiprocessors.
TEST_P(SeveralOnGpu, TwoRunSideBySideOnTwoStreams) {
  run_with_devices(shape(), [](const Group& group, int device) {
    DeviceRounds rounds({.device = device});
    int processors = 0;
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    const int share = processors / (2 * shape().num_ranks);
    Lane one(group, rounds, GetParam().backend, shape());
    Lane other(group, rounds, GetParam().backend, other_shape());
    cudaStream_t second = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    group.barrier();
    for (int round = 0; round < 60; ++round) {
      // Ranks enqueue in different orders.
      const bool turned = (round + group.rank()) % 2 == 1;
      if (turned) other.world(round).round(other.communication, second, share);
      one.world(round).round(one.communication, rounds.stream(), share);
      if (!turned) other.world(round).round(other.communication, second, share);
      if (round % kRoundsBetweenWaits != 0) continue;
      check_cuda(cudaStreamSynchronize(second), "cudaStreamSynchronize");
      rounds.synchronize();
    }
    one.check(rounds.stream());
    other.check(second);
    support::check_ok(one.communication.destroy(), "destroy");
    support::check_ok(other.communication.destroy(), "destroy of the other");
    check_cuda(cudaStreamDestroy(second), "cudaStreamDestroy");
  });
}

// One communication whose phases change streams is one sequence all the same.
TEST_P(SeveralOnGpu, PhasesOfOneMayChangeStreams) {
  run_with_devices(shape(), [](const Group& group, int device) {
    DeviceRounds rounds({.device = device});
    Lane one(group, rounds, GetParam().backend, shape());
    cudaStream_t second = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    group.barrier();
    for (int round = 0; round < 40; ++round) {
      const bool turned = (round / 2 + group.rank()) % 2 == 1;
      one.world(round).dispatch(one.communication, turned ? second : rounds.stream());
      one.world(round).combine(one.communication, round % 3 == 0 ? second : rounds.stream());
    }
    check_cuda(cudaStreamSynchronize(second), "cudaStreamSynchronize");
    one.check(rounds.stream());
    support::check_ok(one.communication.destroy(), "destroy");
    check_cuda(cudaStreamDestroy(second), "cudaStreamDestroy");
  });
}

TEST_P(SeveralOnGpu, HandlesMayEndWithoutACombine) {
  run_with_devices(shape(), [](const Group& group, int device) {
    DeviceRounds rounds({.device = device});
    Lane one(group, rounds, GetParam().backend, shape());
    cudaStream_t stream = rounds.stream();
    for (int round = 0; round < 60; ++round) {
      one.world(round).dispatch(one.communication, stream);
      if (round % 3 == 1) {
        one.world(round).drop();
      } else if (round % 5 != 2) {
        one.world(round).combine(one.communication, stream);
      } else {
        // Too many rounds would be open. All ranks ask for it and give it up, and the open one goes on.
        support::check_throws(ErrorCode::kInvalidState, {"in flight"}, [&] {
          DispatchResult another;
          DispatchOptions options;
          options.stream.native = stream;
          static_cast<void>(one.communication.dispatch({}, options, another));
        });
        if (round % 2 == 0) {
          one.world(round).combine(one.communication, stream);
        } else {
          one.world(round).drop();
        }
      }
    }
    one.check(stream);
    support::check_ok(one.communication.destroy(), "destroy");
  });
}

std::vector<Shape> shapes() {
  return {{.num_ranks = 2, .hidden_size = 256, .max_tokens = 40},
          {.num_ranks = 2, .hidden_size = 512, .max_tokens = 700},
          {.num_ranks = 4, .hidden_size = 128, .top_k = 4, .max_tokens = 24},
          {.num_ranks = 2, .hidden_size = 256, .max_tokens = 40, .spread = true}};
}

INSTANTIATE_TEST_SUITE_P(Shapes, SeveralOnGpu, testing::ValuesIn(cases_of(shapes())), [](const auto& of) {
  return title_of_case(of.param);
});

}  // namespace
}  // namespace tokenyard::gpu_tests
