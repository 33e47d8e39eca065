// SPDX-License-Identifier: Apache-2.0
#include "gpu/device_ranks.h"

#include <algorithm>
#include <cstdlib>
#include <ostream>

#include "support/check.h"

namespace tokenyard::gpu_tests {

MoeParams params_of(const Shape& shape) {
  MoeParams params;
  params.hidden_size = shape.hidden_size;
  params.num_experts = shape.num_experts;
  params.top_k = shape.top_k;
  params.max_tokens_per_rank = shape.max_tokens;
  params.dtype = shape.dtype;
  params.dispatch_format = shape.format;
  return params;
}

std::chrono::milliseconds patient(std::chrono::milliseconds deadline) noexcept {
  const char* patience = std::getenv("TOKENYARD_TEST_PATIENCE");
  return deadline * (patience == nullptr ? 1 : std::max(1, std::atoi(patience)));
}

CommunicationOptions cuda_options(int device) {
  CommunicationOptions options = support::test_options();
  options.deadline = patient(options.deadline);
  options.first_round_deadline = patient(options.first_round_deadline);
  options.engine = EngineKind::kCuda;
  options.device = device;
  options.initial_epoch = 0xFFFFFFFDU;  // the epochs of a few rounds wrap
  return options;
}

void run_with_devices(const Shape& shape, const std::function<void(const Group& group, int device)>& body) {
  // As many queues as CUDA takes: streams of several ranks that share one wait for each other. Read when CUDA starts.
  support::check(::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) == 0, "setenv");
  support::run(shape.kind, shape.num_ranks,
               [&](const Group& group) {
                 std::string reason;
                 const int devices = num_devices(reason);
                 support::check(devices > 0, reason);
                 const int device = shape.spread ? group.rank() % devices : 0;
                 check_cuda(cudaSetDevice(device), "cudaSetDevice");
                 body(group, device);
               },
               {.limit = std::chrono::seconds(120)});
}

void run_on_devices(const Shape& shape,
                    const BackendConfig& config,
                    const DeviceRounds::Options& wanted,
                    const Body& body) {
  run_with_devices(shape, [&](const Group& group, int device) {
    DeviceRounds::Options options = wanted;
    options.device = device;
    DeviceRounds rounds(options);
    Communication communication = create_communication(group, params_of(shape), config, cuda_options(device));
    body(communication, rounds);
    support::check_ok(communication.destroy(), "destroy");
  });
}

int devices_there() {
  static const int count = [] {
    if (const char* told = std::getenv("TOKENYARD_TEST_DEVICES"); told != nullptr) return std::atoi(told);
    int seen = 0;
    try {
      support::run_processes(1, [](const Group&) {
        std::string reason;
        support::check(num_devices(reason) > 0, reason);
      });
      seen = 1;
    } catch (const std::exception&) {
      return 0;
    }
    try {
      support::run_processes(1, [](const Group&) {
        std::string reason;
        support::check(num_devices(reason) > 1, "one device");
      });
      seen = 2;
    } catch (const std::exception&) {
      return seen;
    }
    return seen;
  }();
  return count;
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  return out << shape.num_ranks << " ranks";
}

std::string title_of(const Shape& shape) {
  std::string text = std::to_string(shape.num_ranks) + "_ranks_hidden_" + std::to_string(shape.hidden_size) + "_top_" +
                     std::to_string(shape.top_k) + "_of_" + std::to_string(shape.num_experts) + "_";
  if (shape.format != DispatchFormat::kNone) text.append(name(shape.format)).append("_");
  text.append(name(shape.dtype)).append(shape.spread ? "_spread" : "_shared").append("_").append(name(shape.kind));
  return text;
}

}  // namespace tokenyard::gpu_tests
