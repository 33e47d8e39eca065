// SPDX-License-Identifier: Apache-2.0
// Blocks of rounds through queues: one half of a block's threads sends, the other receives, so that whoever waits for
// room never stops taking rows. The sending team of a block has its share of all (peer, channel) pairs, its items, and
// fills whichever has room; so an item that nobody drains yet holds up no other. Teams meet at barriers of their own,
// and no block waits for another of its rank.
#pragma once

#include <cstdint>

#include "engine/cuda/copies.cuh"
#include "engine/cuda/queued_tasks.h"
#include "engine/cuda/routes.cuh"
#include "engine/cuda/routing.cuh"
#include "engine/cuda/verbs.cuh"
#include "engine/cuda/waits.cuh"
#include "engine/cuda/windows.cuh"
#include "protocol/queue_entry.h"

namespace tokenyard::engine::cuda {

inline constexpr int kTeamThreads = kThreads / 2;
inline constexpr int kTeamWarps = kTeamThreads / kWarp;
inline constexpr int kMaxBatch = 8;  // entries that are told of at once
// Up to here a warp moves an entry by itself, and the others further ones.
inline constexpr std::int64_t kWarpEntryBytes = 2048;

// The threads of a block from kFirst on. That barriers are known to the compiler also lets racecheck follow them.
template <int kBarrier, int kFirst>
struct Team {
  int thread = static_cast<int>(threadIdx.x) - kFirst;

  __device__ static bool has_thread() {
    return static_cast<int>(threadIdx.x) >= kFirst && static_cast<int>(threadIdx.x) < kFirst + kTeamThreads;
  }

  __device__ int warp() const { return thread / kWarp; }

  __device__ bool leads() const { return thread == 0; }

  // Of another warp, which releases what was done while the leader looks for what comes next.
  __device__ bool tells() const { return thread == kTeamThreads - kWarp; }

  // Of all its threads: what they did before is seen by all after.
  __device__ void meet() const { wait_at(kBarrier, kTeamThreads); }
};

using SendingTeam = Team<1, 0>;
using ReceivingTeam = Team<2, kTeamThreads>;

// As copy_row. A row is a few accesses for each thread of a team: all of them load before the first stores.
__device__ inline void copy_row_at_once(std::byte* to, const std::byte* from, std::int64_t bytes, int unit, Crew crew) {
  if (unit != sizeof(uint4)) return copy_row(to, from, bytes, unit, crew);
  constexpr int kAtOnce = 4;
  const auto n = static_cast<int>(bytes / static_cast<std::int64_t>(sizeof(uint4)));
  for (int first = crew.index; first < n; first += kAtOnce * crew.count) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * crew.count < n) values[k] = reinterpret_cast<const uint4*>(from)[first + k * crew.count];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * crew.count < n) reinterpret_cast<uint4*>(to)[first + k * crew.count] = values[k];
    }
  }
}

// Calls move(index, crew) for entries [0, count).
template <class Team, class Move>
__device__ void move_entries(const Team& team, int count, std::int64_t entry_bytes, const Move& move) {
  if (entry_bytes <= kWarpEntryBytes) {
    for (int i = team.warp(); i < count; i += kTeamWarps)
      move(i, Crew{lane_index(), kWarp});
  } else {
    for (int i = 0; i < count; ++i)
      move(i, Crew{team.thread, kTeamThreads});
  }
}

// Entries after which the other side is told, so that both work at once.
__device__ inline int batch_of(const protocol::QueueChannels& channels) {
  return static_cast<int>(max(std::int64_t{1}, min(std::int64_t{kMaxBatch}, channels.entries / 2)));
}

// The words and entries of the queue from `sender` to `receiver`.
__device__ inline std::uint64_t* filled_of(const QueueTask& queue, int phase, int receiver, int sender, int channel) {
  return reinterpret_cast<std::uint64_t*>(queue.windows[receiver] + queue.layout.filled(phase, sender)) + channel;
}

__device__ inline std::uint64_t* drained_of(const QueueTask& queue, int phase, int receiver, int sender, int channel) {
  return reinterpret_cast<std::uint64_t*>(queue.windows[sender] + queue.layout.drained(phase, receiver)) + channel;
}

__device__ inline std::byte* queue_of(const QueueTask& queue, int phase, int receiver, int sender) {
  return queue.windows[receiver] + queue.layout.queue(phase, sender);
}

// The candidates from `base` on that `goes` names, 32 at a time until there is one; by a warp. The mask is 0 when none
// is left.
template <class Goes>
__device__ void find_candidates(
    const protocol::QueueChannels& channels, int channel, std::int64_t tokens, SendState& state, const Goes& goes) {
  while (state.mask == 0 && channel + state.base * channels.count < tokens) {
    const std::int64_t token = channel + (state.base + lane_index()) * channels.count;
    state.mask = __ballot_sync(kAllLanes, static_cast<int>(token < tokens && goes(token)));
    if (state.mask == 0) state.base += kWarp;
  }
}

