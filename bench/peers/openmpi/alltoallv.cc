// SPDX-License-Identifier: Apache-2.0
#include "alltoallv.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

namespace tokenyard::bench {
namespace {

float from_bf16(std::uint16_t code) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
}

// To nearest even; the bench has no NaN.
std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace

Exchange::Exchange(const cli::BenchShape& shape,
                   int rank,
                   const std::vector<std::vector<std::int32_t>>& ids,
                   ReceivedLayout layout)
    : shape_(shape), rank_(rank), layout_(layout), ids_(ids[static_cast<std::size_t>(rank)]) {
  const auto tokens = static_cast<std::size_t>(shape.num_tokens);
  const auto hidden = static_cast<std::size_t>(shape.hidden_size);
  const auto top_k = static_cast<std::size_t>(shape.top_k);
  const auto ranks = static_cast<std::size_t>(shape.num_ranks);
  const std::size_t sent = tokens * std::min(ranks, top_k);
  const std::size_t received = tokens * ranks;
  tokens_.resize(tokens * hidden);
  for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
    for (std::int64_t column = 0; column < shape.hidden_size; ++column) {
      tokens_[static_cast<std::size_t>(token * shape.hidden_size + column)] =
          to_bf16(cli::bench_value(rank, token, column));
    }
  }
  weights_.assign(tokens * top_k, 1.0F);
  packed_.resize(sent * hidden);
  packed_ids_.resize(sent * top_k);
  packed_weights_.resize(sent * top_k);
  returned_.resize(sent * hidden);
  received_.resize(received * hidden);
  received_ids_.resize(received * top_k);
  received_weights_.resize(received * top_k);
  expert_output_.resize(received * hidden);
  output_.resize(tokens * hidden);
  send_counts_.resize(ranks);
  receive_counts_.resize(ranks);
  copies_.reserve(sent);
  first_copy_.resize(tokens + 1);
  sums_.resize(hidden);
  if (layout == ReceivedLayout::kCompact) return;
  int local_experts = 0;
  for (int expert = 0; expert < shape.num_experts; ++expert)
    local_experts += cli::bench_owner(shape, expert) == rank ? 1 : 0;
  rows_per_expert_.resize(static_cast<std::size_t>(local_experts));
  expert_rows_.resize(rows_per_expert_.size() * received * hidden);
  expert_results_.resize(expert_rows_.size());
  pick_rows_.resize(received * top_k);
}

std::int64_t Exchange::num_received() const {
  return std::reduce(receive_counts_.begin(), receive_counts_.end());
}

void Exchange::unpack_by_expert() {
  const auto hidden = static_cast<std::size_t>(shape_.hidden_size);
  const std::int64_t block = shape_.num_ranks * shape_.num_tokens;
  int first = 0;
  while (cli::bench_owner(shape_, first) != rank_)
    ++first;
  std::ranges::fill(rows_per_expert_, 0);
  for (std::int64_t row = 0; row < num_received(); ++row) {
    for (int slot = 0; slot < shape_.top_k; ++slot) {
      const auto pick = static_cast<std::size_t>(row * shape_.top_k + slot);
      const int expert = received_ids_[pick] - first;
      pick_rows_[pick] = -1;
      if (expert < 0 || expert >= static_cast<int>(rows_per_expert_.size())) continue;
      pick_rows_[pick] =
          static_cast<std::int32_t>(expert * block + rows_per_expert_[static_cast<std::size_t>(expert)]++);
      std::memcpy(&expert_rows_[static_cast<std::size_t>(pick_rows_[pick]) * hidden],
                  &received_[static_cast<std::size_t>(row) * hidden], hidden * sizeof(std::uint16_t));
    }
  }
}

