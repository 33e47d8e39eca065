// SPDX-License-Identifier: Apache-2.0
#include "cli/job.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "tokenyard/communication.h"
#include "tokenyard/error.h"

#include "cli/fp8_rows.h"
#include "cli/rank_device.h"
#include "cli/rounds.h"
#include "cli/time_statistics.h"

namespace tokenyard::cli {
namespace {

// A backend that casts rows on their way takes them as bf16.
MoeParams params_of(const Contract& contract,
                    const MoeLayer& layer,
                    const JobOptions& options,
                    std::int64_t largest_share) {
  const bool fp8 = options.dispatch_dtype == DispatchDtype::kFp8 && !contract.takes_cast;
  return {.num_experts = layer.num_experts(),
          .top_k = layer.top_k(),
          .hidden_size = layer.hidden_size(),
          .max_tokens_per_rank = static_cast<int>(std::max<std::int64_t>(largest_share, 1)),
          .dtype = Dtype::kBf16,
          .dispatch_format = fp8 ? DispatchFormat::kFp8Block128 : DispatchFormat::kNone};
}

// One rank's part of a job. Members are reused from round to round.
class RankJob {
 public:
  RankJob(const BackendInfo& backend,
          const MoeLayer& layer,
          const JobOptions& options,
          const MoeParams& params,
          const Group& group)
      : group_(group),
        contract_(backend.contract),
        first_expert_(first_local_expert(params, group.rank(), group.num_ranks())),
        experts_(layer, first_expert_, num_local_experts(params, group.rank(), group.num_ranks())),
        device_(make_rank_device(options.engine, group.rank())),
        communication_(create_communication(
            group, params, backend.default_config, device_->communication_options(options.num_threads))) {
    dispatch_options_.stream = combine_options_.stream = device_->stream();
  }

  void set_tokens(const MoeLayer& layer, TokenRange tokens, DispatchDtype dtype) {
    const TensorView rows = layer.hidden_states().rows(tokens.first, tokens.count);
    input_.topk_ids = device_->bring(layer.topk_ids().rows(tokens.first, tokens.count));
    input_.topk_weights = device_->bring(layer.topk_weights().rows(tokens.first, tokens.count));
    if (dtype == DispatchDtype::kFp8 && !contract_.takes_cast) {
      fp8_rows_ = quantise_fp8_rows(rows);
      input_.hidden_states = device_->bring(fp8_rows_.codes_view());
      input_.hidden_states_scale = device_->bring(fp8_rows_.scales_view());
      return;
    }
    input_.hidden_states = device_->bring(rows);
    if (dtype == DispatchDtype::kFp8) dispatch_options_.cast = DispatchCast::kFp8Block128;
  }

  // Where each round's sums go, in host memory.
  void set_output(const TensorView& output) { output_ = device_->bring(output); }

  PhaseTimes run_round() {
    PhaseTimes times;
    group_.barrier();
    times.dispatch_us = device_->timed(
        communication_, [this] { return communication_.dispatch(input_, dispatch_options_, received_); });

    // Where ranks outnumber cores, a rank that computes would take the core of one that has yet to dispatch.
    group_.barrier();
    const ExpertInput rows = received_rows();
    const Clock::time_point start = Clock::now();
    const TensorView expert_output = expert_memory_.view(*device_, communication_, received_);
    experts_.compute(rows, device_->host_side(expert_output));
    times.expert_us = microseconds_since(start);
    device_->store(expert_output);

    group_.barrier();
    times.combine_us = device_->timed(communication_, [&] {
      return communication_.combine(received_.handle, {.expert_output = expert_output}, combine_options_, output_);
    });
    device_->load(output_);
    return times;
  }

  [[nodiscard]] std::int64_t rows_received() const { return rows_received_; }

  void finish() { require_ok(communication_.destroy()); }

 private:
  // The rows of the last dispatch, in host memory.
  ExpertInput received_rows() {
    const RowCounts& counts = received_.counts;
    rows_received_ = counts.num_rows;
    rows_per_expert_ = counts.rows_per_expert;
    if (counts.rows_per_source_on_device.defined()) {
      const TensorView rows = device_->load(counts.rows_per_source_on_device);
      rows_received_ =
          std::accumulate(rows.as<std::int32_t>(), rows.as<std::int32_t>() + rows.num_elements(), std::int64_t{0});
    }
    if (counts.rows_per_expert_on_device.defined()) {
      const TensorView rows = device_->load(counts.rows_per_expert_on_device);
      rows_per_expert_.assign(rows.as<std::int32_t>(), rows.as<std::int32_t>() + rows.num_elements());
    }
    return {.hidden_states = device_->load(received_.hidden_states),
            .hidden_states_scale = device_->load(received_.hidden_states_scale),
            .topk_ids = device_->load(received_.topk_ids),
            .topk_weights = device_->load(received_.topk_weights),
            .first_id = contract_.id_space == IdSpace::kLocal ? 0 : first_expert_,
            .rows_per_expert = rows_per_expert_};
  }

