// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_rank.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "tokenyard/communication.h"
#include "tokenyard/error.h"

#include "cli/bench_experts.h"
#include "cli/bench_rows.h"
#include "cli/rank_device.h"
#include "cli/rounds.h"
#include "cli/row_copies.h"
#include "protocol/block_cast.h"

namespace tokenyard::cli {
namespace {

void pin_to_core(int rank) {
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(rank % cores), &set);
  if (pthread_setaffinity_np(pthread_self(), sizeof(set), &set) != 0) {
    throw Error(ErrorCode::kSystem, fmt::format("rank {} cannot be pinned to core {}", rank, rank % cores));
  }
}

MoeParams params_of(const BenchJob& job) {
  return {.num_experts = job.shape.num_experts,
          .top_k = job.shape.top_k,
          .hidden_size = static_cast<int>(job.shape.hidden_size),
          .max_tokens_per_rank = static_cast<int>(job.shape.num_tokens),
          .dtype = job.dtype,
          .dispatch_format = job.rows == BenchRows::kQuantised ? DispatchFormat::kFp8Block128 : DispatchFormat::kNone};
}

CommunicationOptions options_of(const BenchJob& job, const RankDevice& device) {
  CommunicationOptions options = device.communication_options(job.num_threads);
  options.deadline = options.first_round_deadline = job.deadline;
  return options;
}

class BenchRank {
 public:
  BenchRank(const BenchJob& job, const Group& group, BenchBoard& board)
      : job_(job),
        rank_(group.rank()),
        board_(board),
        device_(make_rank_device(job.engine, group.rank())),
        communication_(create_communication(group, params_of(job), job.config, options_of(job, *device_))),
        experts_(job, group.rank()),
        tokens_per_rank_(static_cast<std::size_t>(job.shape.num_ranks), job.shape.num_tokens) {
    make_tensors();
    if (job.rows == BenchRows::kCast) dispatch_options_.cast = DispatchCast::kFp8Block128;
    dispatch_options_.stream = combine_options_.stream = device_->stream();
    round_ = {.meet = [this] { board_.barrier(); },
              .dispatch = [this] { return communication_.dispatch(input_, dispatch_options_, received_); },
              .combine =
                  [this] {
                    return communication_.combine(received_.handle, {.expert_output = expert_output()},
                                                  combine_options_, sums_);
                  }};
  }

  // The first round of its kind, whose rows and sums are looked at. Leaves the rows that experts would write where all
  // rounds that follow find them.
  void play_first(const BenchVariant& variant) {
    set(variant);
    spoil_output();
    board_.barrier();
    device_->finish(communication_, round_.dispatch());
    board_.barrier();
    experts_.run(*device_, communication_, received_, expert_output());
    board_.barrier();
    device_->finish(communication_, round_.combine());
    check_output();
  }

  // The rounds that are measured from here on.
  void set(const BenchVariant& variant) {
    dispatch_options_.num_sms = combine_options_.num_sms = variant.num_sms;
    // Nothing then waits for counts, which no graph could.
    if (variant.graph && communication_.contract().takes_num_worst_tokens)
      dispatch_options_.num_worst_tokens = job_.shape.num_ranks * job_.shape.num_tokens;
    if (variant.graph && communication_.contract().takes_num_tokens_per_rank)
      dispatch_options_.num_tokens_per_rank = tokens_per_rank_;
  }

  void capture() {
    board_.barrier();
    device_->capture(round_);
    spoil_output();
    board_.barrier();
    static_cast<void>(device_->train(communication_, 1));
    check_output();
  }

  BenchRound play() {
    const RankDevice::RoundTimes times = device_->play(communication_, round_);
    return {.dispatch_us = times.dispatch_us, .combine_us = times.combine_us, .round_us = times.round_us};
  }

  // A round as it is measured.
  void play_checked() {
    spoil_output();
    static_cast<void>(play());
    check_output();
  }

  double train() {
    board_.barrier();
    return device_->train(communication_, job_.num_rounds);
  }

  void finish() { require_ok(communication_.destroy()); }

