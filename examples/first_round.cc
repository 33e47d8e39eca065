// SPDX-License-Identifier: Apache-2.0
// Two ranks as threads: tokens go to the ranks of their experts and come back summed.
#include <cstdint>
#include <thread>
#include <vector>

#include "tokenyard/tokenyard.h"

int main() {
  using namespace tokenyard;
  const MoeParams params{
      .num_experts = 4, .top_k = 2, .hidden_size = 8, .max_tokens_per_rank = 3, .dtype = Dtype::kF32};
  std::vector<Group> groups = Group::in_process(2);
  std::vector<int> wrong(2, 0);

  auto rank_main = [&](int rank) {
    Communication communication = create_communication(groups[rank], params, "high_throughput");
    std::vector<float> x(3 * 8, 1.0F + static_cast<float>(rank)), y(3 * 8);
    std::vector<std::int64_t> ids{0, 1, 1, 2, 3, 0};  // experts 0 and 1 live on rank 0, 2 and 3 on rank 1
    std::vector<float> weights(3 * 2, 0.5F);
    const DispatchInput input{.hidden_states = {x.data(), Dtype::kF32, {3, 8}},
                              .topk_ids = {ids.data(), Dtype::kI64, {3, 2}},
                              .topk_weights = {weights.data(), Dtype::kF32, {3, 2}}};
    DispatchResult received;
    if (!communication.dispatch(input, {}, received).ok()) ++wrong[rank];

    // An expert's work would stand here. These return what they got, so each rank of a token adds one copy of it.
    TensorView output(y.data(), Dtype::kF32, {3, 8});
    if (!communication.combine(received.handle, {.expert_output = received.hidden_states}, {}, output).ok())
      ++wrong[rank];
    const std::vector<float> copies{1, 2, 2};  // ranks that each token went to
    for (int i = 0; i < 3 * 8; ++i)
      wrong[rank] += y[i] != x[i] * copies[i / 8];
    if (!communication.destroy().ok()) ++wrong[rank];
  };
  std::thread other(rank_main, 1);
  rank_main(0);
  other.join();
  return wrong[0] + wrong[1];
}
