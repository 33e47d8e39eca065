// SPDX-License-Identifier: Apache-2.0
// Dispatch: rows go straight to where the receiver wants them, and a stamp follows them.
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "engine/host/host_engine.h"
#include "engine/host/wire_rows.h"
#include "engine/host/word.h"
#include "protocol/block_cast.h"

namespace tokenyard::engine::host {

Status HostEngine::dispatch_send(const DispatchRequest& request, Round& round) {
  const std::uint32_t epoch = ++dispatch_epoch_;
  ++num_dispatches_;
  unread_epochs_.push_back(epoch);
  open_epochs_.push_back(epoch);
  round.epoch = epoch;
  if (queued_) queued_->take_turn(kDispatchPhase, epoch);
  if (request.replay == nullptr) round.route_epoch = epoch;
  begin(Phase::kDispatch, epoch);
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int peer = visited(i);
    Status status = wait_headers_read(peer, epoch - protocol::kHeaderSlots);
    const bool rows_need_space = !queued_ && !final_places() && round.rows_sent[static_cast<std::size_t>(peer)] > 0;
    if (status.ok() && (rows_need_space || !request.stats.empty())) status = wait_space(peer, epoch);
    if (!status.ok()) return give_up_dispatch(epoch, status);
  }
  send_stats(request);
  if (queued_) return send_through_queues(request, round);
  round.rows = own().payload(0, slot(epoch));
  round.space_stride = final_places() ? 0 : setup_.layout.payload_bytes();
  if (final_places()) {
    const Status status = send_to_final_places(request, round);
    if (!status.ok()) return status;
  }
  send_rows(request, round);
  return {};
}

// All that comes before the rows.
Status HostEngine::send_to_final_places(const DispatchRequest& request, Round& round) {
  announce_counts(request, round);
  const Status status = receive_headers(request, round);
  if (!status.ok()) return status;
  place_rows(round);
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int peer = visited(i);
    if (round.rows_sent[static_cast<std::size_t>(peer)] == 0) continue;
    if (const Status full = wait_space(peer, round.epoch); !full.ok()) return full;
  }
  std::erase(unread_epochs_, round.epoch);  // and the counts, which place_rows was the last to read
  return {};
}

// Rows of operation n may be stored where those of n - depth were.
Status HostEngine::wait_space(int peer, std::uint32_t epoch) {
  return wait_rows_released(kDispatchPhase, peer, epoch - static_cast<std::uint32_t>(setup_.spec.depth));
}

void HostEngine::send_stats(const DispatchRequest& request) {
  if (request.stats.empty()) return;
  for (const WindowView& peer : windows_) {
    std::memcpy(peer.stats(setup_.rank), request.stats.data(), request.stats.size_bytes());
  }
}

void HostEngine::fill_header(const DispatchRequest& request, const Round& round, int to, std::uint64_t mask) {
  protocol::HeaderLine& header = window(to).header(kDispatchPhase, round.epoch, setup_.rank);
  header.mask = mask;
  header.digest = request.digest;
  header.agreed = request.agreed;
  header.num_tokens = static_cast<std::int32_t>(request.num_tokens);
  header.status = protocol::HeaderStatus::kOk;
  const auto rows = static_cast<std::uint32_t>(round.rows_sent[static_cast<std::size_t>(to)]);
  const bool whole = request.call_rows.empty();
  header.call_tokens = static_cast<std::int32_t>(whole ? request.num_tokens : request.call_tokens);
  header.call_rows = whole ? static_cast<std::int32_t>(rows) : request.call_rows[static_cast<std::size_t>(to)];
  store_release(header.stamp, protocol::encode_stamp(round.epoch, rows), ReleaseSite::kHeader);
}

void HostEngine::announce_counts(const DispatchRequest& request, const Round& round) {
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int peer = visited(i);
    std::memcpy(window(peer).counts(round.epoch, setup_.rank), round.rows_sent.data(),
                round.rows_sent.size() * sizeof(std::int32_t));
    fill_header(request, round, peer, 0);
  }
}

void HostEngine::check_agreement(const DispatchRequest& request, const protocol::HeaderLine& header, int source) const {
  const std::string prefix = "rank " + std::to_string(source) + " and rank " + std::to_string(setup_.rank);
  if (header.agreed != request.agreed && header.agreed != kNotGiven && request.agreed != kNotGiven) {
    throw Error(ErrorCode::kMismatch,
                prefix + " passed different " + request.agreed_name + ": " + std::to_string(header.agreed) + " and " +
                    std::to_string(request.agreed),
                setup_.rank, source);
  }
  if (header.digest != request.digest) {
    throw Error(ErrorCode::kMismatch,
                prefix +
                    " passed payloads of different kinds, dtypes or widths, or replayed different handles (digests " +
                    std::to_string(header.digest) + " and " + std::to_string(request.digest) + ")",
                setup_.rank, source);
  }
}

