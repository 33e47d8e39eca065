// SPDX-License-Identifier: Apache-2.0
// Combine: expert output waits in its owner's window, and the origin of each token pulls and sums its rows.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#include <string>

#include "engine/host/host_engine.h"
#include "engine/host/rows.h"
#include "engine/host/word.h"
#include "protocol/owner.h"

namespace tokenyard::engine::host {

namespace {

std::int64_t hidden_of(const TensorView& rows) {
  return rows.shape[static_cast<std::size_t>(rows.num_dims - 1)];
}

}  // namespace

Dtype HostEngine::wire_dtype() const {
  return setup_.spec.low_precision_combine ? Dtype::kF8e4m3 : setup_.params.dtype;
}

Status HostEngine::acquire_combine_section() {
  begin(Phase::kCombine, combine_epoch_ + 1);
  return wait_combine_section();
}

Status HostEngine::wait_combine_section() {
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int peer = visited(i);
    const Status status = wait_rows_released(kCombinePhase, peer, owed_epoch_[static_cast<std::size_t>(peer)]);
    if (!status.ok()) return status;
  }
  return {};
}

Status HostEngine::combine_send(const CombineRequest& request, Round& round) {
  const std::uint32_t epoch = ++combine_epoch_;
  ++num_combines_;
  round.combine_epoch = epoch;
  begin(Phase::kCombine, epoch);
  const Status status = wait_combine_section();
  if (!status.ok()) return status;
  stream_ = round.num_rows * setup_.layout.combine_stride() >= kStreamVolume;
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int source = visited(i);
    const auto at = static_cast<std::size_t>(source);
    if (round.rows_received[at] == 0) continue;
    stage_rows(request, round, source);
    protocol::HeaderLine& header = window(source).header(kCombinePhase, epoch, setup_.rank);
    header.row_limit = round.row_limit;
    header.agreed = hidden_of(request.expert_output);
    header.status = protocol::HeaderStatus::kOk;
    const auto rows = static_cast<std::uint32_t>(round.rows_received[at]);
    store_release(header.stamp, protocol::encode_stamp(epoch, rows), ReleaseSite::kCombineHeader);
    owed_epoch_[at] = epoch;
  }
  return {};
}

void HostEngine::stage_rows(const CombineRequest& request, const Round& round, int source) {
  const auto at = static_cast<std::size_t>(source);
  const std::int64_t base = round.row_base[at];
  if (final_places()) {
    const std::int64_t rows = std::clamp<std::int64_t>(round.row_limit - base, 0, round.rows_received[at]);
    team_.run(rows, [&](std::int64_t begin, std::int64_t end, int /*thread*/) {
      for (std::int64_t row = base + begin; row < base + end; ++row)
        stage_row(request, row, row);
      flush_streams();
    });
    return;
  }
  const int per_chunk = setup_.layout.shape().tokens_per_chunk;
  const std::uint64_t* masks = round.masks.data() + at * static_cast<std::size_t>(setup_.layout.max_chunks());
  const std::int64_t first_row = static_cast<std::int64_t>(source) * round.tokens_per_rank;
  team_.run(protocol::num_chunks(round.tokens_of[at], per_chunk), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      for (std::uint64_t mask = masks[chunk]; mask != 0; mask &= mask - 1) {
        const std::int64_t token = chunk * per_chunk + std::countr_zero(mask);
        stage_row(request, first_row + token, base + token);
      }
    }
    flush_streams();
  });
}

// `from_row` counts the rows that the caller sees, `to_row` those of the combine section.
void HostEngine::stage_row(const CombineRequest& request, std::int64_t from_row, std::int64_t to_row) {
  const TensorView& rows = request.expert_output;
  const std::int64_t hidden = hidden_of(rows);
  std::int64_t offset = from_row * rows.row_stride_bytes();
  if (rows.num_dims == 3) {
    const std::int64_t inner = rows.shape[1];
    offset = (from_row / inner * rows.strides[0] + from_row % inner * rows.strides[1]) * size_of(rows.dtype);
  }
  const std::byte* from = static_cast<const std::byte*>(rows.data) + offset;
  std::byte* to = own().combine_row(to_row);
  if (wire_dtype() == rows.dtype) {
    if (from != to) copy_row(to, from, hidden * size_of(rows.dtype), stream_);
  } else {
    cast_row(to, wire_dtype(), from, rows.dtype, hidden);
  }
  if (request.topk_weights.defined()) {
    const TensorView& weights = request.topk_weights;
    std::memcpy(own().weights_row(to_row),
                static_cast<const std::byte*>(weights.data) + from_row * weights.row_stride_bytes(),
                static_cast<std::size_t>(weights.row_bytes()));
  }
}

