// SPDX-License-Identifier: Apache-2.0
#include "gpu/device_world.h"

#include <set>
#include <string>

#include "gpu/compare.h"
#include "support/casts.h"
#include "support/check.h"

namespace tokenyard::gpu_tests {
namespace {

// Each rank with an expert of the token gives its row back; fp32 sums from the lowest rank on, one rounding.
std::vector<std::byte> expect_rows_back(const support::World& world, int rank) {
  const support::RankData& data = world.rank(rank);
  const MoeParams& params = world.spec.params;
  std::vector<std::byte> rows(data.hidden.bytes.size());
  for (std::int64_t token = 0; token < data.num_tokens; ++token) {
    std::set<int> owners;
    for (int slot = 0; slot < params.top_k; ++slot) {
      const int owner = support::owner_of(world.id(rank, token, slot), params, world.spec.num_ranks);
      if (owner >= 0) owners.insert(owner);
    }
    const std::byte* row = data.hidden.row(token).data();
    for (int i = 0; i < params.hidden_size; ++i) {
      const float value = support::load(Dtype::kBf16, row, i);
      float sum = 0;
      for (std::size_t k = 0; k < owners.size(); ++k)
        sum += value;
      support::store(Dtype::kBf16, rows.data(), token * params.hidden_size + i, sum);
    }
  }
  return rows;
}

TensorView kept(DeviceRounds& rounds, const TensorView& host) {
  if (!host.defined()) return host;
  TensorView view = host;
  view.device = {.kind = DeviceKind::kCuda, .index = rounds.device()};
  view.data = rounds.keep(span_of(host));
  if (span_of(host) > 0) {
    check_cuda(cudaMemcpyAsync(view.data, host.data, static_cast<std::size_t>(span_of(host)), cudaMemcpyHostToDevice,
                               rounds.stream()),
               "cudaMemcpyAsync of an input");
  }
  return view;
}

}  // namespace

DeviceWorld::DeviceWorld(DeviceRounds& rounds, const support::World& world, int rank, std::int64_t tokens_per_rank)
    : tokens_per_rank_(tokens_per_rank) {
  support::check(world.spec.params.dtype == Dtype::kBf16, "rows of bf16");
  const support::RankTensors tensors(world, rank, false);
  const DispatchInput host = tensors.input();
  input_.hidden_states = kept(rounds, host.hidden_states);
  input_.topk_ids = kept(rounds, host.topk_ids);
  input_.topk_weights = kept(rounds, host.topk_weights);
  const std::vector<std::byte> expected = expect_rows_back(world, rank);
  output_bytes_ = static_cast<std::int64_t>(expected.size());
  expected_ = rounds.keep(output_bytes_);
  output_ = input_.hidden_states;
  output_.data = rounds.keep(output_bytes_);
  differences_ = reinterpret_cast<unsigned long long*>(rounds.keep(sizeof(*differences_)));
  check_cuda(cudaMemcpyAsync(expected_, expected.data(), expected.size(), cudaMemcpyHostToDevice, rounds.stream()),
             "cudaMemcpyAsync of what is expected");
  check_cuda(cudaMemsetAsync(differences_, 0, sizeof(*differences_), rounds.stream()), "cudaMemsetAsync");
  // As each combine does: the kernel for this size is loaded before any round.
  if (output_bytes_ > 0) {
    check_cuda(cudaMemsetAsync(output_.data, 0x7F, static_cast<std::size_t>(output_bytes_), rounds.stream()),
               "cudaMemsetAsync");
  }
  rounds.synchronize();
  load_comparison();
}

void DeviceWorld::dispatch(Communication& communication, cudaStream_t stream, int num_sms) {
  DispatchOptions options;
  options.runtime_max_tokens_per_rank = tokens_per_rank_;
  options.num_sms = num_sms;
  options.stream.native = stream;
  const Status status = communication.dispatch(input_, options, result_);
  support::check(status.code == StatusCode::kEnqueued, "dispatch: " + status.message());
}

void DeviceWorld::combine(Communication& communication, cudaStream_t stream, int num_sms) {
  CombineOptions options;
  options.num_sms = num_sms;
  options.stream.native = stream;
  if (output_bytes_ > 0) {
    check_cuda(cudaMemsetAsync(output_.data, 0x7F, static_cast<std::size_t>(output_bytes_), stream), "cudaMemsetAsync");
  }
  const Status status =
      communication.combine(result_.handle, {.expert_output = result_.hidden_states}, options, output_);
  support::check(status.code == StatusCode::kEnqueued, "combine: " + status.message());
  count_differences(static_cast<const std::byte*>(output_.data), expected_, output_bytes_, differences_, stream);
}

void DeviceWorld::check_outputs(cudaStream_t stream) {
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  unsigned long long differences = 0;
  check_cuda(cudaMemcpyAsync(&differences, differences_, sizeof(differences), cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  support::check(differences == 0, std::to_string(differences) + " bytes of outputs differ");
}

}  // namespace tokenyard::gpu_tests
