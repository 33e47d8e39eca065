// SPDX-License-Identifier: Apache-2.0
// The host engine: each rank's thread moves its own rows by loads, stores and SIMD, on threads or processes of one
// host. It is the default, and the oracle for other engines. The rules it follows are in docs/protocol.md.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/engine.h"
#include "engine/host/host_outputs.h"
#include "engine/host/lane.h"
#include "engine/host/peer_watch.h"
#include "engine/host/queued_rows.h"
#include "engine/host/thread_team.h"
#include "engine/host/window_view.h"

namespace tokenyard::engine::host {

class HostEngine final : public Engine {
 public:
  HostEngine(const Setup& setup, fabric::Window& window);

  void reserve(Round& round) override;
  [[nodiscard]] Memory allocate(std::int64_t bytes) override;
  void reshape(const MoeParams& params, const protocol::WindowLayout& layout) override;
  void check_dispatch() const override;
  void check_combine() const override;
  void plan(const DispatchRequest& request, Round& round) override;
  Status dispatch_send(const DispatchRequest& request, Round& round) override;
  Status dispatch_receive(const DispatchRequest& request, Round& round) override;
  void fill(const DispatchRequest& request, Round& round) override;
  void release(const Round& round) override;
  void release_combine(const Round& round) override;
  Status combine_send(const CombineRequest& request, Round& round) override;
  Status combine_receive(const CombineTarget& target, const Round& round) override;
  void abort_dispatch() override;
  void abort_combine(const Round& round) override;
  Status acquire_combine_section() override;

  [[nodiscard]] Status fault() const override;

  [[nodiscard]] Status poll() override { return fault(); }

  void drain() override {}

  void reset(std::uint32_t epoch) override;
  [[nodiscard]] std::uint32_t latest_epoch() const override;
  [[nodiscard]] PeerStatistics statistics() const override;

 private:
  // Rows bypass the cache when a half moves at least this much: rows that another rank reads, and rows that this rank
  // reads itself. Plain stores to lines that another core has read cost two trips between the cores. Where these take
  // 60 ns a line, streaming is level (0.8 to 1.1 of the time); where they take 260 ns, it halves a half
  // (docs/performance.md). This rank's own rows stay in its cache as long as they fit.
  static constexpr std::int64_t kStreamVolume = 64 << 10;
  static constexpr std::int64_t kOwnStreamVolume = 8 << 20;

  // Called once for each half, with the bytes that it moves.
  void choose_streams(std::int64_t bytes) {
    stream_ = bytes >= kStreamVolume;
    stream_own_ = bytes >= kOwnStreamVolume;
  }

  [[nodiscard]] bool streams_for(int reader) const { return reader == setup_.rank ? stream_own_ : stream_; }

  [[nodiscard]] bool final_places() const { return protocol::counts_first(setup_.spec.placement); }

  [[nodiscard]] const WindowView& own() const { return windows_[static_cast<std::size_t>(setup_.rank)]; }

  [[nodiscard]] const WindowView& window(int rank) const { return windows_[static_cast<std::size_t>(rank)]; }

  // Ranks in the order this rank visits them: the next one first, itself last, so that not all crowd one rank.
  [[nodiscard]] int visited(int index) const { return (setup_.rank + 1 + index) % setup_.num_ranks; }

  void begin(Phase phase, std::uint32_t epoch);
  // Sets this communication's own words and notes to the state before epoch + 1.
  void set_back(std::uint32_t epoch);

  // Waits, each with the acquire that its name says (word.h).
  Status wait_rows_released(int phase, int peer, std::uint32_t epoch);
  Status wait_headers_read(int peer, std::uint32_t epoch);
  Status wait_header(int phase, int source, std::uint32_t epoch);
  Status find_abort(std::uint32_t epoch) const;
  // Tells the sources which dispatches this rank needs no more.
  void publish_progress();
  void finish_combine(std::uint32_t epoch);

  [[nodiscard]] int slot(std::uint32_t epoch) const { return protocol::slot_of(epoch, setup_.spec.depth); }

  // What this rank notes about a peer for the operations that use one slot.
  [[nodiscard]] std::uint32_t& per_slot(std::vector<std::uint32_t>& notes, std::uint32_t epoch, int peer) const {
    return notes[static_cast<std::size_t>(slot(epoch)) * windows_.size() + static_cast<std::size_t>(peer)];
  }

  // Dispatch (host_dispatch.cc).
  void fill_header(const DispatchRequest& request, const Round& round, int to, std::uint64_t mask);
  void announce_counts(const DispatchRequest& request, const Round& round);
  Status send_to_final_places(const DispatchRequest& request, Round& round);
  Status receive_rows(const DispatchRequest& request, Round& round);
  Status receive_headers(const DispatchRequest& request, Round& round);
  void plan_lanes(const DispatchRequest& request, const Round& round);
  void check_agreement(const DispatchRequest& request, const protocol::HeaderLine& header, int source) const;
  void place_rows(Round& round);
  Status wait_space(int peer, std::uint32_t epoch);
  void send_stats(const DispatchRequest& request);
  void send_rows(const DispatchRequest& request, const Round& round);

  struct ChunkOfThread {
    std::int64_t chunk = 0;
    int thread = 0;
  };