Status HostEngine::combine_receive(const CombineTarget& target, const Round& round) {
  begin(Phase::kCombine, round.combine_epoch);
  Status status;
  for (int i = 0; i < setup_.num_ranks && status.ok(); ++i) {
    const int owner = visited(i);
    const auto at = static_cast<std::size_t>(owner);
    row_limits_[at] = 0;
    if (round.rows_sent[at] == 0) continue;
    status = wait_header(kCombinePhase, owner, round.combine_epoch);
    const protocol::HeaderLine& header = own().header(kCombinePhase, round.combine_epoch, owner);
    row_limits_[at] = header.row_limit;
    if (status.ok() && header.agreed != hidden_of(target.output)) {
      release_owners(round, round.combine_epoch);
      throw Error(ErrorCode::kMismatch,
                  "rank " + std::to_string(owner) + " combines rows of " + std::to_string(header.agreed) +
                      " elements and rank " + std::to_string(setup_.rank) + " of " +
                      std::to_string(hidden_of(target.output)),
                  setup_.rank, owner);
    }
  }
  if (status.ok()) {
    std::ranges::fill(missing_rows_, 0);
    team_.run(round.num_tokens, [&](std::int64_t begin, std::int64_t end, int thread) {
      std::int64_t missing = 0;
      for (std::int64_t token = begin; token < end; ++token) {
        missing += sum_token(target, round, token, thread);
        if (target.topk_weights.defined()) gather_weights(target, round, token);
      }
      flush_streams();
      missing_rows_[static_cast<std::size_t>(thread)] = missing;
    });
    status.missing_rows = std::reduce(missing_rows_.begin(), missing_rows_.end());
  }
  release_owners(round, round.combine_epoch);
  return status;
}

// Tells the ranks that owe this rank rows in combine `epoch` that it needs them no more.
void HostEngine::release_owners(const Round& round, std::uint32_t epoch) {
  for (int owner = 0; owner < setup_.num_ranks; ++owner) {
    if (round.rows_sent[static_cast<std::size_t>(owner)] == 0) continue;
    store_release(window(owner).released(kCombinePhase, setup_.rank), protocol::encode_progress(epoch, epoch),
                  ReleaseSite::kCombineReleased);
  }
}

// Returns how many of the token's rows their receivers had dropped.
std::int64_t HostEngine::sum_token(const CombineTarget& target, const Round& round, std::int64_t token, int thread) {
  const auto at = static_cast<std::size_t>(token);
  const std::byte** rows = sum_rows_.data() + static_cast<std::size_t>(thread) * windows_.size();
  std::size_t count = 0;
  std::int64_t missing = 0;
  for (std::int32_t i = round.first_destination[at]; i < round.first_destination[at + 1]; ++i) {
    const Destination destination = round.destinations[static_cast<std::size_t>(i)];
    if (destination.row >= row_limits_[static_cast<std::size_t>(destination.rank)]) {
      ++missing;
      continue;
    }
    rows[count++] = window(destination.rank).combine_row(destination.row);
  }
  std::array<const std::byte*, 2> biases{};
  std::size_t num_biases = 0;
  for (const TensorView& bias : target.bias) {
    if (!bias.defined()) continue;
    biases[num_biases++] = static_cast<const std::byte*>(bias.data) + token * bias.row_stride_bytes();
  }
  sum_rows({.rows = {rows, count},
            .rows_dtype = wire_dtype(),
            .biases = {biases.data(), num_biases},
            .output = static_cast<std::byte*>(target.output.data) + token * target.output.row_stride_bytes(),
            .output_dtype = target.output.dtype,
            .n = target.output.shape[1],
            .stream = false});
  return missing;
}

// A weight comes back from the one rank that owns its expert.
void HostEngine::gather_weights(const CombineTarget& target, const Round& round, std::int64_t token) {
  const auto at = static_cast<std::size_t>(token);
  const auto top_k = static_cast<std::size_t>(setup_.params.top_k);
  auto* output = reinterpret_cast<float*>(static_cast<std::byte*>(target.topk_weights.data) +
                                          token * target.topk_weights.row_stride_bytes());
  std::fill_n(output, top_k, 0.0F);
  for (std::int32_t i = round.first_destination[at]; i < round.first_destination[at + 1]; ++i) {
    const Destination destination = round.destinations[static_cast<std::size_t>(i)];
    if (destination.row >= row_limits_[static_cast<std::size_t>(destination.rank)]) continue;
    const auto* row = reinterpret_cast<const float*>(window(destination.rank).weights_row(destination.row));
    for (std::size_t slot = 0; slot < top_k; ++slot) {
      const std::int32_t id = round.wire_ids[at * top_k + slot];
      if (id < 0) continue;
      if (protocol::owner_of(setup_.params.num_experts, setup_.num_ranks, id) == destination.rank) {
        output[slot] = row[slot];
      }
    }
  }
}

}  // namespace tokenyard::engine::host
