// SPDX-License-Identifier: Apache-2.0
// Dispatch through bounded queues, in one launch: each block has a team that sends this rank's tokens, and one that
// takes the rows of others out of the queues. Rows land in the receiver's own memory, a space per source as in a window
// of such spaces; when a channel of a source is complete, its team writes what the result needs besides.
#include "engine/cuda/kernels.h"
#include "engine/cuda/queue_send.cuh"

namespace tokenyard::engine::cuda {
namespace {

// The pick as it travels: an expert's id, or -1.
__device__ std::int32_t wire_id(const Ids& ids, std::int64_t token, int slot, std::int64_t& given) {
  const std::byte* row = ids.from + token * ids.from_stride;
  given = ids.from_i64 ? reinterpret_cast<const std::int64_t*>(row)[slot]
                       : std::int64_t{reinterpret_cast<const std::int32_t*>(row)[slot]};
  const bool expert = given >= 0 && given < ids.num_experts && given != ids.invalid_id;
  return expert ? static_cast<std::int32_t>(given) : -1;
}

// For combine: the ranks of each token. By all threads of the rank, a token each.
__device__ void note_routes(const QueuedDispatchTask& task, std::int64_t tokens) {
  const Ids& ids = task.ids;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (std::int64_t token = first; token < tokens; token += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    for (int w = 0; w < task.route.words; ++w) {
      std::uint32_t word = 0;
      for (int slot = 0; slot < ids.top_k; ++slot) {
        std::int64_t given = 0;
        const std::int32_t id = wire_id(ids, token, slot, given);
        if (id < 0) {
          const bool wrong = given != -1 && given != ids.invalid_id;
          if (w == 0 && wrong) atomicAdd(reinterpret_cast<unsigned long long*>(&task.common.board->invalid_ids), 1ULL);
          continue;
        }
        const int owner = protocol::owner_of(ids.num_experts, task.common.num_ranks, id);
        if (owner / kWordBits == w) word |= 1U << (owner % kWordBits);
      }
      task.route.ranks_of_token[token * task.route.words + w] = word;
    }
  }
}

// Whether an expert of the rank is among the token's picks.
__device__ bool goes_to(const QueuedDispatchTask& task, int rank, std::int64_t token) {
  const int first = protocol::first_local_expert(task.ids.num_experts, task.common.num_ranks, rank);
  const int end = first + protocol::num_local_experts(task.ids.num_experts, task.common.num_ranks, rank);
  bool goes = false;
  for (int slot = 0; slot < task.ids.top_k; ++slot) {
    std::int64_t given = 0;
    const std::int32_t id = wire_id(task.ids, token, slot, given);
    goes = goes || (id >= first && id < end);
  }
  return goes;
}

// The rows of a token to where `place(lane)` says, its ids among them.
template <class Place>
__device__ void write_token(const QueuedDispatchTask& task, std::int64_t token, Crew crew, const Place& place) {
  for (int i = 0; i < task.num_lanes; ++i) {
    const QueuedLane& at = task.lanes[static_cast<unsigned>(i)];
    copy_row_at_once(place(at), at.lane.from + token * at.lane.from_stride, at.lane.row_bytes, at.lane.unit, crew);
  }
  auto* ids = reinterpret_cast<std::int32_t*>(place(task.lanes[static_cast<unsigned>(task.num_lanes)]));
  for (int slot = crew.index; slot < task.ids.top_k; slot += crew.count) {
    std::int64_t given = 0;
    ids[slot] = wire_id(task.ids, token, slot, given);
  }
}

__device__ std::byte* landed(const QueuedDispatchTask& task, const Lane& lane, int source, std::int64_t token) {
  return task.landing + source * task.space_stride + lane.offset + token * lane.stride;
}

struct DispatchJob {
  static constexpr int kPhase = protocol::kDispatchPhase;
  static constexpr Phase kWaitPhase = Phase::kDispatch;

  const QueuedDispatchTask& task;
  std::uint32_t now;
  std::int64_t tokens;

  __device__ const Common& common() const { return task.common; }

  __device__ const QueueTask& queue() const { return task.queue; }

  __device__ std::uint32_t epoch() const { return now; }

  __device__ int num_peers() const { return task.common.num_ranks - 1; }

  __device__ bool has_rows(int /*peer*/) const { return true; }