void Exchange::reduce_by_token() {
  const auto hidden = static_cast<std::size_t>(shape_.hidden_size);
  float* __restrict sums = sums_.data();
  for (std::int64_t row = 0; row < num_received(); ++row) {
    std::fill_n(sums, hidden, 0.0F);
    for (int slot = 0; slot < shape_.top_k; ++slot) {
      const auto pick = static_cast<std::size_t>(row * shape_.top_k + slot);
      if (pick_rows_[pick] < 0) continue;
      const float weight = received_weights_[pick];
      const std::uint16_t* __restrict result = &expert_results_[static_cast<std::size_t>(pick_rows_[pick]) * hidden];
      for (std::size_t column = 0; column < hidden; ++column)
        sums[column] += weight * from_bf16(result[column]);
    }
    std::uint16_t* __restrict output = &expert_output_[static_cast<std::size_t>(row) * hidden];
    for (std::size_t column = 0; column < hidden; ++column)
      output[column] = to_bf16(sums[column]);
  }
}

// Who gets each token, and where its row stands among the packed ones.
void Exchange::plan() {
  copies_.clear();
  std::ranges::fill(send_counts_, 0);
  std::vector<bool> chosen(static_cast<std::size_t>(shape_.num_ranks));
  for (std::int64_t token = 0; token < shape_.num_tokens; ++token) {
    first_copy_[static_cast<std::size_t>(token)] = static_cast<std::int32_t>(copies_.size());
    std::fill(chosen.begin(), chosen.end(), false);
    for (int slot = 0; slot < shape_.top_k; ++slot) {
      const int owner = cli::bench_owner(shape_, ids_[static_cast<std::size_t>(token * shape_.top_k + slot)]);
      chosen[static_cast<std::size_t>(owner)] = true;
    }
    for (int rank = 0; rank < shape_.num_ranks; ++rank) {
      if (!chosen[static_cast<std::size_t>(rank)]) continue;
      copies_.push_back({static_cast<std::int32_t>(token), rank, send_counts_[static_cast<std::size_t>(rank)]++});
    }
  }
  first_copy_.back() = static_cast<std::int32_t>(copies_.size());
  std::vector<int> first(send_counts_.size());
  std::exclusive_scan(send_counts_.begin(), send_counts_.end(), first.begin(), 0);
  for (Copy& copy : copies_)
    copy.row += first[static_cast<std::size_t>(copy.rank)];
}

void Exchange::exchange(const void* from, void* to, int bytes_per_row, bool back) const {
  const auto ranks = send_counts_.size();
  std::vector<int> send(ranks), receive(ranks), send_at(ranks), receive_at(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    send[rank] = (back ? receive_counts_ : send_counts_)[rank];
    receive[rank] = (back ? send_counts_ : receive_counts_)[rank];
  }
  std::exclusive_scan(send.begin(), send.end(), send_at.begin(), 0);
  std::exclusive_scan(receive.begin(), receive.end(), receive_at.begin(), 0);
  MPI_Datatype row = MPI_DATATYPE_NULL;
  MPI_Type_contiguous(bytes_per_row, MPI_BYTE, &row);
  MPI_Type_commit(&row);
  MPI_Alltoallv(from, send.data(), send_at.data(), row, to, receive.data(), receive_at.data(), row, MPI_COMM_WORLD);
  MPI_Type_free(&row);
}

void Exchange::dispatch() {
  plan();
  MPI_Alltoall(send_counts_.data(), 1, MPI_INT, receive_counts_.data(), 1, MPI_INT, MPI_COMM_WORLD);
  const auto hidden = static_cast<std::size_t>(shape_.hidden_size);
  const auto top_k = static_cast<std::size_t>(shape_.top_k);
  for (const Copy& copy : copies_) {
    const auto token = static_cast<std::size_t>(copy.token);
    const auto row = static_cast<std::size_t>(copy.row);
    std::memcpy(&packed_[row * hidden], &tokens_[token * hidden], hidden * sizeof(std::uint16_t));
    std::memcpy(&packed_ids_[row * top_k], &ids_[token * top_k], top_k * sizeof(std::int32_t));
    std::memcpy(&packed_weights_[row * top_k], &weights_[token * top_k], top_k * sizeof(float));
  }
  // Rows arrive ordered by source and token, which is the compact order already: nothing is left to unpack.
  exchange(packed_.data(), received_.data(), static_cast<int>(hidden * 2), false);
  exchange(packed_ids_.data(), received_ids_.data(), static_cast<int>(top_k * 4), false);
  exchange(packed_weights_.data(), received_weights_.data(), static_cast<int>(top_k * 4), false);
  if (layout_ == ReceivedLayout::kExpertMajor) unpack_by_expert();
}

