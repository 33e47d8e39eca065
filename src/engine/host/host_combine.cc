// SPDX-License-Identifier: Apache-2.0
// Combine: expert output waits in its owner's window, and the origin of each token pulls and sums its rows.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>

#include "engine/host/expert_output.h"
#include "engine/host/host_engine.h"
#include "engine/host/wire_rows.h"
#include "engine/host/word.h"
#include "protocol/owner.h"

namespace tokenyard::engine::host {

Dtype HostEngine::wire_dtype() const {
  return setup_.spec.combine_wire == protocol::CombineWire::kF8e4m3 ? Dtype::kF8e4m3 : setup_.params.dtype;
}

Status HostEngine::acquire_combine_section() {
  begin(Phase::kCombine, combine_epoch_ + 1);
  return wait_combine_section(combine_epoch_ + 1);
}

// With queues no rows lie here, only headers, whose slots are two: the combine before may be under way.
Status HostEngine::wait_combine_section(std::uint32_t epoch) {
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int peer = visited(i);
    std::uint32_t needed = per_slot(owed_epoch_, epoch, peer);
    if (queued_ && needed == epoch - 1) needed = epoch - protocol::kHeaderSlots;
    const Status status = wait_rows_released(kCombinePhase, peer, needed);
    if (!status.ok()) return status;
  }
  return {};
}

Status HostEngine::combine_send(const CombineRequest& request, Round& round) {
  const std::uint32_t epoch = ++combine_epoch_;
  ++num_combines_;
  round.combine_epoch = epoch;
  if (queued_) queued_->take_turn(kCombinePhase, epoch);
  open_combines_.push_back(epoch);
  begin(Phase::kCombine, epoch);
  if (request.ends_views) release(round);
  const Status status = wait_combine_section(epoch);
  if (!status.ok()) return status;
  if (queued_) return combine_through_queues(request, round);
  const bool weighs = protocol::by_expert(setup_.spec.placement);
  if (weighs) {
    if (const Status gave = give_weights(request, round); !gave.ok()) return gave;
  }
  choose_streams(round.num_rows * setup_.layout.combine_stride());
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int source = visited(i);
    if (round.rows_received[static_cast<std::size_t>(source)] == 0) continue;
    if (weighs) {
      const float* weights = nullptr;
      if (const Status took = take_weights(round, source, weights); !took.ok()) return took;
      if (weights != nullptr) reduce_rows(request, round, source, weights);
      if (!round.experts.has_weights) release_weights(source, epoch);
    } else {
      stage_rows(request, round, source);
    }
    write_combine_header(request, round, source);
  }
  return {};
}

void HostEngine::write_combine_header(const CombineRequest& request, const Round& round, int source) {
  protocol::HeaderLine& header = window(source).header(kCombinePhase, round.combine_epoch, setup_.rank);
  header.row_limit = round.row_limit;
  if (queued_) header.mask = queued_->turn(kCombinePhase);
  header.agreed = hidden_of(request.expert_output);
  header.status = protocol::HeaderStatus::kOk;
  const auto rows = static_cast<std::uint32_t>(round.rows_received[static_cast<std::size_t>(source)]);
  store_release(header.stamp, protocol::encode_stamp(round.combine_epoch, rows), ReleaseSite::kCombineHeader);
  per_slot(owed_epoch_, round.combine_epoch, source) = round.combine_epoch;
}

void HostEngine::stage_rows(const CombineRequest& request, const Round& round, int source) {
  const auto at = static_cast<std::size_t>(source);
  const std::int64_t base = round.row_base[at];
  const bool stream = streams_for(source);
  if (final_places()) {
    const std::int64_t rows = std::clamp<std::int64_t>(round.row_limit - base, 0, round.rows_received[at]);
    team_.run(rows, [&](std::int64_t begin, std::int64_t end, int /*thread*/) {
      for (std::int64_t row = begin; row < end; ++row)
        stage_row_at(request, {round.result_row[at] + row, base + row, stream});
      flush_streams();
    });
    return;
  }
  const ReceivedTokens tokens(round, setup_.layout, source);
  const std::int64_t first_row = source * round.tokens_per_rank;
  team_.run(tokens.num_chunks(), [&](std::int64_t begin, std::int64_t end, int /*thread*/) {
    tokens.visit(begin, end, [&](std::int64_t token) {
      stage_row_at(request, {first_row + token, base + token, stream});
    });
    flush_streams();
  });
}

