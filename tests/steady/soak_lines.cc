// SPDX-License-Identifier: Apache-2.0
// Which communications the mixed soak keeps alive at once.
#include <utility>

#include "steady/soak_line.h"
#include "support/backends.h"

namespace tokenyard::steady_tests {
namespace {

SoakLineSpec line(std::string_view backend, int num_ranks, const MoeParams& params) {
  SoakLineSpec made{.name = std::string(backend)};
  made.world.params = params;
  made.world.num_ranks = num_ranks;
  made.config = support::config_for(backend, made.world);
  return made;
}

// As `line`, for a backend that takes more than rows, ids and weights.
SoakLineSpec laden_line(std::string_view backend,
                        int num_ranks,
                        const MoeParams& params,
                        std::vector<std::int64_t> extra_row_bytes,
                        std::int64_t eplb_entries) {
  SoakLineSpec made = line(backend, num_ranks, params);
  made.world.extra_row_bytes = std::move(extra_row_bytes);
  made.world.eplb_entries = eplb_entries;
  made.config = support::config_for(backend, made.world);
  return made;
}

}  // namespace

std::vector<SoakLineSpec> soak_lines(int num_ranks) {
  const MoeParams bf16{.num_experts = 9, .top_k = 2, .hidden_size = 24, .max_tokens_per_rank = 6};
  const MoeParams f32{.num_experts = 8, .top_k = 3, .hidden_size = 17, .max_tokens_per_rank = 5, .dtype = Dtype::kF32};
  std::vector<SoakLineSpec> lines;

  lines.push_back(laden_line("all_gather", num_ranks, bf16, {12, 5}, 0));
  lines.back().world.router_columns = 9;
  lines.push_back(line("all_gather", num_ranks, f32));
  lines.back().name += " of f32";
  lines.back().world.params.max_tokens_per_rank = 40;
  lines.back().num_threads = 2;

  lines.push_back(line("high_throughput", num_ranks, bf16));
  lines.back().world.params.max_tokens_per_rank = 70;  // two chunks
  lines.push_back(line("high_throughput", num_ranks, f32));
  lines.back().name += " of block-scaled rows";
  lines.back().world.params.dispatch_format = DispatchFormat::kFp8Block128;
  lines.back().world.params.hidden_size = 130;

  lines.push_back(line("low_latency", num_ranks, bf16));
  lines.back().casts = true;
  lines.push_back(line("low_latency", num_ranks, f32));
  lines.back().name += " with the logarithmic wire";
  lines.back().config = LowLatencyConfig{.use_logarithmic_combine = true};
  lines.back().num_threads = 2;

  lines.push_back(laden_line("one_sided", num_ranks, bf16, {8, 3}, 4));
  lines.back().name += " that grows";
  lines.back().grows = true;
  lines.push_back(line("one_sided", num_ranks, bf16));
  lines.back().name += " with the low-precision combine";
  lines.back().world.params.invalid_expert_id = 9;
  lines.back().world.params.max_tokens_per_rank = 70;
  lines.back().config = OneSidedConfig{.use_low_precision_combine = true};

  lines.push_back(laden_line("two_sided", num_ranks, f32, {}, 8));
  lines.back().name += " with small queues";
  lines.back().config = TwoSidedConfig{.queue_bytes_per_peer = 2 * 384};
  lines.back().world.params.max_tokens_per_rank = 24;
  lines.back().straddles = false;
  lines.push_back(line("two_sided", num_ranks, f32));
  lines.back().world.params.dtype = Dtype::kF16;
  lines.back().world.params.invalid_expert_id = 8;
  return lines;
}

}  // namespace tokenyard::steady_tests