  __device__ bool given_up() const { return load_relaxed_device(task.route.state + kRouteAborted) != 0; }

  // Who released an operation has read its header too.
  __device__ bool may_open(int /*peer*/, std::uint64_t progress) const {
    return protocol::reached(protocol::rows_released(progress), now - 1);
  }

  __device__ std::int64_t num_tokens(int /*peer*/) const { return tokens; }

  __device__ bool goes(int peer, std::int64_t token) const { return goes_to(task, peer, token); }

  __device__ void add_to_header(int peer, const SendingTeam& team) const {
    auto* stats =
        reinterpret_cast<std::int32_t*>(window_of(task.common, peer) + task.common.layout.stats(task.common.rank));
    for (std::int64_t i = team.thread; i < task.num_stats; i += kTeamThreads)
      stats[i] = task.stats[i];
  }

  // Pairs with await_header.
  __device__ void write_header(int peer) const {
    protocol::HeaderLine* header = header_of(task.common, peer, kPhase, now, task.common.rank);
    header->digest = task.digest;
    header->agreed = task.agreed;
    header->num_tokens = static_cast<std::int32_t>(tokens);
    header->status = protocol::HeaderStatus::kOk;
    store_release_system(&header->stamp, protocol::encode_stamp(now, 0));
  }

  __device__ void write(int /*peer*/, std::int64_t token, std::byte* entry, Crew crew) const {
    if (crew.index == 0) *reinterpret_cast<std::int64_t*>(entry) = token;
    write_token(task, token, crew, [entry](const QueuedLane& at) { return entry + at.entry_offset; });
  }
};

struct Receiving {
  std::int64_t available;
  bool there;
  bool last;
};

// The receiving team of a block.
class Receiver {
 public:
  __device__ Receiver(const QueuedDispatchTask& task,
                      std::uint32_t epoch,
                      std::int64_t tokens,
                      const ReceivingTeam& team,
                      Receiving& shared)
      : task_(task),
        channels_(task.queue.channels),
        batch_(batch_of(channels_)),
        epoch_(epoch),
        tokens_(tokens),
        team_(team),
        shared_(shared) {}

  // Own rows last: the others' are on their way meanwhile. One item after the other: who sends to this rank fills
  // whichever has room.
  __device__ void run() {
    const int ranks = task_.common.num_ranks;
    for (int item = static_cast<int>(blockIdx.x); item < ranks * channels_.count; item += static_cast<int>(gridDim.x)) {
      const int source = (task_.common.rank + 1 + item / channels_.count) % ranks;
      const int channel = item % channels_.count;
      const bool own = source == task_.common.rank;
      if (own && task_.sends) land_own(channel);
      const bool complete = own || receive(source, channel, task_.queue.receiving[item]);
      team_.meet();
      if (complete && task_.receives) show(source, channel);
    }
  }

 private:
  // In a send half nobody waits longer than this rank's own rows need.
  __device__ bool ends() const { return !task_.receives && all_sent(task_.queue); }

  template <class Ready>
  __device__ bool await(int source, const Ready& ready) const {
    return wait_until(
        task_.common, {source, Phase::kDispatch, epoch_}, [&] { return ready() || ends(); },
        task_.route.state + kRouteAborted);
  }

  // By one thread: true when the source's header is here and agrees.
  __device__ bool await_header(int source) const {
    const protocol::HeaderLine* header =
        header_of(task_.common, task_.common.rank, protocol::kDispatchPhase, epoch_, source);
    const auto stamped = [&] { return protocol::stamp_is(load_acquire_system(&header->stamp), epoch_); };
    if (!await(source, stamped) || !stamped()) return false;
    const bool aborted = header->status == protocol::HeaderStatus::kAborted;
    if (!aborted && header->digest == task_.digest && header->agreed == task_.agreed) {
      task_.route.tokens_of[source] = header->num_tokens;  // the same from all channels
      return true;
    }
    // Each rank compares all others with itself, so when any two differ every rank ends this operation.
    give_up(task_.common, task_.route.state + kRouteAborted, aborted ? NoticeKind::kAborted : NoticeKind::kMismatch,
            {source, Phase::kDispatch, epoch_});
    return false;
  }