Status HostEngine::receive_headers(const DispatchRequest& request, Round& round) {
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int source = visited(i);
    const auto at = static_cast<std::size_t>(source);
    const Status status = wait_header(kDispatchPhase, source, round.epoch);
    if (!status.ok()) return give_up_dispatch(round.epoch, status);
    const protocol::HeaderLine& header = own().header(kDispatchPhase, round.epoch, source);
    if (header.digest != request.digest || header.agreed != request.agreed) {
      try {
        check_agreement(request, header, source);
      } catch (const Error&) {
        (void)give_up_dispatch(round.epoch, {});
        throw;
      }
    }
    round.tokens_of[at] = header.num_tokens;
    round.call_tokens_of[at] = header.call_tokens;
    round.call_rows_from[at] = header.call_rows;
    round.rows_received[at] = static_cast<std::int32_t>(protocol::stamp_rows(header.stamp));
    if (!final_places()) round.masks[at * static_cast<std::size_t>(setup_.layout.max_chunks())] = header.mask;
  }
  if (!final_places()) std::erase(unread_epochs_, round.epoch);
  return {};
}

// Turns the counts of all ranks into final places: at each receiver, rows lie by source rank, then by token.
void HostEngine::place_rows(Round& round) {
  const auto ranks = static_cast<std::size_t>(setup_.num_ranks);
  std::int32_t base = 0;
  for (std::size_t source = 0; source < ranks; ++source) {
    round.row_base[source] = round.result_row[source] = base;
    base += round.rows_received[source];
  }
  round.num_rows = base;
  // Next free row of this rank's block at each receiver; row_limits_ is free to use between combines.
  std::vector<std::int64_t>& next = row_limits_;
  std::ranges::fill(next, 0);
  for (int source = 0; source < setup_.rank; ++source) {
    const std::int32_t* counts = own().counts(round.epoch, source);
    for (std::size_t to = 0; to < ranks; ++to)
      next[to] += counts[to];
  }
  const auto copies = static_cast<std::size_t>(round.first_destination[static_cast<std::size_t>(round.num_tokens)]);
  for (std::size_t i = 0; i < copies; ++i) {
    Destination& destination = round.destinations[i];
    destination.row = static_cast<std::int32_t>(next[static_cast<std::size_t>(destination.rank)]++);
  }
}

void HostEngine::plan_lanes(const DispatchRequest& request, const Round& round) {
  lanes_.clear();
  for (std::size_t i = 0; i < request.payloads.size(); ++i) {
    const PayloadRows& payload = request.payloads[i];
    const protocol::Plane& plane = round.planes.planes[i];
    if (payload.row_bytes == 0) continue;
    Lane lane{payload.data, payload.stride, plane.offset, plane.stride, plane.row_bytes};
    if (request.cast != DispatchCast::kNone && (i == protocol::kHiddenPlane || i == protocol::kScalePlane)) {
      const std::int64_t values = i == protocol::kHiddenPlane ? 0 : request.payloads[protocol::kHiddenPlane].row_bytes;
      lane.from = cast_rows_.data() + protocol::align_up(values, protocol::kRowAlignment);
      lane.from_stride = 0;
      lane.thread_stride = cast_stride_;
    }
    lanes_.push_back(lane);
  }
}

void HostEngine::send_rows(const DispatchRequest& request, const Round& round) {
  plan_lanes(request, round);
  std::int64_t token_bytes = 0;
  for (const Lane& lane : lanes_)
    token_bytes += lane.row_bytes;
  choose_streams(token_bytes * round.first_destination[static_cast<std::size_t>(round.num_tokens)]);
  const auto ranks = static_cast<std::size_t>(setup_.num_ranks);
  // Headers of a dispatch into spaces travel with chunk 0, so that one is sent also when there are no tokens.
  const std::int64_t least = final_places() ? 0 : 1;
  const std::int64_t chunks =
      std::max(protocol::num_chunks(round.num_tokens, setup_.layout.shape().tokens_per_chunk), least);
  team_.run(chunks, [&](std::int64_t begin, std::int64_t end, int thread) {
    std::uint64_t* masks = chunk_masks_.data() + static_cast<std::size_t>(thread) * ranks;
    for (std::int64_t chunk = begin; chunk < end; ++chunk)
      send_chunk(request, round, {chunk, thread}, masks);
  });
}

void HostEngine::send_chunk(const DispatchRequest& request,
                            const Round& round,
                            ChunkOfThread at_work,
                            std::uint64_t* masks) {
  const auto [chunk, thread] = at_work;
  std::fill_n(masks, setup_.num_ranks, 0);
  const std::int64_t first = chunk * setup_.layout.shape().tokens_per_chunk;
  const std::int64_t last = std::min(first + setup_.layout.shape().tokens_per_chunk, round.num_tokens);
  for (std::int64_t token = first; token < last; ++token) {
    const auto at = static_cast<std::size_t>(token);
    for (std::int32_t i = round.first_destination[at]; i < round.first_destination[at + 1]; ++i) {
      masks[round.destinations[static_cast<std::size_t>(i)].rank] |= std::uint64_t{1} << (token - first);
    }
    if (request.cast != DispatchCast::kNone) cast_token(request, token, thread);
    send_token(round, token, thread);
  }
  flush_streams();
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int to = visited(i);
    if (chunk == 0 && !final_places()) {
      fill_header(request, round, to, masks[to]);
    } else if (round.rows_sent[static_cast<std::size_t>(to)] > 0) {
      stamp_chunk(round, to, chunk, masks[to]);
    }
  }
}

