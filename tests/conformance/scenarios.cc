// SPDX-License-Identifier: Apache-2.0
#include "conformance/scenarios.h"

#include <algorithm>
#include <array>

namespace tokenyard::support {
namespace {

template <class T, std::size_t kSize>
T pick(Rng& rng, const std::array<T, kSize>& choices) {
  return choices[static_cast<std::size_t>(rng.below(std::int64_t{kSize}))];
}

MoeParams draw_params(Rng& rng, int num_ranks) {
  MoeParams params;
  params.num_experts = pick(rng, std::array{2 * num_ranks, 2 * num_ranks + 1, std::max(1, num_ranks - 1), 16, 40});
  params.top_k = pick(rng, std::array{1, 2, 3, 8});
  params.hidden_size = pick(rng, std::array{7, 7, 128, 128, 2880});
  params.max_tokens_per_rank = params.hidden_size > 1000 ? 5 : pick(rng, std::array{1, 6, 17, 70});
  params.dtype = pick(rng, std::array{Dtype::kBf16, Dtype::kF16, Dtype::kF32});
  constexpr std::array kFormats{DispatchFormat::kNone,         DispatchFormat::kNone,        DispatchFormat::kNone,
                                DispatchFormat::kFp8PerTensor, DispatchFormat::kFp8Block128, DispatchFormat::kMxfp8,
                                DispatchFormat::kNvfp4,        DispatchFormat::kMxfp4};
  params.dispatch_format = pick(rng, kFormats);
  return params;
}

void draw_backend_part(Rng& rng, Scenario& scenario) {
  WorldSpec& spec = scenario.spec;
  RoundPlan& plan = scenario.plan;
  constexpr std::array<std::int64_t, 8> kExtraBytes{1, 2, 4, 6, 8, 12, 16, 20};
  const Contract& contract = find_backend(scenario.backend).contract;
  if (contract.takes_extra_payloads && rng.below(2) == 0) {
    const std::int64_t first = rng.below(4);
    for (std::int64_t i = first; i < std::min<std::int64_t>(8, first + 1 + rng.below(8)); ++i) {
      spec.extra_row_bytes.push_back(kExtraBytes[static_cast<std::size_t>(i)]);
    }
  }
  if (scenario.backend == "all_gather") {
    plan.tell_num_tokens = rng.below(2) == 0;
    spec.router_columns = rng.below(2) == 0 ? spec.params.num_experts : 0;
  } else if (scenario.backend == "high_throughput") {
    plan.num_biases = static_cast<int>(rng.below(3));
    plan.weights_back = rng.below(2) == 0;
    plan.expert_alignment = pick(rng, std::array{1, 4, 16});
  } else {
    if (contract.num_experts_multiple_of > 1) {
      const int multiple = contract.num_experts_multiple_of;
      spec.params.num_experts = (spec.params.num_experts + multiple - 1) / multiple * multiple;
    }
    if (contract.invalid_id_configurable) {
      spec.params.invalid_expert_id = rng.below(2) == 0 ? -1 : spec.params.num_experts;
    }
    if (contract.takes_eplb_stats) spec.eplb_entries = rng.below(2) == 0 ? spec.params.num_experts : 0;
    plan.flat_expert_output = rng.below(2) == 0;
  }
}

Scenario draw(std::string_view backend, RankKind kind, int num_ranks, std::uint64_t number) {
  Rng rng(1000 + number);
  Scenario scenario{.backend = std::string(backend), .rank_kind = kind};
  WorldSpec& spec = scenario.spec;
  spec.num_ranks = num_ranks;
  spec.params = draw_params(rng, num_ranks);
  spec.skew = static_cast<Skew>(number % kNumSkews);
  spec.id_dtype = pick(rng, std::array{Dtype::kI32, Dtype::kI64});
  spec.weight_dtype = pick(rng, std::array{Dtype::kF32, Dtype::kF32, Dtype::kBf16, Dtype::kF16});
  spec.with_weights = rng.below(5) != 0;
  spec.seed = number;
  RoundPlan& plan = scenario.plan;
  plan.seed = number + 17;
  plan.expert_dtype =
      rng.below(3) == 0 ? pick(rng, std::array{Dtype::kBf16, Dtype::kF16, Dtype::kF32}) : spec.params.dtype;
  plan.output_dtype = pick(rng, std::array{Dtype::kBf16, Dtype::kF16, Dtype::kF32});
  plan.strided = rng.below(2) == 0;
  plan.zero_copy = rng.below(2) == 0;
  plan.caller_tensors = rng.below(3) == 0;
  scenario.initial_epoch = rng.below(2) == 0 ? 0xFFFFFFFDU : 0U;
  scenario.num_threads = rng.below(4) == 0 ? 3 : 1;
  draw_backend_part(rng, scenario);
  return scenario;
}

}  // namespace

std::string Scenario::name() const {
  const MoeParams& params = spec.params;
  std::string text =
      backend + "_" + std::string(support::name(rank_kind)) + std::to_string(spec.num_ranks) + "_" +
      std::string(tokenyard::name(params.dtype)) + "_" + std::string(tokenyard::name(params.dispatch_format)) + "_" +
      std::string(support::name(spec.skew)) + "_h" + std::to_string(params.hidden_size) + "_e" +
      std::to_string(params.num_experts) + "_k" + std::to_string(params.top_k) + "_s" + std::to_string(spec.seed);
  std::replace_if(
      text.begin(), text.end(), [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return text;
}

std::vector<Scenario> sample_scenarios(int draws) {
  std::vector<Scenario> scenarios;
  std::uint64_t number = 0;
  for (const std::string_view backend : kMovingBackends) {
    for (const int num_ranks : {1, 2, 3, 4, 5, 7, 8}) {
      for (const RankKind kind : {RankKind::kThreads, RankKind::kProcesses}) {
        for (int i = 0; i < draws; ++i)
          scenarios.push_back(draw(backend, kind, num_ranks, number++));
      }
    }
  }
  return scenarios;
}

}  // namespace tokenyard::support