  // By one thread.
  __device__ void await_entries(int source, int channel, std::uint32_t done) const {
    const std::uint64_t* word = filled_of(task_.queue, protocol::kDispatchPhase, task_.common.rank, source, channel);
    shared_.available = done;
    shared_.last = false;
    const auto more = [&] {
      const std::uint64_t filled = load_acquire_system(word);
      if (!protocol::stamp_is(filled, epoch_)) return false;
      shared_.available = protocol::filled_entries(filled);
      shared_.last = protocol::filled_last(filled);
      return shared_.last || shared_.available > done;
    };
    shared_.there = await(source, more) && (shared_.last || shared_.available > done);
  }

  // True when all rows of the channel are here.
  __device__ bool receive(int source, int channel, ReceiveState& kept) {
    ReceiveState state = task_.sends ? ReceiveState{} : kept;
    team_.meet();  // all have read it
    if (state.stage == ItemStage::kNew) {
      if (team_.leads()) shared_.there = await_header(source);
      team_.meet();
      if (shared_.there) {
        state.stage = ItemStage::kOpen;
        if (channel == 0)
          land_stats(source, window_of(task_.common, task_.common.rank) + task_.common.layout.stats(source));
      }
      team_.meet();
    }
    while (state.stage == ItemStage::kOpen) {
      if (team_.leads()) await_entries(source, channel, state.done);
      team_.meet();
      const Receiving now = shared_;
      if (now.there) take(source, channel, now.available, state.done);
      team_.meet();
      if (!now.there) break;
      if (now.last) state.stage = ItemStage::kDone;
    }
    if (team_.leads()) {
      // Once, in the half that saw the end.
      if (state.stage == ItemStage::kDone && (task_.sends || kept.stage != ItemStage::kDone))
        atomicAdd(task_.route.rows_received + source, state.done);
      kept = state;
    }
    return state.stage == ItemStage::kDone;
  }

  // Entries up to `available` out of the queue.
  __device__ void take(int source, int channel, std::int64_t available, std::uint32_t& done) const {
    const std::byte* entries = queue_of(task_.queue, protocol::kDispatchPhase, task_.common.rank, source);
    while (done < available) {
      const auto count = static_cast<int>(min(std::int64_t{batch_}, available - done));
      const auto entry_at = [&](int index) { return entries + channels_.entry(channel, std::int64_t{done} + index); };
      move_entries(team_, count, channels_.entry_bytes,
                   [&](int index, Crew crew) { land(source, entry_at(index), crew); });
      if (team_.thread < count) note_row(source, *reinterpret_cast<const std::int64_t*>(entry_at(team_.thread)));
      team_.meet();
      done += static_cast<std::uint32_t>(count);
      // All have read the entries: pairs with Sender's look.
      if (team_.leads()) {
        store_release_system(drained_of(task_.queue, protocol::kDispatchPhase, task_.common.rank, source, channel),
                             protocol::encode_stamp(epoch_, done));
      }
    }
  }

  __device__ void land(int source, const std::byte* entry, Crew crew) const {
    const std::int64_t token = *reinterpret_cast<const std::int64_t*>(entry);
    for (int i = 0; i <= task_.num_lanes; ++i) {
      const QueuedLane& at = task_.lanes[static_cast<unsigned>(i)];
      copy_row_at_once(landed(task_, at.lane, source, token), entry + at.entry_offset, at.lane.row_bytes, at.lane.unit,
                       crew);
    }
  }

  __device__ std::uint64_t* mask_of(int source, std::int64_t token) const {
    const int size = task_.common.layout.shape().tokens_per_chunk;
    return task_.route.masks + source * task_.common.layout.max_chunks() + token / size;
  }

  __device__ int bit_of(std::int64_t token) const {
    return static_cast<int>(token % task_.common.layout.shape().tokens_per_chunk);
  }

  // Other channels have tokens in the same word.
  __device__ void note_row(int source, std::int64_t token) const {
    atomicOr(reinterpret_cast<unsigned long long*>(mask_of(source, token)), 1ULL << bit_of(token));
  }

  __device__ void land_stats(int source, const std::byte* from) const {
    for (std::int64_t i = team_.thread; i < task_.num_stats; i += kTeamThreads)
      task_.landed_stats[source * task_.num_stats + i] = reinterpret_cast<const std::int32_t*>(from)[i];
  }

