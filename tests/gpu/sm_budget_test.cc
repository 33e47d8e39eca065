// SPDX-License-Identifier: Apache-2.0
// How many blocks operations launch: what the call says, else what SmBudget says, else what the communication says that
// it uses. Seen in the kernels that a capture records.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gpu/device_ranks.h"
#include "support/backends.h"
#include "support/check.h"

namespace tokenyard::gpu_tests {
namespace {

using support::check;
using support::check_eq;

constexpr int kTokens = 1024;  // more than there are multiprocessors

support::World world() {
  return support::make_world({.params = params_of({.hidden_size = 128, .max_tokens = kTokens}), .num_ranks = 1});
}

// The most blocks of a kernel that `record` puts on the stream. Nothing runs.
int most_blocks(cudaStream_t stream, const std::function<void()>& record) {
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  record();
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  std::size_t count = 0;
  check_cuda(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  check_cuda(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  int most = 0;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    check_cuda(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams kernel{};
    check_cuda(cudaGraphKernelNodeGetParams(node, &kernel), "cudaGraphKernelNodeGetParams");
    most = std::max(most, static_cast<int>(kernel.gridDim.x));
  }
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return most;
}

class SmBudgetsOnGpu : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { TOKENYARD_NEEDS_DEVICES_OF(Shape{}); }

  struct Recorder {
    Communication& communication;
    DeviceRounds& rounds;
    const support::World& all;
    support::RankTensors tensors{all, 0, false};
    support::Tensor output{Dtype::kBf16, {kTokens, 128}};

    [[nodiscard]] int blocks(int num_sms) {
      DispatchInput input = tensors.input();
      input.hidden_states = rounds.to_device(input.hidden_states);
      input.topk_ids = rounds.to_device(input.topk_ids);
      input.topk_weights = rounds.to_device(input.topk_weights);
      TensorView sums = rounds.to_device(output.view());
      rounds.synchronize();
      const std::vector<std::int64_t> sizes{kTokens};
      DispatchOptions options;
      options.num_sms = num_sms;
      options.stream.native = rounds.stream();
      const Contract& contract = communication.contract();
      if (contract.output_layout == OutputLayout::kCompact) options.num_worst_tokens = kTokens;
      if (contract.output_layout == OutputLayout::kEveryRank) options.num_tokens_per_rank = sizes;
      CombineOptions combine_options;
      combine_options.num_sms = num_sms;
      combine_options.stream.native = rounds.stream();
      return most_blocks(rounds.stream(), [&] {
        DispatchResult result;
        check(communication.dispatch(input, options, result).code == StatusCode::kEnqueued, "dispatch");
        const CombineInput experts{.expert_output = result.hidden_states};
        check(communication.combine(result.handle, experts, combine_options, sums).code == StatusCode::kEnqueued,
              "combine");
      });
    }
  };
};

TEST_P(SmBudgetsOnGpu, OperationsLaunchNoMoreBlocksThanTheyMay) {
  const support::World all = world();
  run_on_devices({.num_ranks = 1, .hidden_size = 128, .max_tokens = kTokens}, support::config_for(GetParam(), all.spec),
                 {}, [&](Communication& communication, DeviceRounds& rounds) {
                   Recorder recorder{communication, rounds, all};
                   for (const int given : {1, 2, 5, 16})
                     check_eq(recorder.blocks(given), given, "blocks of an operation with num_sms");
                   check(recorder.blocks(0) <= communication.max_sms(), "blocks of an operation without num_sms");
                   auto* budget = communication.get<SmBudget>();
                   if (budget == nullptr) return;
                   for (const int given : {7, 3}) {
                     budget->set_num_sms(given);
                     check_eq(communication.max_sms(), given, "max_sms");
                     check_eq(budget->max_sms_used(), given, "max_sms_used");
                     check_eq(recorder.blocks(0), given, "blocks within the budget");
                     check_eq(recorder.blocks(4), 4, "blocks of an operation that says so itself");
                   }
                 });
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         SmBudgetsOnGpu,
                         testing::Values("all_gather", "high_throughput", "low_latency", "one_sided", "two_sided"),
                         [](const auto& of) { return of.param; });

}  // namespace
}  // namespace tokenyard::gpu_tests
