// SPDX-License-Identifier: Apache-2.0
// Uses headers, library and its private dependencies as an installed package offers them.
#include <tokenyard/tokenyard.h>

#include <cstdio>

int main() {
  using namespace tokenyard;
  const MoeParams params{.num_experts = 8, .top_k = 2, .hidden_size = 64, .max_tokens_per_rank = 4};
  const auto groups = Group::in_process(1);
  Communication communication = create_communication(groups[0], params, "one_sided");
  const bool right = communication.num_ranks() == 1 && communication.window_bytes() > 0 && version() == "0.1.0" &&
                     communication.destroy().ok();
  std::printf("tokenyard %.*s: %s\n", static_cast<int>(version().size()), version().data(), right ? "ok" : "wrong");
  return right ? 0 : 1;
}