  const Group& group_;
  const Contract& contract_;
  int first_expert_;
  LocalExperts experts_;
  std::unique_ptr<RankDevice> device_;
  Communication communication_;
  Fp8Rows fp8_rows_;
  DispatchInput input_;
  TensorView output_;
  DispatchOptions dispatch_options_;
  CombineOptions combine_options_;
  DispatchResult received_;
  std::int64_t rows_received_ = 0;
  std::vector<std::int64_t> rows_per_expert_;
  ExpertMemory expert_memory_;
};

double median_of_slowest(const JobMemory& memory, const JobOptions& options, double PhaseTimes::*phase) {
  std::vector<double> slowest(static_cast<std::size_t>(options.num_rounds));
  for (int round = 0; round < options.num_rounds; ++round) {
    double& time = slowest[static_cast<std::size_t>(round)];
    for (int rank = 0; rank < options.num_ranks; ++rank)
      time = std::max(time, memory.times(rank, round).*phase);
  }
  return quantile(std::move(slowest), 0.5);
}

JobReport summarise(const MoeLayer& layer, const JobOptions& options, const JobMemory& memory) {
  JobReport report;
  std::vector<float> expected;
  const auto hidden = static_cast<std::size_t>(layer.hidden_size());
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    const TokenRange tokens = memory.tokens(rank);
    const auto values = static_cast<std::size_t>(tokens.count) * hidden;
    const auto reference = layer.expected_output().subspan(static_cast<std::size_t>(tokens.first) * hidden, values);
    expected.insert(expected.end(), reference.begin(), reference.end());
    const auto* output = memory.output(rank).as<const std::uint16_t>();
    report.output.insert(report.output.end(), output, output + values);
    report.rows_per_rank.push_back(memory.rows_received(rank));
    report.num_tokens += tokens.count;
  }
  report.relative_error = relative_error(report.output, expected);
  report.times = {.dispatch_us = median_of_slowest(memory, options, &PhaseTimes::dispatch_us),
                  .expert_us = median_of_slowest(memory, options, &PhaseTimes::expert_us),
                  .combine_us = median_of_slowest(memory, options, &PhaseTimes::combine_us)};
  return report;
}

}  // namespace

std::string_view name(DispatchDtype dtype) {
  return dtype == DispatchDtype::kFp8 ? "fp8" : "bf16";
}

// e4m3 keeps four significant bits: over one binade the steps of 1/8 are off by (1/8)/sqrt(12) in the root mean square,
// which is 0.0236 of the values' own. An expert multiplies two projections of such rows, gate and up, whose errors are
// independent: sqrt(2) * 0.0236 = 0.033, and the rounding of the output to bf16 adds nothing that shows.
double error_limit(DispatchDtype dtype) {
  return dtype == DispatchDtype::kFp8 ? 4e-2 : 4e-3;
}

// [rows received per rank] [times per rank and round] [output of all ranks]
JobMemory::JobMemory(const MoeLayer& layer, const JobOptions& options)
    : num_rounds_(options.num_rounds), hidden_size_(layer.hidden_size()) {
  std::int64_t num_tokens = 0;
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    TokenRange range = tokens_of_rank(layer.num_tokens(), rank, options.num_ranks);
    range.count = std::min(range.count, options.max_tokens_per_rank);
    tokens_.push_back(range);
    num_tokens += range.count;
  }
  times_offset_ = options.num_ranks * static_cast<std::int64_t>(sizeof(std::int64_t));
  const auto times_bytes = static_cast<std::int64_t>(sizeof(PhaseTimes)) * options.num_ranks * num_rounds_;
  output_offset_ = times_offset_ + times_bytes;
  segment_ = system::Segment::create(output_offset_ + num_tokens * hidden_size_ * size_of(Dtype::kBf16));
}

TensorView JobMemory::output(int rank) const {
  std::int64_t rows_before = 0;
  for (int other = 0; other < rank; ++other)
    rows_before += tokens(other).count;
  std::byte* data = segment_.data() + output_offset_ + rows_before * hidden_size_ * size_of(Dtype::kBf16);
  return {data, Dtype::kBf16, {tokens(rank).count, hidden_size_}};
}

std::int64_t& JobMemory::rows_received(int rank) const {
  return reinterpret_cast<std::int64_t*>(segment_.data())[rank];
}

PhaseTimes& JobMemory::times(int rank, int round) const {
  return reinterpret_cast<PhaseTimes*>(segment_.data() + times_offset_)[rank * num_rounds_ + round];
}

std::int64_t JobMemory::largest_share() const {
  return std::ranges::max(tokens_, {}, &TokenRange::count).count;
}

JobReport run_job(const BackendInfo& backend, const MoeLayer& layer, const JobOptions& options) {
  const JobMemory memory(layer, options);
  const MoeParams params = params_of(backend.contract, layer, options, memory.largest_share());
  run_ranks(options.rank_kind, options.num_ranks, [&](const Group& group) {
    RankJob job(backend, layer, options, params, group);
    job.set_tokens(layer, memory.tokens(group.rank()), options.dispatch_dtype);
    job.set_output(memory.output(group.rank()));
    for (int round = 0; round < options.num_rounds; ++round)
      memory.times(group.rank(), round) = job.run_round();
    memory.rows_received(group.rank()) = job.rows_received();
    job.finish();
  });
  return summarise(layer, options, memory);
}

}  // namespace tokenyard::cli