 private:
  void make_tensors() {
    const BenchShape& shape = job_.shape;
    const bool quantised = job_.rows == BenchRows::kQuantised;
    const Dtype dtype = quantised ? Dtype::kF8e4m3 : job_.dtype;
    BenchRowBytes rows(shape, dtype);
    for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
      const std::span<const std::byte> row = rows.row({rank_, token}, quantised ? protocol::kLargestF8e4m3 : 1.0F);
      hidden_.insert(hidden_.end(), row.begin(), row.end());
    }
    output_.resize(static_cast<std::size_t>(shape.num_tokens * shape.hidden_size * size_of(job_.dtype)));
    weights_.assign(static_cast<std::size_t>(shape.num_tokens * shape.top_k), 1.0F);
    input_.hidden_states = device_->bring({hidden_.data(), dtype, {shape.num_tokens, shape.hidden_size}});
    if (quantised) {
      const std::int64_t blocks = protocol::ceil_div(shape.hidden_size, protocol::kCastBlock);
      scales_.assign(static_cast<std::size_t>(shape.num_tokens * blocks), 1.0F / protocol::kLargestF8e4m3);
      input_.hidden_states_scale = device_->bring({scales_.data(), Dtype::kF32, {shape.num_tokens, blocks}});
    }
    input_.topk_ids =
        device_->bring(TensorView::of_const(own_ids().data(), Dtype::kI32, {shape.num_tokens, shape.top_k}));
    input_.topk_weights = device_->bring({weights_.data(), Dtype::kF32, {shape.num_tokens, shape.top_k}});
    sums_ = device_->bring({output_.data(), job_.dtype, {shape.num_tokens, shape.hidden_size}});
  }

  [[nodiscard]] const std::vector<std::int32_t>& own_ids() const { return job_.ids[static_cast<std::size_t>(rank_)]; }

  // Memory that keeps what the first round wrote.
  TensorView expert_output() { return expert_memory_.view(*device_, communication_, received_); }

  // To what is no number.
  void spoil_output() {
    std::ranges::fill(output_, std::byte{0xFF});
    device_->store(sums_);
  }

  void check_output() { experts_.require_sums(device_->load(sums_)); }

  const BenchJob& job_;
  int rank_;
  BenchBoard& board_;
  std::unique_ptr<RankDevice> device_;
  Communication communication_;
  BenchExperts experts_;
  std::vector<std::int64_t> tokens_per_rank_;
  std::vector<std::byte> hidden_, output_;
  ExpertMemory expert_memory_;
  std::vector<float> weights_, scales_;
  DispatchInput input_;
  TensorView sums_;
  DispatchOptions dispatch_options_;
  CombineOptions combine_options_;
  DispatchResult received_;
  RankDevice::Round round_;
};

struct Measurement {
  const BenchJob& job;
  int rank;
  BenchBoard& board;
};

// `memcpy` after each round, where there is one to compare with.
void play_rounds(const Measurement& at, BenchRank& rank, const BenchBoard::Times& times) {
  std::optional<RowCopies> copies;
  if (at.job.engine.on_host()) copies.emplace(at.job, at.rank);
  for (int i = 1 - at.job.warmup; i < at.job.num_rounds; ++i) {
    BenchRound round = rank.play();
    if (copies) {
      at.board.barrier();
      const Clock::time_point start = Clock::now();
      copies->run();
      round.memcpy_us = microseconds_since(start);
    }
    if (i >= 0) times.round(at.rank, i) = round;
  }
}

void play_variant(const Measurement& at, BenchRank& rank, int index) {
  const BenchVariant& variant = at.job.variants[static_cast<std::size_t>(index)];
  const BenchBoard::Times times = at.board.times(index);
  rank.set(variant);
  if (variant.graph) rank.capture();
  rank.play_checked();
  play_rounds(at, rank, times);
  for (int i = -1; variant.graph && i < kBenchTrains; ++i) {
    const double time = rank.train();
    if (i >= 0) times.train(at.rank, i) = time;
  }
  rank.play_checked();
  at.board.finished(at.rank).store(index + 1, std::memory_order_release);  // pairs with the load in finished_by_all
}

void play_all(const Measurement& at, const Group& group) {
  BenchRank rank(at.job, group, at.board);
  const std::vector<BenchVariant>& variants = at.job.variants;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    // A round for a graph may have its rows elsewhere.
    if (i == 0 || variants[i].graph != variants[i - 1].graph) rank.play_first(variants[i]);
    play_variant(at, rank, static_cast<int>(i));
  }
  rank.finish();
}

}  // namespace

void run_bench_rank(const BenchJob& job, const Group& group, BenchBoard& board) {
  if (job.pin) pin_to_core(group.rank());
  try {
    play_all({.job = job, .rank = group.rank(), .board = board}, group);
  } catch (...) {
    board.give_up();
    throw;
  }
}

}  // namespace tokenyard::cli