void HostEngine::stamp_chunk(const Round& round, int to, std::int64_t chunk, std::uint64_t mask) {
  protocol::ChunkLine& line = window(to).chunk(setup_.rank, chunk, slot(round.epoch));
  line.mask = mask;
  const auto rows = static_cast<std::uint32_t>(std::popcount(mask));
  store_release(line.stamp, protocol::encode_stamp(round.epoch, rows), ReleaseSite::kChunk);
}

// Once for all ranks that the token goes to.
void HostEngine::cast_token(const DispatchRequest& request, std::int64_t token, int thread) {
  const PayloadRows& rows = request.payloads[protocol::kHiddenPlane];
  std::byte* values = cast_rows_.data() + thread * cast_stride_;
  std::byte* scales = values + protocol::align_up(rows.row_bytes, protocol::kRowAlignment);
  const std::int64_t written = protocol::cast_row_bytes(request.cast, rows.row_bytes).scales;
  const std::int64_t crossing = request.payloads[protocol::kScalePlane].row_bytes;
  std::memset(scales + written, 0, static_cast<std::size_t>(crossing - written));
  cast_row_to_fp8_blocks({.values = values,
                          .scales = scales,
                          .from = rows.data + token * rows.stride,
                          .from_dtype = setup_.params.dtype,
                          .n = rows.row_bytes,
                          .cast = request.cast});
}

void HostEngine::send_token(const Round& round, std::int64_t token, int thread) {
  const auto at = static_cast<std::size_t>(token);
  for (std::int32_t i = round.first_destination[at]; i < round.first_destination[at + 1]; ++i) {
    const Destination destination = round.destinations[static_cast<std::size_t>(i)];
    std::byte* space = window(destination.rank).payload(setup_.rank, slot(round.epoch));
    const std::int64_t row = final_places() ? destination.row : token;
    const bool stream = streams_for(destination.rank);
    for (const Lane& lane : lanes_) {
      const std::byte* from = lane.from + token * lane.from_stride + thread * lane.thread_stride;
      copy_lane_row(space + lane.offset + row * lane.stride, from, lane.row_bytes, stream);
    }
  }
}

Status HostEngine::dispatch_receive(const DispatchRequest& request, Round& round) {
  const bool expands = protocol::by_expert(setup_.spec.placement);
  if (expands) note_waits(round, -1);
  const Status status = queued_ ? receive_through_queues(request, round) : receive_rows(request, round);
  if (!status.ok()) return status;
  if (expands) note_waits(round, 1);
  fill(request, round);
  return {};
}

void HostEngine::fill(const DispatchRequest& request, Round& round) {
  if (protocol::by_expert(setup_.spec.placement)) {
    expand(request, round);
  } else {
    outputs_.fill(request.outputs, round);
  }
}

Status HostEngine::receive_rows(const DispatchRequest& request, Round& round) {
  if (!final_places()) {
    begin(Phase::kDispatch, round.epoch);
    const Status status = receive_headers(request, round);
    if (!status.ok()) return status;
    round.num_rows = 0;
    for (std::size_t source = 0; source < round.rows_received.size(); ++source) {
      round.row_base[source] =
          static_cast<std::int32_t>(static_cast<std::int64_t>(source) * setup_.layout.shape().max_tokens);
      round.num_rows += round.rows_received[source];
    }
  }
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int source = visited(i);
    if (round.rows_received[static_cast<std::size_t>(source)] == 0) continue;
    const Status status = receive_chunks(source, final_places() ? 0 : 1, round);
    if (!status.ok()) return status;
  }
  return {};
}

Status HostEngine::receive_chunks(int source, std::int64_t first_chunk, Round& round) {
  const auto at = static_cast<std::size_t>(source);
  const std::int64_t chunks = protocol::num_chunks(round.tokens_of[at], setup_.layout.shape().tokens_per_chunk);
  for (std::int64_t chunk = first_chunk; chunk < chunks; ++chunk) {
    protocol::ChunkLine& line = own().chunk(source, chunk, slot(round.epoch));
    const Status status = watch_.wait(
        source, [&] { return protocol::stamp_is(load_acquire(line.stamp), round.epoch); }, [] { return Status{}; });
    if (!status.ok()) return status;
    if (!final_places()) {
      round.masks[at * static_cast<std::size_t>(setup_.layout.max_chunks()) + static_cast<std::size_t>(chunk)] =
          line.mask;
    }
  }
  return {};
}

}  // namespace tokenyard::engine::host
