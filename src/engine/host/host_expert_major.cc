// SPDX-License-Identifier: Apache-2.0
// Expert major: each received row is copied to every expert it is for, and combine sends back one row per (token,
// rank), weighed and reduced here in the order of the token's picks.
#include <algorithm>
#include <array>
#include <cstring>

#include "engine/host/expert_output.h"
#include "engine/host/host_engine.h"
#include "engine/host/rows.h"
#include "engine/host/wire_rows.h"
#include "engine/host/word.h"

namespace tokenyard::engine::host {

void HostEngine::note_waits(Round& round, int sign) const {
  for (std::size_t peer = 0; peer < windows_.size(); ++peer) {
    const std::int64_t now = sign * watch_.waited()[peer].count();
    round.experts.waited[peer] = sign < 0 ? now : round.experts.waited[peer] + now;
  }
}

// Rows of an expert lie by source, then by token, which is the order of this walk.
void HostEngine::expand(const DispatchRequest& request, Round& round) {
  ExpertRows& experts = round.experts;
  std::ranges::fill(round.rows_per_expert, 0);
  std::ranges::fill(experts.routes_per_expert, 0);
  const std::size_t ranks = windows_.size();
  for (std::size_t source = 0; source < ranks; ++source) {
    const auto number = static_cast<std::int64_t>(source);
    const ReceivedTokens tokens(round, setup_.layout, number);
    for (std::size_t expert = 0; expert < round.rows_per_expert.size(); ++expert)
      experts.source_ranges[(expert * ranks + source) * 2] = static_cast<std::int32_t>(round.rows_per_expert[expert]);
    tokens.visit_all([&](std::int64_t token) { note_picks(number, token, round); });
    for (std::size_t expert = 0; expert < round.rows_per_expert.size(); ++expert) {
      std::int32_t* range = &experts.source_ranges[(expert * ranks + source) * 2];
      range[1] = static_cast<std::int32_t>(round.rows_per_expert[expert]) - range[0];
    }
    team_.run(tokens.num_chunks(), [&](std::int64_t begin, std::int64_t end, int /*thread*/) {
      tokens.visit(begin, end, [&](std::int64_t token) { copy_to_experts(request, round, number, token); });
    });
    if (experts.has_weights) keep_weights(request, round, number);
  }
}

void HostEngine::note_picks(std::int64_t source, std::int64_t token, Round& round) {
  ExpertRows& experts = round.experts;
  const int top_k = setup_.params.top_k;
  const std::int64_t rows_per_expert = setup_.layout.combine_rows();
  const auto* ids = reinterpret_cast<const std::int32_t*>(round.received_row(protocol::kIdsPlane, source, token));
  std::int32_t* picks = experts.picks.data() + (source * setup_.layout.shape().max_tokens + token) * top_k;
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int32_t expert = ids[slot] - first_expert_;
    picks[slot] = -1;
    if (ids[slot] < 0 || expert < 0 || expert >= num_experts_) continue;
    ++experts.routes_per_expert[static_cast<std::size_t>(expert)];
    const auto* const repeated = std::find(ids, ids + slot, ids[slot]);
    if (repeated != ids + slot) {
      picks[slot] = picks[repeated - ids];  // chosen twice: one row, which weighs twice
      continue;
    }
    const std::int64_t row = round.rows_per_expert[static_cast<std::size_t>(expert)]++;
    picks[slot] = static_cast<std::int32_t>(expert * rows_per_expert + row);
    experts.source_tokens[static_cast<std::size_t>(picks[slot])] = static_cast<std::int32_t>(token);
  }
}

void HostEngine::copy_to_experts(const DispatchRequest& request,
                                 const Round& round,
                                 std::int64_t source,
                                 std::int64_t token) const {
  const int top_k = setup_.params.top_k;
  const std::int64_t rows_per_expert = setup_.layout.combine_rows();
  const std::int32_t* picks = round.experts.picks.data() + (source * setup_.layout.shape().max_tokens + token) * top_k;
  for (const int index : {int{protocol::kHiddenPlane}, int{protocol::kScalePlane}}) {
    const OutputPlane to = request.outputs.planes[static_cast<std::size_t>(index)];
    if (to.data == nullptr) continue;
    const std::byte* from = round.received_row(index, source, token);
    for (int slot = 0; slot < top_k; ++slot) {
      if (picks[slot] < 0 || std::find(picks, picks + slot, picks[slot]) != picks + slot) continue;
      copy_lane_row(to.at(picks[slot] / rows_per_expert, picks[slot] % rows_per_expert), from, to.row_bytes, false);
    }
  }
}