void Exchange::run_experts() {
  const std::int64_t rows = num_received();
  const auto hidden = static_cast<std::size_t>(shape_.hidden_size);
  for (std::int64_t pick = 0; layout_ == ReceivedLayout::kExpertMajor && pick < rows * shape_.top_k; ++pick) {
    const std::int32_t row = pick_rows_[static_cast<std::size_t>(pick)];
    const float factor = cli::bench_factor(received_ids_[static_cast<std::size_t>(pick)]);
    for (std::size_t column = 0; row >= 0 && column < hidden; ++column) {
      const std::size_t at = static_cast<std::size_t>(row) * hidden + column;
      expert_results_[at] = to_bf16(factor * from_bf16(expert_rows_[at]));
    }
  }
  if (layout_ == ReceivedLayout::kExpertMajor) return;
  for (std::int64_t row = 0; row < rows; ++row) {
    float factor = 0;
    for (int slot = 0; slot < shape_.top_k; ++slot) {
      const std::int32_t id = received_ids_[static_cast<std::size_t>(row * shape_.top_k + slot)];
      const float weight = received_weights_[static_cast<std::size_t>(row * shape_.top_k + slot)];
      if (cli::bench_owner(shape_, id) == rank_) factor += weight * cli::bench_factor(id);
    }
    for (std::int64_t column = 0; column < shape_.hidden_size; ++column) {
      const auto at = static_cast<std::size_t>(row * shape_.hidden_size + column);
      expert_output_[at] = to_bf16(factor * from_bf16(received_[at]));
    }
  }
}

void Exchange::combine() {
  if (layout_ == ReceivedLayout::kExpertMajor) reduce_by_token();
  exchange(expert_output_.data(), returned_.data(), static_cast<int>(shape_.hidden_size * 2), true);
  const auto hidden = static_cast<std::size_t>(shape_.hidden_size);
  float* __restrict sums = sums_.data();
  for (std::int64_t token = 0; token < shape_.num_tokens; ++token) {
    const auto at = static_cast<std::size_t>(token);
    std::fill_n(sums, hidden, 0.0F);
    for (std::int32_t i = first_copy_[at]; i < first_copy_[at + 1]; ++i) {
      const std::uint16_t* __restrict row =
          &returned_[static_cast<std::size_t>(copies_[static_cast<std::size_t>(i)].row) * hidden];
      for (std::size_t column = 0; column < hidden; ++column)
        sums[column] += from_bf16(row[column]);
    }
    std::uint16_t* __restrict output = &output_[at * hidden];
    for (std::size_t column = 0; column < hidden; ++column)
      output[column] = to_bf16(sums[column]);
  }
}

std::int64_t Exchange::count_wrong() const {
  std::int64_t wrong = 0;
  for (std::int64_t token = 0; token < shape_.num_tokens; ++token) {
    const float factor = cli::bench_total_factor(ids_, shape_.top_k, token);
    for (std::int64_t column = 0; column < shape_.hidden_size; ++column) {
      const float right = factor * cli::bench_value(rank_, token, column);
      wrong += from_bf16(output_[static_cast<std::size_t>(token * shape_.hidden_size + column)]) != right ? 1 : 0;
    }
  }
  return wrong;
}

std::int64_t Exchange::dispatch_bytes() const {
  const std::int64_t rows =
      std::reduce(send_counts_.begin(), send_counts_.end()) - send_counts_[static_cast<std::size_t>(rank_)];
  return rows * (shape_.hidden_size * 2 + std::int64_t{shape_.top_k} * 8);
}

std::int64_t Exchange::combine_bytes() const {
  const std::int64_t rows =
      std::reduce(receive_counts_.begin(), receive_counts_.end()) - receive_counts_[static_cast<std::size_t>(rank_)];
  return rows * shape_.hidden_size * 2;
}

}  // namespace tokenyard::bench
