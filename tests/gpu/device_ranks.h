// SPDX-License-Identifier: Apache-2.0
// Ranks with a communication on a GPU each, for tests of rounds. The test program itself touches no device, because
// CUDA does not survive fork(). Thread rule: call from the test's main thread.
#pragma once

#include <chrono>
#include <functional>
#include <iosfwd>
#include <string>

#include "tokenyard/communication.h"

#include "gpu/device_round.h"
#include "support/run_ranks.h"

namespace tokenyard::gpu_tests {

struct Shape {
  int num_ranks = 2;
  int hidden_size = 7168;
  int top_k = 8;
  int num_experts = 64;
  int max_tokens = 40;
  Dtype dtype = Dtype::kBf16;
  DispatchFormat format = DispatchFormat::kNone;
  bool spread = false;  // over all devices; else all ranks share device 0
  support::RankKind kind = support::RankKind::kThreads;
};

[[nodiscard]] MoeParams params_of(const Shape& shape);

// For the names of tests.
std::ostream& operator<<(std::ostream& out, const Shape& shape);
[[nodiscard]] std::string title_of(const Shape& shape);

// TOKENYARD_TEST_PATIENCE times the deadline where the environment has it: for tools that look at every access and make
// kernels slow, and for GPUs that several processes share.
[[nodiscard]] std::chrono::milliseconds patient(std::chrono::milliseconds deadline) noexcept;

// The epochs of a few rounds wrap. Deadlines are patient.
[[nodiscard]] CommunicationOptions cuda_options(int device);

// Runs `body` on every rank, with its device as the thread's current one.
void run_with_devices(const Shape& shape, const std::function<void(const Group& group, int device)>& body);

using Body = std::function<void(Communication&, DeviceRounds&)>;

// Runs `body` on every rank with a communication of its own.
void run_on_devices(const Shape& shape,
                    const BackendConfig& config,
                    const DeviceRounds::Options& wanted,
                    const Body& body);

// Asked in a process of its own, so that this one may fork, or told by TOKENYARD_TEST_DEVICES, for tools that follow
// one process only. At most 2: more make no difference to the tests.
[[nodiscard]] int devices_there();

}  // namespace tokenyard::gpu_tests

// Skips the test, visibly, where there are not the devices that the shape needs.
#define TOKENYARD_NEEDS_DEVICES_OF(shape)                                             \
  if (::tokenyard::gpu_tests::devices_there() == 0) GTEST_SKIP() << "no CUDA device"; \
  if ((shape).spread && ::tokenyard::gpu_tests::devices_there() < 2) GTEST_SKIP() << "one CUDA device only"
