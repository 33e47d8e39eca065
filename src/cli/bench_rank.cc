// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_rank.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "tokenyard/error.h"

#include "cli/rank_device.h"
#include "cli/rounds.h"
#include "cli/row_access.h"
#include "protocol/casts.h"

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

void store(Dtype dtype, std::byte* row, std::int64_t column, float value) {
  if (dtype == Dtype::kF32) {
    reinterpret_cast<float*>(row)[column] = value;
  } else if (dtype == Dtype::kBf16) {
    reinterpret_cast<std::uint16_t*>(row)[column] = protocol::encode<protocol::Bf16>(value);
  } else {
    reinterpret_cast<std::uint16_t*>(row)[column] = protocol::encode<protocol::F16>(value);
  }
}

float load(Dtype dtype, const std::byte* row, std::int64_t column) {
  if (dtype == Dtype::kF32) return reinterpret_cast<const float*>(row)[column];
  const std::uint16_t code = reinterpret_cast<const std::uint16_t*>(row)[column];
  return dtype == Dtype::kBf16 ? protocol::decode<protocol::Bf16>(code) : protocol::decode<protocol::F16>(code);
}

// The rows of both phases copied one by one, this rank's own too, from and to memory of the sizes that a round has.
class RowCopies {
 public:
  RowCopies(const BenchJob& job, int rank) : row_bytes_(job.shape.hidden_size * size_of(job.dtype)) {
    const std::vector<std::int32_t>& ids = job.ids[static_cast<std::size_t>(rank)];
    for (std::int64_t token = 0; token < job.shape.num_tokens; ++token) {
      std::vector<int> owners;
      owners.reserve(static_cast<std::size_t>(job.shape.top_k));
      for (int slot = 0; slot < job.shape.top_k; ++slot)
        owners.push_back(bench_owner(job.shape, ids[static_cast<std::size_t>(token * job.shape.top_k + slot)]));
      std::ranges::sort(owners);
      const auto copies = std::unique(owners.begin(), owners.end()) - owners.begin();
      token_of_.insert(token_of_.end(), static_cast<std::size_t>(copies), token);
    }
    const auto rows = token_of_.size() * static_cast<std::size_t>(row_bytes_);
    tokens_.resize(static_cast<std::size_t>(job.shape.num_tokens * row_bytes_), std::byte{1});
    for (auto* memory : {&dispatched_, &returned_, &landed_})
      memory->resize(rows, std::byte{1});
  }

  void run() {
    const auto bytes = static_cast<std::size_t>(row_bytes_);
    for (std::size_t i = 0; i < token_of_.size(); ++i)
      std::memcpy(dispatched_.data() + i * bytes, tokens_.data() + token_of_[i] * row_bytes_, bytes);
    for (std::size_t i = 0; i < token_of_.size(); ++i)
      std::memcpy(landed_.data() + i * bytes, returned_.data() + i * bytes, bytes);
  }

 private:
  std::int64_t row_bytes_;
  std::vector<std::int64_t> token_of_;
  std::vector<std::byte> tokens_, dispatched_, returned_, landed_;
};

class BenchRank {
 public:
  BenchRank(const BenchJob& job, const Group& group, BenchBoard& board)
      : job_(job),
        rank_(group.rank()),
        board_(board),
        device_(make_rank_device(job.engine, group.rank())),
        communication_(
            create_communication(group, params_of(job), job.config, device_->communication_options(job.num_threads))) {
    make_tensors();
    dispatch_options_.cast = job.cast;
    dispatch_options_.num_sms = combine_options_.num_sms = job.num_sms;
    dispatch_options_.stream = combine_options_.stream = device_->stream();
    round_ = {.meet = [this] { board_.barrier(); },
              .dispatch = [this] { return communication_.dispatch(input_, dispatch_options_, received_); },
              .combine =
                  [this] {
                    return communication_.combine(received_.handle, {.expert_output = expert_output()},
                                                  combine_options_, sums_);
                  }};
  }

  // The first round, whose rows and sums are looked at. Leaves the rows that experts would write where all other rounds
  // find them.
  void play_first() {
    spoil_output();
    board_.barrier();
    device_->finish(communication_, round_.dispatch());
    board_.barrier();
    run_experts();
    board_.barrier();
    device_->finish(communication_, round_.combine());
    check_output();
  }