  // Each warp a token.
  __device__ void land_own(int channel) const {
    const int own = task_.common.rank;
    if (channel == 0) land_stats(own, reinterpret_cast<const std::byte*>(task_.stats));
    if (channel == 0 && team_.leads()) task_.route.tokens_of[own] = static_cast<std::int32_t>(tokens_);
    std::uint32_t rows = 0;
    for (std::int64_t token = channel + team_.warp() * channels_.count; token < tokens_;
         token += std::int64_t{kTeamWarps} * channels_.count) {
      if (!goes_to(task_, own, token)) continue;
      write_token(task_, token, {lane_index(), kWarp},
                  [&](const QueuedLane& at) { return landed(task_, at.lane, own, token); });
      if (lane_index() == 0) note_row(own, token);
      ++rows;
    }
    if (lane_index() == 0 && rows > 0) atomicAdd(task_.route.rows_received + own, rows);
  }

  // What the result has of a channel besides views of where its rows landed.
  __device__ void show(int source, int channel) const {
    if (channel == 0) {
      for (std::int64_t i = team_.thread; i < task_.num_stats; i += kTeamThreads)
        task_.gathered_stats[source * task_.num_stats + i] = task_.landed_stats[source * task_.num_stats + i];
    }
    // Each thread a token with what is short, then each warp one with the rest.
    for_tokens(channel, team_.thread, kTeamThreads, [&](std::int64_t token) {
      const bool there = is_here(source, token);
      if (task_.ids.to != nullptr) show_ids(source, token, there);
      if (there) show_planes(source, token, true, {});
    });
    if (task_.num_copied == 0) return;
    for_tokens(channel, team_.warp(), kTeamWarps, [&](std::int64_t token) {
      if (is_here(source, token)) show_planes(source, token, false, {lane_index(), kWarp});
    });
  }

  template <class Show>
  __device__ void for_tokens(int channel, int index, int count, const Show& show) const {
    for (std::int64_t token = channel + index * channels_.count; token < task_.rows_per_block;
         token += std::int64_t{count} * channels_.count)
      show(token);
  }

  __device__ bool is_here(int source, std::int64_t token) const {
    return (__ldcg(mask_of(source, token)) >> bit_of(token) & 1U) != 0;
  }

  __device__ void show_ids(int source, std::int64_t token, bool there) const {
    const Ids& ids = task_.ids;
    const auto* wire = reinterpret_cast<const std::int32_t*>(task_.landing + source * task_.space_stride + ids.offset +
                                                             token * ids.stride);
    std::byte* row = ids.to + source * ids.to_block_stride + token * ids.to_row_stride;
    for (int slot = 0; slot < ids.top_k; ++slot) {
      const std::int32_t id = there ? wire[slot] : -1;
      store_id(row, slot, ids.to_i64, id >= 0 ? std::int64_t{id} : ids.invalid_id);
    }
  }

  __device__ void show_planes(int source, std::int64_t token, bool are_short, Crew crew) const {
    constexpr std::int64_t kShort = 128;  // bytes
    for (int i = 0; i < task_.num_copied; ++i) {
      const Copied& plane = task_.copied[static_cast<unsigned>(i)];
      if ((plane.row_bytes <= kShort) != are_short) continue;
      copy_row(plane.data + source * plane.block_stride + token * plane.row_stride,
               task_.landing + source * task_.space_stride + plane.offset + token * plane.stride, plane.row_bytes,
               plane.unit, crew);
    }
  }