void HostEngine::stage_row_at(const CombineRequest& request, const StagedRow& row) {
  stage_row(request.expert_output, row.from, wire_dtype(), own().combine_row(row.to, slot(combine_epoch_)), row.stream);
  if (request.topk_weights.defined()) {
    const TensorView& weights = request.topk_weights;
    std::memcpy(own().weights_row(row.to, slot(combine_epoch_)),
                static_cast<const std::byte*>(weights.data) + row.from * weights.row_stride_bytes(),
                static_cast<std::size_t>(weights.row_bytes()));
  }
}

Status HostEngine::await_owners(const CombineTarget& target, const Round& round) {
  if (queued_) return await_owners_through_queues(round);
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int owner = visited(i);
    const auto at = static_cast<std::size_t>(owner);
    row_limits_[at] = 0;
    if (round.rows_sent[at] == 0) continue;
    const Status status = wait_header(kCombinePhase, owner, round.combine_epoch);
    if (!status.ok()) return status;
    const protocol::HeaderLine& header = own().header(kCombinePhase, round.combine_epoch, owner);
    row_limits_[at] = header.row_limit;
    if (header.agreed == hidden_of(target.output)) continue;
    finish_combine(round.combine_epoch);
    throw Error(ErrorCode::kMismatch,
                "rank " + std::to_string(owner) + " combines rows of " + std::to_string(header.agreed) +
                    " elements and rank " + std::to_string(setup_.rank) + " of " +
                    std::to_string(hidden_of(target.output)),
                setup_.rank, owner);
  }
  return {};
}

Status HostEngine::combine_receive(const CombineTarget& target, const Round& round) {
  begin(Phase::kCombine, round.combine_epoch);
  Status status = await_owners(target, round);
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
  finish_combine(round.combine_epoch);
  return status;
}

// Leaves the places of the rows that came back in sum_rows_. Returns how many their receivers had dropped.
std::int64_t HostEngine::rows_of_token(const Round& round, std::int64_t token, int thread, std::size_t& count) {
  const auto at = static_cast<std::size_t>(token);
  const std::size_t first = static_cast<std::size_t>(thread) * windows_.size();
  const std::byte** rows = sum_rows_.data() + first;
  const bool logarithmic = setup_.spec.combine_wire == protocol::CombineWire::kLogarithmic;
  const auto hidden = static_cast<std::size_t>(setup_.params.hidden_size);
  std::int64_t missing = 0;
  count = 0;
  for (std::int32_t i = round.first_destination[at]; i < round.first_destination[at + 1]; ++i) {
    const Destination destination = round.destinations[static_cast<std::size_t>(i)];
    if (queued_) {
      rows[count++] = queued_->combined_row(i);
      continue;
    }
    if (destination.row >= row_limits_[static_cast<std::size_t>(destination.rank)]) {
      ++missing;
      continue;
    }
    rows[count] = window(destination.rank).combine_row(destination.row, slot(round.combine_epoch));
    if (logarithmic) {
      float* decoded = decoded_rows_.data() + (first + count) * hidden;
      decode_log_row(decoded, rows[count], setup_.params.hidden_size);
      rows[count] = reinterpret_cast<const std::byte*>(decoded);
    }
    ++count;
  }
  return missing;
}

// Returns how many of the token's rows their receivers had dropped.
std::int64_t HostEngine::sum_token(const CombineTarget& target, const Round& round, std::int64_t token, int thread) {
  std::size_t count = 0;
  const std::int64_t missing = rows_of_token(round, token, thread, count);
  const std::byte* const* rows = sum_rows_.data() + static_cast<std::size_t>(thread) * windows_.size();
  std::array<const std::byte*, 2> biases{};
  std::size_t num_biases = 0;
  for (const TensorView& bias : target.bias) {
    if (!bias.defined()) continue;
    biases[num_biases++] = static_cast<const std::byte*>(bias.data) + token * bias.row_stride_bytes();
  }
  sum_rows({.rows = {rows, count},
            .rows_dtype = setup_.spec.combine_wire == protocol::CombineWire::kLogarithmic ? Dtype::kF32 : wire_dtype(),
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
    const auto* row = reinterpret_cast<const float*>(
        window(destination.rank).weights_row(destination.row, slot(round.combine_epoch)));
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
