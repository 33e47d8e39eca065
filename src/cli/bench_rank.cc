// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_rank.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "tokenyard/error.h"

#include "cli/rounds.h"
#include "cli/row_access.h"
#include "protocol/block_cast.h"
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
  BenchRank(const BenchJob& job, const Group& group)
      : job_(job),
        rank_(group.rank()),
        communication_(create_communication(group, params_of(job), job.config, round_options(job.num_threads))) {
    const BenchShape& shape = job.shape;
    row_bytes_ = shape.hidden_size * size_of(job.dtype);
    hidden_.resize(static_cast<std::size_t>(shape.num_tokens * row_bytes_));
    output_.resize(hidden_.size());
    weights_.assign(static_cast<std::size_t>(shape.num_tokens * shape.top_k), 1.0F);
    for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
      for (std::int64_t column = 0; column < shape.hidden_size; ++column)
        store(job.dtype, hidden_.data() + token * row_bytes_, column, bench_value(rank_, token, column));
    }
    auto* ids = const_cast<std::int32_t*>(own_ids().data());  // a view that nobody writes through
    input_ = {.hidden_states = TensorView(hidden_.data(), job.dtype, {shape.num_tokens, shape.hidden_size}),
              .topk_ids = TensorView(ids, Dtype::kI32, {shape.num_tokens, shape.top_k}),
              .topk_weights = TensorView(weights_.data(), Dtype::kF32, {shape.num_tokens, shape.top_k})};
    dispatch_options_.cast = job.cast;
  }

  // The rows that experts would write are there already, in all rounds but the first.
  BenchRound play(BenchBoard& board, bool first) {
    BenchRound times;
    board.barrier();
    Clock::time_point start = Clock::now();
    require_ok(communication_.dispatch(input_, dispatch_options_, received_));
    times.dispatch_us = microseconds_since(start);
    if (first) run_experts();
    board.barrier();
    start = Clock::now();
    TensorView output(output_.data(), job_.dtype, {job_.shape.num_tokens, job_.shape.hidden_size});
    require_ok(communication_.combine(received_.handle, {.expert_output = expert_output()}, {}, output));
    times.combine_us = microseconds_since(start);
    if (first) check_output();
    return times;
  }

  [[nodiscard]] BenchVolume volume() const {
    BenchVolume volume;
    const std::int64_t sent = job_.cast == DispatchCast::kNone ? row_bytes_ : cast_bytes();
    const std::int64_t routing = std::int64_t{job_.shape.top_k} * 8;
    for (int peer = 0; peer < job_.shape.num_ranks; ++peer) {
      if (peer == rank_) continue;
      volume.dispatch_bytes += rows_between(rank_, peer) * (sent + routing);
      volume.combine_bytes += rows_between(peer, rank_) * row_bytes_;
    }
    return volume;
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

  [[nodiscard]] const std::vector<std::int32_t>& own_ids() const { return job_.ids[static_cast<std::size_t>(rank_)]; }

  [[nodiscard]] std::int64_t cast_bytes() const {
    const protocol::RowBytes row = protocol::cast_row_bytes(job_.cast, job_.shape.hidden_size);
    return row.values + row.scales;
  }

  // Of `source`'s tokens that have an expert of `owner`.
  [[nodiscard]] std::int64_t rows_between(int source, int owner) const {
    if (communication_.contract().output_layout == OutputLayout::kEveryRank) return job_.shape.num_tokens;
    const std::vector<std::int32_t>& ids = job_.ids[static_cast<std::size_t>(source)];
    std::int64_t rows = 0;
    for (std::int64_t token = 0; token < job_.shape.num_tokens; ++token) {
      const auto first = ids.begin() + static_cast<std::ptrdiff_t>(token * job_.shape.top_k);
      rows += std::any_of(first, first + job_.shape.top_k,
                          [&](std::int32_t id) { return bench_owner(job_.shape, id) == owner; });
    }
    return rows;
  }

  // Memory that keeps what the first round wrote.
  TensorView expert_output() { return expert_memory_.view(*device_, communication_, received_); }

  // Row by row in the order of (source, token): the layouts differ only in where a row stands.
  void run_experts() {
    const RowAccess rows(expert_output());
    const Contract& contract = communication_.contract();
    std::int64_t compact = 0;
    std::vector<std::int64_t> next_of_expert(received_.counts.rows_per_expert.size(), 0);
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
    auto* to = rows.row<std::byte>(row);
    for (std::int64_t column = 0; column < job_.shape.hidden_size; ++column)
      store(job_.dtype, to, column, factor * bench_value(from.first, from.second, column));
  }

  void check_output() const {
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
  std::unique_ptr<RankDevice> device_ = make_rank_device({}, 0);
  Communication communication_;
  std::int64_t row_bytes_ = 0;
  std::vector<std::byte> hidden_, output_;
  ExpertMemory expert_memory_;
  std::vector<float> weights_;
  DispatchInput input_;
  DispatchOptions dispatch_options_;
  DispatchResult received_;
};

std::int64_t board_bytes(int num_ranks, int num_rounds) {
  constexpr auto kLine = std::int64_t{64};
  return kLine + num_ranks * static_cast<std::int64_t>(sizeof(BenchVolume)) +
         std::int64_t{num_ranks} * num_rounds * static_cast<std::int64_t>(sizeof(BenchRound));
}

}  // namespace

BenchBoard::BenchBoard(int num_ranks, int num_rounds)
    : num_ranks_(num_ranks),
      num_rounds_(num_rounds),
      segment_(system::Segment::create(board_bytes(num_ranks, num_rounds))) {
  new (segment_.data()) Head{};
}

void BenchBoard::barrier() {
  auto* head = std::launder(reinterpret_cast<Head*>(segment_.data()));
  const std::uint32_t generation = head->generation.load(std::memory_order_acquire);
  if (head->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(num_ranks_)) {
    head->arrived.store(0, std::memory_order_relaxed);  // published by the next store
    head->generation.store(generation + 1, std::memory_order_release);
    return;
  }
  while (head->generation.load(std::memory_order_acquire) == generation)
    sched_yield();
}

BenchVolume& BenchBoard::volume(int rank) const {
  return reinterpret_cast<BenchVolume*>(segment_.data() + 64)[rank];
}

BenchRound& BenchBoard::round(int rank, int index) const {
  auto* rounds = reinterpret_cast<BenchRound*>(&volume(num_ranks_));
  return rounds[rank * num_rounds_ + index];
}

void run_bench_rank(const BenchJob& job, const Group& group, BenchBoard& board) {
  if (job.pin) pin_to_core(group.rank());
  BenchRank rank(job, group);
  RowCopies copies(job, group.rank());
  for (int i = -job.warmup; i < job.num_rounds; ++i) {
    BenchRound times = rank.play(board, i == -job.warmup);
    board.barrier();
    const Clock::time_point start = Clock::now();
    copies.run();
    times.memcpy_us = microseconds_since(start);
    if (i >= 0) board.round(group.rank(), i) = times;
  }
  board.volume(group.rank()) = rank.volume();
  rank.finish();
}

}  // namespace tokenyard::cli