  const QueuedDispatchTask& task_;
  const protocol::QueueChannels channels_;
  const int batch_;
  const std::uint32_t epoch_;
  const std::int64_t tokens_;
  const ReceivingTeam& team_;
  Receiving& shared_;
};

// By the last block of the operation, for the next one.
__device__ void finish(const QueuedDispatchTask& task, std::uint32_t epoch) {
  if (threadIdx.x != 0) return;
  Board& board = *task.common.board;
  board.blocks_done = 0;
  task.queue.board->blocks_sent = task.queue.board->blocks_received = 0;
  if (task.sends) board.epochs[protocol::kDispatchPhase] = epoch;
  if (task.sends) task.queue.board->epochs[protocol::kDispatchPhase] = epoch;
  if (task.receives) board.rows_released = board.epochs[protocol::kDispatchPhase];
  task.common.host->invalid_ids = board.invalid_ids;
}

__global__ void __launch_bounds__(kThreads) queued_dispatch(const __grid_constant__ QueuedDispatchTask task) {
  __shared__ Sending sending;
  __shared__ Receiving receiving;
  const Common& common = task.common;
  if (__syncthreads_or(static_cast<int>(load_relaxed_device(&common.board->failed))) != 0) return;
  const std::uint32_t epoch = task.sends ? common.board->epochs[protocol::kDispatchPhase] + 1
                                         : task.queue.board->epochs[protocol::kDispatchPhase];
  std::int64_t tokens = 0;
  if (task.sends) {
    tokens = tokens_of_call(task.num_tokens, task.num_tokens_on_device);
    if (blockIdx.x == 0 && threadIdx.x == 0) task.route.state[kRouteTokens] = static_cast<std::uint32_t>(tokens);
    note_routes(task, tokens);
  }
  if (ReceivingTeam::has_thread()) {
    const ReceivingTeam team;
    Receiver(task, epoch, tokens, team, receiving).run();
    // Operations that this rank gave up since it sent this one have no rows.
    const std::uint32_t released = task.sends ? epoch : common.board->epochs[protocol::kDispatchPhase];
    if (task.receives) release_queues(common, task.queue, team, protocol::kDispatchPhase, released);
  } else if (task.sends) {
    const SendingTeam team;
    const DispatchJob job{task, epoch, tokens};
    Sender(job, team, sending).run();
    count_sent(task.queue, team);
  }
  if (last_block(&common.board->blocks_done)) finish(task, epoch);
}

// Not for the peers' signs, as abort_dispatch waits: an older operation of this rank may be between its halves, and
// theirs come only after it. A header's slot is free when the peer has taken all rows of the operation before the last.
__global__ void __launch_bounds__(kThreads) queued_abort(const __grid_constant__ Common common) {
  if (__syncthreads_or(static_cast<int>(load_relaxed_device(&common.board->failed))) != 0) return;
  Board& board = *common.board;
  const std::uint32_t before = board.epochs[protocol::kDispatchPhase];
  const std::uint32_t epoch = before + 1;
  for (int peer = static_cast<int>(threadIdx.x); peer < common.num_ranks; peer += kThreads) {
    const std::uint64_t* word = progress_of(common, common.rank, protocol::kDispatchPhase, peer);
    const auto is_free = [&] {
      return protocol::reached(protocol::rows_released(load_acquire_system(word)), epoch - protocol::kHeaderSlots);
    };
    if (peer == common.rank || !wait_until(common, {peer, Phase::kDispatch, epoch}, is_free)) continue;
    protocol::HeaderLine* header = header_of(common, peer, protocol::kDispatchPhase, epoch, common.rank);
    header->status = protocol::HeaderStatus::kAborted;
    store_release_system(&header->stamp, protocol::encode_stamp(epoch, 0));  // pairs with await_header
  }
  const std::uint32_t released = board.rows_released == before ? epoch : board.rows_released;
  __syncthreads();
  if (threadIdx.x == 0) board.epochs[protocol::kDispatchPhase] = epoch;
  __syncthreads();
  release_views(common, released);
}

__global__ void __launch_bounds__(kThreads)
    queued_clear(const __grid_constant__ Common common, const __grid_constant__ RouteMemory route) {
  clear_queued_route(common, route);
}

}  // namespace

void load_queued_dispatch() {
  cudaFuncAttributes attributes{};
  for (const void* kernel :
       {reinterpret_cast<const void*>(queued_dispatch), reinterpret_cast<const void*>(queued_abort),
        reinterpret_cast<const void*>(queued_clear)}) {
    check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  }
}

void launch_queued_dispatch(const QueuedDispatchTask& task, int blocks, cudaStream_t stream) {
  queued_dispatch<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a dispatch");
}

void launch_queued_abort(const Common& common, cudaStream_t stream) {
  queued_abort<<<1, kThreads, 0, stream>>>(common);
  check(cudaGetLastError(), "launching the end of a dispatch");
}

void launch_queued_clear(const Common& common, const RouteMemory& route, cudaStream_t stream) {
  queued_clear<<<1, kThreads, 0, stream>>>(common, route);
  check(cudaGetLastError(), "launching the clearing of a route");
}

}  // namespace tokenyard::engine::cuda
