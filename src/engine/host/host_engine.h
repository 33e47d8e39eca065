// SPDX-License-Identifier: Apache-2.0
// The host engine: each rank's thread moves its own rows by loads, stores and SIMD, on threads or processes of one
// host. It is the default, and the oracle for other engines. The rules it follows are in docs/protocol.md.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/host/peer_watch.h"
#include "engine/host/thread_team.h"
#include "engine/host/window_view.h"

namespace tokenyard::engine::host {

class HostEngine final : public Engine {
 public:
  HostEngine(const Setup& setup, fabric::Window& window);

  void plan(const DispatchRequest& request, Round& round) override;
  Status dispatch_send(const DispatchRequest& request, Round& round) override;
  Status dispatch_receive(const DispatchRequest& request, Round& round) override;
  void release(const Round& round) override;
  Status combine_send(const CombineRequest& request, Round& round) override;
  Status combine_receive(const CombineTarget& target, const Round& round) override;
  void abort_dispatch() override;
  void abort_combine(const Round& round) override;
  Status acquire_combine_section() override;

  [[nodiscard]] Status fault() const override { return watch_.fault(); }

  void reset(std::uint32_t epoch) override;
  [[nodiscard]] std::uint32_t latest_epoch() const override;
  [[nodiscard]] PeerStatistics statistics() const override;

 private:
  // Rows bypass the cache when a half stores more than a core's share of it is worth: below, their reader on another
  // core finds them in the shared cache (measured: streaming 1 to 4 MiB costs up to 1.7 times as much).
  static constexpr std::int64_t kStreamVolume = 8 << 20;

  // One payload on its way: where token 0's row is, and where row 0 goes inside a payload space.
  struct Lane {
    const std::byte* from = nullptr;
    std::int64_t from_stride = 0;
    std::int64_t offset = 0;
    std::int64_t stride = 0;
    std::int64_t row_bytes = 0;
  };

  [[nodiscard]] bool final_places() const { return protocol::counts_first(setup_.spec.placement); }

  [[nodiscard]] const WindowView& own() const { return windows_[static_cast<std::size_t>(setup_.rank)]; }

  [[nodiscard]] const WindowView& window(int rank) const { return windows_[static_cast<std::size_t>(rank)]; }

  // Ranks in the order this rank visits them: the next one first, itself last, so that not all crowd one rank.
  [[nodiscard]] int visited(int index) const { return (setup_.rank + 1 + index) % setup_.num_ranks; }

  void begin(Phase phase, std::uint32_t epoch);

  // Waits, each with the acquire that its name says (word.h).
  Status wait_rows_released(int phase, int peer, std::uint32_t epoch);
  Status wait_headers_read(int peer, std::uint32_t epoch);
  Status wait_header(int phase, int source, std::uint32_t epoch);
  Status find_abort(std::uint32_t epoch) const;
  // Tells the sources which dispatches this rank needs no more; `done` is one of them.
  void publish_progress(std::uint32_t done);

  // Dispatch (host_dispatch.cc).
  void fill_header(const DispatchRequest& request, const Round& round, int to, std::uint64_t mask);
  void announce_counts(const DispatchRequest& request, const Round& round);
  Status receive_headers(const DispatchRequest& request, Round& round);
  void check_agreement(const DispatchRequest& request, const protocol::HeaderLine& header, int source) const;
  void place_rows(Round& round);
  Status wait_space(int peer, std::uint32_t epoch);
  void send_stats(const DispatchRequest& request);
  void send_rows(const DispatchRequest& request, const Round& round);
  void send_chunk(const DispatchRequest& request, const Round& round, std::int64_t chunk, std::uint64_t* masks);
  void stamp_chunk(const Round& round, int to, std::int64_t chunk, std::uint64_t mask);
  void send_token(const Round& round, std::int64_t token);
  Status receive_chunks(int source, std::int64_t first_chunk, Round& round);
  Status give_up_dispatch(const Status& status);

  // Combine (host_combine.cc).
  void stage_rows(const CombineRequest& request, const Round& round, int source);
  void stage_row(const CombineRequest& request, std::int64_t from_row, std::int64_t to_row);
  std::int64_t sum_token(const CombineTarget& target, const Round& round, std::int64_t token, int thread);
  void gather_weights(const CombineTarget& target, const Round& round, std::int64_t token);
  Status wait_combine_section();
  void release_owners(const Round& round, std::uint32_t epoch);
  [[nodiscard]] Dtype wire_dtype() const;

  Setup setup_;
  std::vector<WindowView> windows_;  // [num_ranks]
  PeerWatch watch_;
  ThreadTeam team_;
  std::uint32_t dispatch_epoch_;
  std::uint32_t combine_epoch_;
  std::int64_t num_dispatches_ = 0;
  std::int64_t num_combines_ = 0;
  std::uint32_t headers_read_;              // last dispatch of which this rank needs no header any more
  std::vector<std::uint32_t> open_epochs_;  // dispatches whose rows this rank may still read, oldest first
  std::vector<Lane> lanes_;                 // of the dispatch being sent
  bool stream_ = false;                     // of the half being sent: whether its rows bypass the cache
  // Combine epoch in which this rank last owed rows to each origin; that origin will release it.
  std::vector<std::uint32_t> owed_epoch_;
  std::vector<std::int64_t> row_limits_;    // [num_ranks]: rows that each rank kept, in the combine being received
  std::vector<std::uint64_t> chunk_masks_;  // [num_threads, num_ranks]
  std::vector<std::int64_t> missing_rows_;  // [num_threads]
  std::vector<const std::byte*> sum_rows_;  // [num_threads, num_ranks]: rows of the token being summed
};

std::unique_ptr<Engine> make_host_engine(const Setup& setup, fabric::Window& window);

inline constexpr EngineInfo kHostEngine{
    .name = "host",
    .description = "CPU threads with SIMD, on ranks that are threads or processes of one host",
    .kind = EngineKind::kHost,
    .make = make_host_engine,
};

}  // namespace tokenyard::engine::host