// Takes the next `count` of them.
__device__ inline void take_candidates(
    const protocol::QueueChannels& channels, int channel, int count, SendState& state, std::int64_t* tokens) {
  for (int i = 0; i < count; ++i) {
    const int bit = __ffs(static_cast<int>(state.mask)) - 1;
    if (lane_index() == i) tokens[i] = channel + (state.base + bit) * channels.count;
    state.mask &= state.mask - 1;
  }
  if (state.mask == 0) state.base += kWarp;
}

// What the sending team does next.
struct Sending {
  int item;  // below 0: nothing any more
  int count;
  std::uint32_t number;  // of the first entry
  bool opens;
  bool tells;  // whether the receiver wants any rows
  bool last;
  std::int64_t tokens[kMaxBatch];
};

// Job: what is sent in a phase.
//   kPhase, kWaitPhase
//   common(), queue(), epoch()
//   num_peers()                the first of the ranks after this one, of which it is the last itself
//   has_rows(peer)             whether the peer is told anything
//   given_up()                 this rank ends the operation: it still tells every peer its header
//   may_open(peer, progress)   whether header and queue may be written again
//   num_tokens(peer), goes(peer, token)
//   add_to_header(peer, team), write_header(peer)
//   write(peer, token, entry, crew)
template <class Job>
class Sender {
 public:
  __device__ Sender(const Job& job, const SendingTeam& team, Sending& shared)
      : job_(job), team_(team), shared_(shared), channels_(job.queue().channels) {
    const int items = job.num_peers() * channels_.count;
    const auto block = static_cast<int>(blockIdx.x);
    const auto blocks = static_cast<int>(gridDim.x);
    num_items_ = block < items ? (items - block - 1) / blocks + 1 : 0;
  }

  __device__ void run() {
    for (int i = team_.thread; i < num_items_; i += kTeamThreads)
      state(i) = {};
    team_.meet();
    while (true) {
      if (team_.warp() == 0) choose();
      team_.meet();
      const Told told{shared_.item, shared_.number + static_cast<std::uint32_t>(shared_.count), shared_.opens,
                      shared_.tells, shared_.last};
      if (told.item < 0) return;
      send();
      team_.meet();
      if (team_.tells()) tell(told);
    }
  }

 private:
  struct Told {
    int item;
    std::uint32_t sent;
    bool opens;
    bool tells;
    bool last;
  };

  struct Found {
    int item = -1;
    int room = 0;
    bool opens = false;
  };