  void capture() {
    board_.barrier();
    device_->capture(round_);
    play_checked();
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
  static MoeParams params_of(const BenchJob& job) {
    return {.num_experts = job.shape.num_experts,
            .top_k = job.shape.top_k,
            .hidden_size = static_cast<int>(job.shape.hidden_size),
            .max_tokens_per_rank = static_cast<int>(job.shape.num_tokens),
            .dtype = job.dtype};
  }

  void make_tensors() {
    const BenchShape& shape = job_.shape;
    row_bytes_ = shape.hidden_size * size_of(job_.dtype);
    hidden_.resize(static_cast<std::size_t>(shape.num_tokens * row_bytes_));
    output_.resize(hidden_.size());
    weights_.assign(static_cast<std::size_t>(shape.num_tokens * shape.top_k), 1.0F);
    for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
      for (std::int64_t column = 0; column < shape.hidden_size; ++column)
        store(job_.dtype, hidden_.data() + token * row_bytes_, column, bench_value(rank_, token, column));
    }
    input_.hidden_states = device_->bring({hidden_.data(), job_.dtype, {shape.num_tokens, shape.hidden_size}});
    input_.topk_ids =
        device_->bring(TensorView::of_const(own_ids().data(), Dtype::kI32, {shape.num_tokens, shape.top_k}));
    input_.topk_weights = device_->bring({weights_.data(), Dtype::kF32, {shape.num_tokens, shape.top_k}});
    sums_ = device_->bring({output_.data(), job_.dtype, {shape.num_tokens, shape.hidden_size}});
  }

  [[nodiscard]] const std::vector<std::int32_t>& own_ids() const { return job_.ids[static_cast<std::size_t>(rank_)]; }

  // Memory that keeps what the first round wrote.
  TensorView expert_output() { return expert_memory_.view(*device_, communication_, received_); }

  // Row by row in the order of (source, token): the layouts differ only in where a row stands.
  void run_experts() {
    const TensorView output = expert_output();
    const RowAccess rows(device_->host_side(output));
    received_rows_ = device_->load(received_.hidden_states);
    const Contract& contract = communication_.contract();
    std::int64_t compact = 0;
    std::vector<std::int64_t> next_of_expert(
        static_cast<std::size_t>(num_local_experts(communication_.params(), rank_, job_.shape.num_ranks)));
    for (int source = 0; source < job_.shape.num_ranks; ++source) {
      for (std::int64_t token = 0; token < job_.shape.num_tokens; ++token) {
        const float factor = own_factor(source, token);
        if (factor == 0 && contract.output_layout != OutputLayout::kEveryRank) continue;
        switch (contract.output_layout) {
          case OutputLayout::kExpertMajor:
            write_expert_rows(rows, source, token, next_of_expert);
            break;
          case OutputLayout::kRankMajor:
            write_row(rows, source * received_.counts.tokens_per_rank + token, {source, token}, factor);
            break;
          default:
            write_row(rows, compact++, {source, token}, factor);
        }
      }
    }
    device_->store(output);
  }

  // What this rank's experts multiply the token by.
  [[nodiscard]] float own_factor(int source, std::int64_t token) const {
    float factor = 0;
    const std::vector<std::int32_t>& ids = job_.ids[static_cast<std::size_t>(source)];
    for (int slot = 0; slot < job_.shape.top_k; ++slot) {
      const std::int32_t id = ids[static_cast<std::size_t>(token * job_.shape.top_k + slot)];
      if (bench_owner(job_.shape, id) == rank_) factor += bench_factor(id);
    }
    return factor;
  }

  void write_expert_rows(const RowAccess& rows, int source, std::int64_t token, std::vector<std::int64_t>& next) {
    const int first = first_local_expert(communication_.params(), rank_, job_.shape.num_ranks);
    const std::int64_t block = job_.shape.num_ranks * job_.shape.num_tokens;
    const std::vector<std::int32_t>& ids = job_.ids[static_cast<std::size_t>(source)];
    for (int slot = 0; slot < job_.shape.top_k; ++slot) {
      const std::int32_t id = ids[static_cast<std::size_t>(token * job_.shape.top_k + slot)];
      if (bench_owner(job_.shape, id) != rank_) continue;
      const auto expert = static_cast<std::size_t>(id - first);
      write_row(rows, static_cast<std::int64_t>(expert) * block + next[expert]++, {source, token}, bench_factor(id));
    }
  }

  void write_row(const RowAccess& rows, std::int64_t row, std::pair<int, std::int64_t> from, float factor) const {
    if (job_.cast == DispatchCast::kNone) check_received(row, from);
    auto* to = rows.row<std::byte>(row);
    for (std::int64_t column = 0; column < job_.shape.hidden_size; ++column)
      store(job_.dtype, to, column, factor * bench_value(from.first, from.second, column));
  }

  void check_received(std::int64_t row, std::pair<int, std::int64_t> from) const {
    const std::byte* received = RowAccess(received_rows_).row<std::byte>(row);
    for (std::int64_t column = 0; column < job_.shape.hidden_size; ++column) {
      const float right = bench_value(from.first, from.second, column);
      const float got = load(job_.dtype, received, column);
      if (got == right) continue;
      throw Error(ErrorCode::kPeerFailed,
                  fmt::format("row {}, token {} of rank {}, column {}: dispatch brought {}; {} is right", row,
                              from.second, from.first, column, got, right));
    }
  }