  void send_chunk(const DispatchRequest& request, const Round& round, ChunkOfThread at_work, std::uint64_t* masks);
  void stamp_chunk(const Round& round, int to, std::int64_t chunk, std::uint64_t mask);
  void cast_token(const DispatchRequest& request, std::int64_t token, int thread);
  void send_token(const Round& round, std::int64_t token, int thread);
  Status receive_chunks(int source, std::int64_t first_chunk, Round& round);
  Status give_up_dispatch(std::uint32_t epoch, const Status& status);

  // Combine (host_combine.cc).
  void write_combine_header(const CombineRequest& request, const Round& round, int source);
  void stage_rows(const CombineRequest& request, const Round& round, int source);

  struct StagedRow {
    std::int64_t from = 0;  // among the rows that the caller sees
    std::int64_t to = 0;    // among those of the combine section
    bool stream = false;
  };

  void stage_row_at(const CombineRequest& request, const StagedRow& row);
  Status await_owners(const CombineTarget& target, const Round& round);
  std::int64_t sum_token(const CombineTarget& target, const Round& round, std::int64_t token, int thread);
  std::int64_t rows_of_token(const Round& round, std::int64_t token, int thread, std::size_t& count);
  void gather_weights(const CombineTarget& target, const Round& round, std::int64_t token);
  Status wait_combine_section(std::uint32_t epoch);

  // Rounds through queues (host_queues.cc).
  Status send_through_queues(const DispatchRequest& request, Round& round);
  Status receive_through_queues(const DispatchRequest& request, Round& round);
  template <class Open>
  Status drive_dispatch(const DispatchRequest& request, Round& round, Open&& open);
  Status combine_through_queues(const CombineRequest& request, const Round& round);
  template <class Open>
  Status drive_combine(std::uint32_t epoch, Open&& open);
  Status await_owners_through_queues(const Round& round);
  [[noreturn]] void end_out_of_turn(int phase);

  // Expert major (host_expert_major.cc).
  // Called before the waits with -1 and after them with 1, leaves the time between in the round.
  void note_waits(Round& round, int sign) const;
  void expand(const DispatchRequest& request, Round& round);
  void note_picks(std::int64_t source, std::int64_t token, Round& round);
  void copy_to_experts(const DispatchRequest& request,
                       const Round& round,
                       std::int64_t source,
                       std::int64_t token) const;
  void keep_weights(const DispatchRequest& request, Round& round, std::int64_t source) const;
  Status give_weights(const CombineRequest& request, const Round& round);
  void stamp_weights(int owner, std::uint32_t epoch, protocol::HeaderStatus status);
  void abort_weights(const Round& round, std::uint32_t epoch);
  void release_weights(int origin, std::uint32_t epoch);
  Status take_weights(const Round& round, int source, const float*& weights);
  void reduce_rows(const CombineRequest& request, const Round& round, int source, const float* weights);

  struct RowOfThread {
    std::int64_t row = 0;
    int thread = 0;
    bool stream = false;
  };

  void reduce_row(const CombineRequest& request, const Round& round, RowOfThread at_work, const float* weights);
  [[nodiscard]] Dtype wire_dtype() const;

  Setup setup_;
  int first_expert_;  // of this rank
  int num_experts_;
  std::vector<WindowView> windows_;  // [num_ranks]
  PeerWatch watch_;
  ThreadTeam team_;
  HostOutputs outputs_;
  std::uint32_t dispatch_epoch_;
  std::uint32_t combine_epoch_;
  std::int64_t num_dispatches_ = 0;
  std::int64_t num_combines_ = 0;
  // Oldest first: dispatches whose headers, and whose rows, this rank may still read; and combines of which it may
  // still read anything.
  std::vector<std::uint32_t> unread_epochs_;
  std::vector<std::uint32_t> open_epochs_;
  std::vector<std::uint32_t> open_combines_;
  std::vector<Lane> lanes_;  // of the dispatch being sent
  bool stream_ = false;      // of the half being sent: whether rows that other ranks read bypass the cache
  bool stream_own_ = false;  // the same for rows that this rank reads
  // [depth, num_ranks]: combine in which this rank last owed rows to each origin; that origin will release it.
  std::vector<std::uint32_t> owed_epoch_;
  std::vector<std::uint32_t> given_epoch_;  // the same for weights that this rank gave to each owner
  std::vector<std::int64_t> row_limits_;    // [num_ranks]: rows that each rank kept, in the combine being received
  std::vector<std::uint64_t> chunk_masks_;  // [num_threads, num_ranks]
  std::vector<std::int64_t> missing_rows_;  // [num_threads]
  std::vector<const std::byte*> sum_rows_;  // [num_threads, num_ranks]: rows of the token being summed
  std::vector<float> decoded_rows_;         // [num_threads, num_ranks, hidden]: the same, from a logarithmic wire
  std::vector<std::byte> cast_rows_;        // [num_threads, cast_stride_]: the row that is on its way
  std::int64_t cast_stride_ = 0;
  std::optional<QueuedRows> queued_;  // Transport::kQueue
  std::uint64_t seen_faults_ = 0;     // of the queues, those that this communication has forgotten
};

std::unique_ptr<Engine> make_host_engine(const Setup& setup, fabric::Window& window);

inline constexpr EngineInfo kHostEngine{
    .name = "host",
    .description = "CPU threads with SIMD, on ranks that are threads or processes of one host",
    .kind = EngineKind::kHost,
    .memory = DeviceKind::kCpu,
    .extra_window_bytes = [](const MoeParams&, const protocol::WindowLayout&) { return std::int64_t{0}; },
    .make = make_host_engine,
};

}  // namespace tokenyard::engine::host