  // Item i of this block.
  __device__ SendState& state(int i) const {
    return job_.queue().sending[static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x)];
  }

  __device__ int number_of(int i) const { return static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x); }

  __device__ int channel_of(int i) const { return number_of(i) % channels_.count; }

  __device__ int peer_of(int i) const {
    return (job_.common().rank + 1 + number_of(i) / channels_.count) % job_.common().num_ranks;
  }

  // By one thread: whether something can be done, or nothing is left. `awaited` becomes who holds up the last item that
  // is neither. A peer that has released the operation needs no more of its rows.
  __device__ bool look(Found& found, Awaited& awaited) const {
    bool waits = false;
    const bool given_up = job_.given_up();
    for (int k = 0; k < num_items_; ++k) {
      const int i = (next_ + k) % num_items_;
      SendState& item = state(i);
      if (item.stage == ItemStage::kDone) continue;
      const int peer = peer_of(i);
      const bool opens = item.stage == ItemStage::kNew;
      if ((opens && !job_.has_rows(peer)) || (given_up && (!opens || channel_of(i) != 0))) {
        item.stage = ItemStage::kDone;
        continue;
      }
      const std::int64_t room = opens ? channels_.entries : room_of(i, peer, item);
      if (opens || room <= 0) {
        const std::uint64_t progress =
            load_acquire_system(progress_of(job_.common(), job_.common().rank, Job::kPhase, peer));
        if (protocol::reached(protocol::rows_released(progress), job_.epoch())) {
          item.stage = ItemStage::kDone;
          continue;
        }
        waits = true;
        awaited.peer = peer;
        if (!opens || !job_.may_open(peer, progress)) continue;
      }
      found = {i, static_cast<int>(min(room, std::int64_t{batch_of(channels_)})), opens};
      return true;
    }
    return !waits;
  }

  __device__ std::int64_t room_of(int i, int peer, const SendState& item) const {
    const std::uint64_t word =
        load_acquire_system(drained_of(job_.queue(), Job::kPhase, peer, job_.common().rank, channel_of(i)));
    const std::uint32_t drained = protocol::stamp_is(word, job_.epoch()) ? protocol::stamp_rows(word) : 0;
    return channels_.entries - static_cast<std::int64_t>(item.sent - drained);
  }

  // By the first warp.
  __device__ void choose() {
    Found found;
    if (lane_index() == 0) {
      Awaited awaited{0, Job::kWaitPhase, job_.epoch()};
      const bool there = wait_until(job_.common(), awaited, [&] { return look(found, awaited); });
      if (!there) found.item = -1;
    }
    __syncwarp();
    const int i = __shfl_sync(kAllLanes, found.item, 0);
    const int room = __shfl_sync(kAllLanes, found.room, 0);
    const bool opens = __shfl_sync(kAllLanes, found.opens ? 1 : 0, 0) != 0;
    const bool given_up = __shfl_sync(kAllLanes, job_.given_up() ? 1 : 0, 0) != 0;
    if (i < 0) {
      if (lane_index() == 0) shared_.item = i;
      return;
    }
    next_ = (i + 1) % num_items_;
    SendState item = state(i);
    const int peer = peer_of(i);
    const int channel = channel_of(i);
    const auto goes = [&](std::int64_t token) { return job_.goes(peer, token); };
    const std::int64_t tokens = given_up ? 0 : job_.num_tokens(peer);
    if (opens) find_candidates(channels_, channel, tokens, item, goes);
    const int count = min(room, __popc(item.mask));
    take_candidates(channels_, channel, count, item, shared_.tokens);
    find_candidates(channels_, channel, tokens, item, goes);
    if (lane_index() == 0) {
      const bool last = item.mask == 0;
      shared_.item = i;
      shared_.count = count;
      shared_.number = item.sent;
      shared_.opens = opens;
      shared_.tells = !given_up;
      shared_.last = last;
      item.sent += static_cast<std::uint32_t>(count);
      item.stage = last ? ItemStage::kDone : ItemStage::kOpen;
      state(i) = item;
    }
    __syncwarp();
  }

  __device__ void send() const {
    const int peer = peer_of(shared_.item);
    const int channel = channel_of(shared_.item);
    if (shared_.opens && channel == 0) job_.add_to_header(peer, team_);
    std::byte* entries = queue_of(job_.queue(), Job::kPhase, peer, job_.common().rank);
    move_entries(team_, shared_.count, channels_.entry_bytes, [&](int index, Crew crew) {
      job_.write(peer, shared_.tokens[index], entries + channels_.entry(channel, shared_.number + index), crew);
    });
  }

  // The filled word releases the entries (pairs with the receiver's wait for it).
  __device__ void tell(const Told& told) const {
    const int peer = peer_of(told.item);
    const int channel = channel_of(told.item);
    if (told.opens && channel == 0) job_.write_header(peer);
    if (!told.tells) return;
    store_release_system(filled_of(job_.queue(), Job::kPhase, peer, job_.common().rank, channel),
                         protocol::encode_filled(job_.epoch(), told.sent, told.last));
  }

  const Job& job_;
  const SendingTeam& team_;
  Sending& shared_;
  const protocol::QueueChannels channels_;
  int num_items_ = 0;
  int next_ = 0;  // item to look at first
};

// All of this rank's rows have left, so the send half of an operation may end: peers then have what they wait for in
// theirs, or this rank's receive half takes the rest of theirs.
__device__ inline bool all_sent(const QueueTask& queue) {
  return load_relaxed_device(&queue.board->blocks_sent) == gridDim.x;
}

// By the sending team, also when it failed.
__device__ inline void count_sent(const QueueTask& queue, const SendingTeam& team) {
  team.meet();
  if (team.leads()) static_cast<void>(add_acq_rel_device(&queue.board->blocks_sent, 1));
}

// By the receiving team, when it takes no more rows; the last one tells every rank that this one needs no more of the
// operation, and that the rings may be filled anew (pairs with Sender's look). Not only when all is sent: the peers
// that this rank still sends to may wait for it in their turn, after a combine that was given up.
__device__ inline void release_queues(
    const Common& common, const QueueTask& queue, const ReceivingTeam& team, int phase, std::uint32_t epoch) {
  __shared__ bool last;
  team.meet();
  if (team.leads()) last = add_acq_rel_device(&queue.board->blocks_received, 1) == gridDim.x - 1;
  team.meet();
  for (int peer = team.thread; last && peer < common.num_ranks; peer += kTeamThreads) {
    store_release_system(progress_of(common, peer, phase, common.rank), protocol::encode_progress(epoch, epoch));
  }
}

// Counters of a route and its masks, to which dispatches add; by one block.
__device__ inline void clear_queued_route(const Common& common, const RouteMemory& route) {
  clear_route(route, common.num_ranks);
  for (std::int64_t i = threadIdx.x; i < common.num_ranks * common.layout.max_chunks(); i += kThreads)
    route.masks[i] = 0;
}

}  // namespace tokenyard::engine::cuda