  // To what is no number.
  void spoil_output() {
    std::ranges::fill(output_, std::byte{0xFF});
    device_->store(sums_);
  }

  void check_output() {
    device_->load(sums_);
    for (std::int64_t token = 0; token < job_.shape.num_tokens; ++token) {
      const float factor = bench_total_factor(own_ids(), job_.shape.top_k, token);
      const std::byte* row = output_.data() + token * row_bytes_;
      for (std::int64_t column = 0; column < job_.shape.hidden_size; ++column) {
        const float right = factor * bench_value(rank_, token, column);
        const float got = load(job_.dtype, row, column);
        if (got == right) continue;
        throw Error(ErrorCode::kPeerFailed,
                    fmt::format("token {}, column {}: combine gave {}; {} is right", token, column, got, right));
      }
    }
  }

  const BenchJob& job_;
  int rank_;
  BenchBoard& board_;
  std::unique_ptr<RankDevice> device_;
  Communication communication_;
  std::int64_t row_bytes_ = 0;
  std::vector<std::byte> hidden_, output_;
  ExpertMemory expert_memory_;
  std::vector<float> weights_;
  DispatchInput input_;
  TensorView sums_, received_rows_;
  DispatchOptions dispatch_options_;
  CombineOptions combine_options_;
  DispatchResult received_;
  RankDevice::Round round_;
};

// [head] [rounds of each rank] [trains of each rank]
constexpr std::int64_t kHeadBytes = 64;

std::int64_t board_bytes(int num_ranks, int num_rounds) {
  return kHeadBytes + std::int64_t{num_ranks} * num_rounds * static_cast<std::int64_t>(sizeof(BenchRound)) +
         std::int64_t{num_ranks} * kBenchTrains * static_cast<std::int64_t>(sizeof(double));
}

// `memcpy` after each round, where there is one to compare with.
void play_rounds(const BenchJob& job, BenchRank& rank, int index, BenchBoard& board) {
  std::optional<RowCopies> copies;
  if (job.engine.on_host()) copies.emplace(job, index);
  for (int i = 1 - job.warmup; i < job.num_rounds; ++i) {
    BenchRound times = rank.play();
    if (copies) {
      board.barrier();
      const Clock::time_point start = Clock::now();
      copies->run();
      times.memcpy_us = microseconds_since(start);
    }
    if (i >= 0) board.round(index, i) = times;
  }
}

void play_all(const BenchJob& job, const Group& group, BenchBoard& board) {
  BenchRank rank(job, group, board);
  rank.play_first();
  if (job.graph) rank.capture();
  play_rounds(job, rank, group.rank(), board);
  for (int i = -1; job.graph && i < kBenchTrains; ++i) {
    const double time = rank.train();
    if (i >= 0) board.train(group.rank(), i) = time;
  }
  rank.play_checked();
  rank.finish();
}

}  // namespace

BenchBoard::BenchBoard(int num_ranks, int num_rounds)
    : num_ranks_(num_ranks),
      num_rounds_(num_rounds),
      segment_(system::Segment::create(board_bytes(num_ranks, num_rounds))) {
  new (segment_.data()) Head{};
}

BenchBoard::Head& BenchBoard::head() const {
  return *std::launder(reinterpret_cast<Head*>(segment_.data()));
}

void BenchBoard::barrier() {
  Head& shared = head();
  const std::uint32_t generation = shared.generation.load(std::memory_order_acquire);
  if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(num_ranks_)) {
    shared.arrived.store(0, std::memory_order_relaxed);  // published by the next store
    shared.generation.store(generation + 1, std::memory_order_release);
    return;
  }
  while (shared.generation.load(std::memory_order_acquire) == generation) {
    if (shared.given_up.load(std::memory_order_relaxed) != 0)
      throw Error(ErrorCode::kPeerFailed, "another rank gave up");
    sched_yield();
  }
}

void BenchBoard::give_up() {
  head().given_up.store(1, std::memory_order_relaxed);  // carries no data
}

BenchRound& BenchBoard::round(int rank, int index) const {
  return reinterpret_cast<BenchRound*>(segment_.data() + kHeadBytes)[rank * num_rounds_ + index];
}

double& BenchBoard::train(int rank, int index) const {
  return reinterpret_cast<double*>(&round(num_ranks_, 0))[rank * kBenchTrains + index];
}

void run_bench_rank(const BenchJob& job, const Group& group, BenchBoard& board) {
  if (job.pin) pin_to_core(group.rank());
  try {
    play_all(job, group, board);
  } catch (...) {
    board.give_up();
    throw;
  }
}

}  // namespace tokenyard::cli