// Weights that came with dispatch stay until combine; their rows in the window do not.
void HostEngine::keep_weights(const DispatchRequest& request, Round& round, std::int64_t source) const {
  const protocol::Plane& plane = round.planes.planes[protocol::kWeightsPlane];
  const std::byte* rows = round.rows + source * round.space_stride + plane.offset;
  const std::int64_t top_k = setup_.params.top_k;
  float* kept = round.experts.weights.data() + source * setup_.layout.shape().max_tokens * top_k;
  ReceivedTokens(round, setup_.layout, source).visit_all([&](std::int64_t token) {
    cast_row(reinterpret_cast<std::byte*>(kept + token * top_k), Dtype::kF32, rows + token * plane.stride,
             request.weights_dtype, top_k);
  });
}

// Weights that come with combine are pushed before it: every owner of a token needs them to reduce its rows.
Status HostEngine::give_weights(const CombineRequest& request, const Round& round) {
  if (round.experts.has_weights) return {};
  const std::uint32_t epoch = round.combine_epoch;
  const TensorView& weights = request.topk_weights;
  const std::int64_t top_k = setup_.params.top_k;
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int owner = visited(i);
    if (round.rows_sent[static_cast<std::size_t>(owner)] == 0) continue;
    const Status status = wait_rows_released(kWeightsPhase, owner, per_slot(given_epoch_, epoch, owner));
    if (!status.ok()) return status;
    float* to = window(owner).given_weights(setup_.rank, slot(epoch));
    for (std::int64_t token = 0; token < round.num_tokens; ++token) {
      const std::byte* from = static_cast<const std::byte*>(weights.data) + token * weights.row_stride_bytes();
      std::memcpy(to + token * top_k, from, static_cast<std::size_t>(top_k) * sizeof(float));
    }
    stamp_weights(owner, epoch, protocol::HeaderStatus::kOk);
  }
  return {};
}

void HostEngine::stamp_weights(int owner, std::uint32_t epoch, protocol::HeaderStatus status) {
  protocol::HeaderLine& header = window(owner).header(kWeightsPhase, epoch, setup_.rank);
  header.status = status;
  store_release(header.stamp, protocol::encode_stamp(epoch, 0), ReleaseSite::kGivenWeights);
  per_slot(given_epoch_, epoch, owner) = epoch;
}

void HostEngine::release_weights(int origin, std::uint32_t epoch) {
  store_release(window(origin).released(kWeightsPhase, setup_.rank), protocol::encode_progress(epoch, epoch),
                ReleaseSite::kWeightsReleased);
}

// Of the tokens of `source`, by token; null when it gave its combine up and needs no rows.
Status HostEngine::take_weights(const Round& round, int source, const float*& weights) {
  const std::int64_t first = source * setup_.layout.shape().max_tokens * setup_.params.top_k;
  weights = round.experts.weights.data() + first;
  if (round.experts.has_weights) return {};
  const Status status = wait_header(kWeightsPhase, source, round.combine_epoch);
  weights = status.ok() ? own().given_weights(source, slot(round.combine_epoch)) : nullptr;
  return status.code == StatusCode::kAborted ? Status{} : status;
}

void HostEngine::reduce_rows(const CombineRequest& request, const Round& round, int source, const float* weights) {
  const ReceivedTokens tokens(round, setup_.layout, source);
  const std::int64_t base = source * setup_.layout.shape().max_tokens;
  const bool stream = streams_for(source);
  team_.run(tokens.num_chunks(), [&](std::int64_t begin, std::int64_t end, int thread) {
    tokens.visit(begin, end, [&](std::int64_t token) {
      reduce_row(request, round, {base + token, thread, stream}, weights + token * setup_.params.top_k);
    });
    flush_streams();
  });
}

void HostEngine::reduce_row(const CombineRequest& request,
                            const Round& round,
                            RowOfThread at_work,
                            const float* weights) {
  const int top_k = setup_.params.top_k;
  const std::int32_t* picks = round.experts.picks.data() + at_work.row * top_k;
  std::array<const std::byte*, kMaxTopK> rows{};
  std::array<float, kMaxTopK> row_weights{};
  std::size_t count = 0;
  for (int slot = 0; slot < top_k; ++slot) {
    if (picks[slot] < 0) continue;
    rows[count] = expert_row(request.expert_output, picks[slot]);
    row_weights[count++] = weights[slot];
  }
  const bool logarithmic = setup_.spec.combine_wire == protocol::CombineWire::kLogarithmic;
  const std::int64_t hidden = setup_.params.hidden_size;
  float* sum = logarithmic ? decoded_rows_.data() + std::int64_t{at_work.thread} * setup_.num_ranks * hidden : nullptr;
  std::byte* to = own().combine_row(at_work.row, slot(round.combine_epoch));
  weighted_sum_rows({.rows = {rows.data(), count},
                     .rows_dtype = request.expert_output.dtype,
                     .weights = {row_weights.data(), count},
                     .output = logarithmic ? reinterpret_cast<std::byte*>(sum) : to,
                     .output_dtype = logarithmic ? Dtype::kF32 : setup_.params.dtype,
                     .n = hidden,
                     .stream = at_work.stream && !logarithmic});
  if (logarithmic) encode_log_row(to, sum, hidden);
}

}  // namespace tokenyard::engine::host
