// SPDX-License-Identifier: Apache-2.0
// Dispatch: rows go straight to where the receiver wants them, and a stamp follows them.
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "engine/host/host_engine.h"
#include "engine/host/rows.h"
#include "engine/host/word.h"

namespace tokenyard::engine::host {
namespace {

// Below this a call of the vectorised copy costs more than it saves.
constexpr std::int64_t kSmallRow = 256;

void copy(std::byte* to, const std::byte* from, std::int64_t bytes, bool stream) {
  if (bytes < kSmallRow) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  } else {
    copy_row(to, from, bytes, stream);
  }
}

}  // namespace

Status HostEngine::dispatch_send(const DispatchRequest& request, Round& round) {
  const std::uint32_t epoch = ++dispatch_epoch_;
  ++num_dispatches_;
  round.epoch = epoch;
  if (request.replay == nullptr) round.route_epoch = epoch;
  begin(Phase::kDispatch, epoch);
  open_epochs_.push_back(epoch);
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int peer = visited(i);
    Status status = wait_headers_read(peer, epoch - protocol::kHeaderSlots);
    const bool stores = round.rows_sent[static_cast<std::size_t>(peer)] > 0 || !request.stats.empty();
    if (status.ok() && stores && !final_places()) status = wait_space(peer, epoch);
    if (!status.ok()) return give_up_dispatch(status);
  }
  send_stats(request);
  if (final_places()) {
    announce_counts(request, round);
    const Status status = receive_headers(request, round);
    if (!status.ok()) return status;
    place_rows(round);
    for (int i = 0; i < setup_.num_ranks; ++i) {
      const int peer = visited(i);
      if (round.rows_sent[static_cast<std::size_t>(peer)] == 0) continue;
      if (const Status full = wait_space(peer, epoch); !full.ok()) return full;
    }
    headers_read_ = epoch;  // and the counts, which place_rows was the last to read
  }
  send_rows(request, round);
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
                prefix + " passed payloads of different kinds, dtypes or widths, or replayed different handles",
                setup_.rank, source);
  }
}

Status HostEngine::receive_headers(const DispatchRequest& request, Round& round) {
  for (int i = 0; i < setup_.num_ranks; ++i) {
    const int source = visited(i);
    const auto at = static_cast<std::size_t>(source);
    const Status status = wait_header(kDispatchPhase, source, round.epoch);
    if (!status.ok()) return give_up_dispatch(status);
    const protocol::HeaderLine& header = own().header(kDispatchPhase, round.epoch, source);
    if (header.digest != request.digest || header.agreed != request.agreed) {
      try {
        check_agreement(request, header, source);
      } catch (const Error&) {
        (void)give_up_dispatch({});
        throw;
      }
    }
    round.tokens_of[at] = header.num_tokens;
    round.rows_received[at] = static_cast<std::int32_t>(protocol::stamp_rows(header.stamp));
    if (!final_places()) round.masks[at * static_cast<std::size_t>(setup_.layout.max_chunks())] = header.mask;
  }
  if (!final_places()) headers_read_ = round.epoch;
  return {};
}

// Turns the counts of all ranks into final places: at each receiver, rows lie by source rank, then by token.
void HostEngine::place_rows(Round& round) {
  const auto ranks = static_cast<std::size_t>(setup_.num_ranks);
  std::int32_t base = 0;
  for (std::size_t source = 0; source < ranks; ++source) {
    round.row_base[source] = base;
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

void HostEngine::send_rows(const DispatchRequest& request, const Round& round) {
  lanes_.clear();
  std::int64_t token_bytes = 0;
  for (std::size_t i = 0; i < request.payloads.size(); ++i) {
    const PayloadRows& payload = request.payloads[i];
    const protocol::Plane& plane = round.planes.planes[i];
    if (payload.row_bytes == 0) continue;
    lanes_.push_back({payload.data, payload.stride, plane.offset, plane.stride, plane.row_bytes});
    token_bytes += plane.row_bytes;
  }
  stream_ = token_bytes * round.first_destination[static_cast<std::size_t>(round.num_tokens)] >= kStreamVolume;
  const auto ranks = static_cast<std::size_t>(setup_.num_ranks);
  // Headers of a rank-major dispatch travel with chunk 0, so that one is sent also when there are no tokens.
  const std::int64_t least = final_places() ? 0 : 1;
  const std::int64_t chunks =
      std::max(protocol::num_chunks(round.num_tokens, setup_.layout.shape().tokens_per_chunk), least);
  team_.run(chunks, [&](std::int64_t begin, std::int64_t end, int thread) {
    std::uint64_t* masks = chunk_masks_.data() + static_cast<std::size_t>(thread) * ranks;
    for (std::int64_t chunk = begin; chunk < end; ++chunk)
      send_chunk(request, round, chunk, masks);
  });
}

void HostEngine::send_chunk(const DispatchRequest& request,
                            const Round& round,
                            std::int64_t chunk,
                            std::uint64_t* masks) {
  std::fill_n(masks, setup_.num_ranks, 0);
  const std::int64_t first = chunk * setup_.layout.shape().tokens_per_chunk;
  const std::int64_t last = std::min(first + setup_.layout.shape().tokens_per_chunk, round.num_tokens);
  for (std::int64_t token = first; token < last; ++token) {
    const auto at = static_cast<std::size_t>(token);
    for (std::int32_t i = round.first_destination[at]; i < round.first_destination[at + 1]; ++i) {
      masks[round.destinations[static_cast<std::size_t>(i)].rank] |= std::uint64_t{1} << (token - first);
    }
    send_token(round, token);
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
  protocol::ChunkLine& line = window(to).chunk(setup_.rank, chunk);
  line.mask = mask;
  const auto rows = static_cast<std::uint32_t>(std::popcount(mask));
  store_release(line.stamp, protocol::encode_stamp(round.epoch, rows), ReleaseSite::kChunk);
}

void HostEngine::send_token(const Round& round, std::int64_t token) {
  const auto at = static_cast<std::size_t>(token);
  for (std::int32_t i = round.first_destination[at]; i < round.first_destination[at + 1]; ++i) {
    const Destination destination = round.destinations[static_cast<std::size_t>(i)];
    std::byte* space = window(destination.rank).payload(setup_.rank);
    const std::int64_t row = final_places() ? destination.row : token;
    for (const Lane& lane : lanes_) {
      copy(space + lane.offset + row * lane.stride, lane.from + token * lane.from_stride, lane.row_bytes, stream_);
    }
  }
}

Status HostEngine::dispatch_receive(const DispatchRequest& request, Round& round) {
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
    protocol::ChunkLine& line = own().chunk(source, chunk);
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
