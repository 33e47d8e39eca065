// SPDX-License-Identifier: Apache-2.0
// Combine through bounded queues, in one launch. Each block has a team that sends expert rows to the origins of their
// tokens, and one that sums: in every channel rows come in the order of tokens, from each rank in a ring of its own, so
// the rows of a token lie at the heads of its ranks' rings, and are summed in the order of ranks right there.
#include "engine/cuda/combine_kernels.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/queue_send.cuh"
#include "engine/cuda/row_sums.cuh"

namespace tokenyard::engine::cuda {
namespace {

constexpr int kTokensAtOnce = 4;

// Where this rank's expert row for a token of an origin is.
__device__ const std::byte* expert_row(const CombineTask& task, int origin, std::int64_t token) {
  return task.from + origin * task.from_block_stride + token * task.from_row_stride;
}

template <class Wire>
struct CombineJob {
  static constexpr int kPhase = protocol::kCombinePhase;
  static constexpr Phase kWaitPhase = Phase::kCombine;

  const QueuedCombineTask& task;
  std::uint32_t now;

  __device__ const Common& common() const { return task.combine.common; }

  __device__ const RouteMemory& route() const { return task.combine.route; }

  __device__ const QueueTask& queue() const { return task.queue; }

  __device__ std::uint32_t epoch() const { return now; }

  __device__ int num_peers() const { return common().num_ranks - (task.own_in_queue ? 0 : 1); }

  __device__ bool has_rows(int origin) const { return load_relaxed_device(route().rows_received + origin) > 0; }

  // What owners do wrong ends only the part of those that they owe rows.
  __device__ bool given_up() const { return false; }

  __device__ bool may_open(int origin, std::uint64_t progress) const {
    return protocol::reached(protocol::rows_released(progress), common().owed[origin]);
  }

  __device__ std::int64_t num_tokens(int origin) const { return route().tokens_of[origin]; }

  __device__ bool goes(int origin, std::int64_t token) const {
    const int size = common().layout.shape().tokens_per_chunk;
    return (route().masks[origin * common().layout.max_chunks() + token / size] >> (token % size) & 1U) != 0;
  }

  __device__ void add_to_header(int /*origin*/, const SendingTeam& /*team*/) const {}

  // Pairs with await_header.
  __device__ void write_header(int origin) const {
    protocol::HeaderLine* header = header_of(common(), origin, kPhase, now, common().rank);
    header->agreed = task.combine.hidden;
    header->status = protocol::HeaderStatus::kOk;
    store_release_system(&header->stamp, protocol::encode_stamp(now, route().rows_received[origin]));
  }

  __device__ void write(int origin, std::int64_t token, std::byte* entry, Crew crew) const {
    const CombineTask& combine = task.combine;
    const std::byte* from = expert_row(combine, origin, token);
    std::byte* to = entry + protocol::kQueueEntryHeader;
    if (combine.from_dtype == combine.rows_dtype)
      return copy_row_at_once(to, from, combine.row_bytes, combine.unit, crew);
    cast_row_of<Wire>(combine.from_dtype, to, from, combine.hidden, crew);
  }
};

// What the summing team of a block works on: tokens whose rows are all here.
struct Summing {
  OwnersOfToken owners[kTokensAtOnce];
  std::int32_t ranks[kTokensAtOnce][kMaxTopK];
  std::int64_t tokens[kTokensAtOnce];
  int count;
  // Of the channel, by owner: entries that were there when last looked, and those that were or are being summed.
  std::uint32_t seen[kMaxRanks];
  std::uint32_t taken[kMaxRanks];
};

template <class Wire, class To>
class Summer {
 public:
  __device__ Summer(const QueuedCombineTask& task, std::uint32_t epoch, const ReceivingTeam& team, Summing& shared)
      : task_(task),
        combine_(task.combine),
        channels_(task.queue.channels),
        epoch_(epoch),
        tokens_(task.combine.route.state[kRouteTokens]),
        team_(team),
        shared_(shared) {}

  __device__ void run() {
    for (int channel = static_cast<int>(blockIdx.x); channel < channels_.count; channel += static_cast<int>(gridDim.x))
      sum_channel(channel);
  }

 private:
  __device__ bool ends() const { return !combine_.receives && all_sent(task_.queue); }

  __device__ ReceiveState& kept(int channel, int owner) const {
    return task_.queue.receiving[owner * protocol::kMaxQueueChannels + channel];
  }

  __device__ void sum_channel(int channel) {
    const int ranks = combine_.common.num_ranks;
    for (int owner = team_.thread; owner < ranks; owner += kTeamThreads)
      shared_.seen[owner] = shared_.taken[owner] = combine_.sends ? 0U : kept(channel, owner).done;
    std::int64_t next = combine_.sends ? 0 : task_.queue.summed[channel];
    team_.meet();
    if (!combine_.sends) give_sums(channel, next);
    while (channel + next * channels_.count < tokens_) {
      if (team_.warp() == 0) gather(channel, next);
      team_.meet();
      const int count = shared_.count;
      for (int i = 0; i < count; ++i)
        sum_token<Wire, To>(combine_, shared_.owners[i], shared_.tokens[i], {team_.thread, kTeamThreads});
      team_.meet();
      if (count == 0) break;
      if (team_.warp() == 0) tell(channel);
      next += count;
    }
    team_.meet();
    // For the receive half.
    if (team_.leads()) task_.queue.summed[channel] = next;
    for (int owner = team_.thread; owner < ranks; owner += kTeamThreads)
      kept(channel, owner) = {.done = shared_.taken[owner], .stage = ItemStage::kOpen};
    team_.meet();
  }

  // Tokens that the send half has summed.
  __device__ void give_sums(int channel, std::int64_t count) {
    OwnersOfToken& sums = shared_.owners[0];
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t token = channel + i * channels_.count;
      if (team_.leads()) sums = one_row(task_.sums + token * combine_.hidden * std::int64_t{sizeof(float)});
      team_.meet();
      sum_token<protocol::F32, To>(combine_, sums, token, {team_.thread, kTeamThreads});
      team_.meet();
    }
  }

  __device__ static OwnersOfToken one_row(const std::byte* row) {
    OwnersOfToken owners;
    owners.rows[0] = row;
    owners.count = 1;
    return owners;
  }

  // By the first warp: the next token, when its rows are here, and further ones that need no wait.
  __device__ void gather(int channel, std::int64_t next) {
    int count = 0;
    while (count < kTokensAtOnce && channel + (next + count) * channels_.count < tokens_) {
      if (!gather_token(channel, channel + (next + count) * channels_.count, count)) break;
      ++count;
    }
    if (lane_index() == 0) shared_.count = count;
    __syncwarp();
  }

  __device__ bool gather_token(int channel, std::int64_t token, int place) {
    const int total = list_owners(token, shared_.ranks[place]);
    bool there = true;
    for (int k = lane_index(); k < total; k += kWarp) {
      const int owner = shared_.ranks[place][k];
      if (!in_queue(owner)) {
        shared_.owners[place].rows[k] = expert_row(combine_, owner, token);
        continue;
      }
      there = there && row_is_here(owner, channel, place == 0);
      shared_.owners[place].rows[k] = queue_of(task_.queue, protocol::kCombinePhase, combine_.common.rank, owner) +
                                      channels_.entry(channel, shared_.taken[owner]) + protocol::kQueueEntryHeader;
    }
    if (__all_sync(kAllLanes, static_cast<int>(there)) == 0) return false;
    for (int k = lane_index(); k < total; k += kWarp)
      ++shared_.taken[shared_.ranks[place][k]];
    if (lane_index() == 0) {
      shared_.owners[place].count = total;
      shared_.tokens[place] = token;
    }
    __syncwarp();
    return true;
  }

  __device__ bool in_queue(int owner) const { return owner != combine_.common.rank || task_.own_in_queue; }

  // The ranks of a token, ascending; by a warp.
  __device__ int list_owners(std::int64_t token, std::int32_t* ranks) const {
    const int words = combine_.route.words;
    std::uint32_t word = lane_index() < words ? combine_.route.ranks_of_token[token * words + lane_index()] : 0;
    int before = __popc(word);
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, before, step);
      if (lane_index() >= step) before += other;
    }
    const int total = __shfl_sync(kAllLanes, before, kWarp - 1);
    before -= __popc(word);
    for (; word != 0; word &= word - 1)
      ranks[before++] = lane_index() * kWordBits + __ffs(static_cast<int>(word)) - 1;
    __syncwarp();
    return total;
  }

  template <class Ready>
  __device__ bool await(int owner, const Ready& ready) const {
    return wait_until(
        combine_.common, {owner, Phase::kCombine, epoch_}, [&] { return ready() || ends(); },
        combine_.route.state + kCombineAborted);
  }

  // By one thread, which alone looks after this owner's rows meanwhile.
  __device__ bool row_is_here(int owner, int channel, bool waits) {
    if (shared_.seen[owner] > shared_.taken[owner]) return true;
    if (shared_.seen[owner] == 0 && (!waits || !await_header(owner))) return false;
    const std::uint64_t* word = filled_of(task_.queue, protocol::kCombinePhase, combine_.common.rank, owner, channel);
    const auto more = [&] {
      const std::uint64_t filled = load_acquire_system(word);
      if (protocol::stamp_is(filled, epoch_))
        shared_.seen[owner] = static_cast<std::uint32_t>(protocol::filled_entries(filled));
      return shared_.seen[owner] > shared_.taken[owner];
    };
    return waits ? await(owner, more) && shared_.seen[owner] > shared_.taken[owner] : more();
  }

  __device__ bool await_header(int owner) const {
    const protocol::HeaderLine* header =
        header_of(combine_.common, combine_.common.rank, protocol::kCombinePhase, epoch_, owner);
    const auto stamped = [&] { return protocol::stamp_is(load_acquire_system(&header->stamp), epoch_); };
    if (!await(owner, stamped) || !stamped()) return false;
    const bool aborted = header->status == protocol::HeaderStatus::kAborted;
    if (!aborted && header->agreed == combine_.hidden) return true;
    give_up(combine_.common, combine_.route.state + kCombineAborted,
            aborted ? NoticeKind::kAborted : NoticeKind::kMismatch, {owner, Phase::kCombine, epoch_});
    return false;
  }

  // By the first warp, when all have read the rows: pairs with Sender's look.
  __device__ void tell(int channel) const {
    for (int i = 0; i < shared_.count; ++i) {
      for (int k = lane_index(); k < shared_.owners[i].count; k += kWarp) {
        const int owner = shared_.ranks[i][k];
        if (!in_queue(owner)) continue;
        store_release_system(drained_of(task_.queue, protocol::kCombinePhase, combine_.common.rank, owner, channel),
                             protocol::encode_stamp(epoch_, shared_.taken[owner]));
      }
    }
    __syncwarp();
  }

  const QueuedCombineTask& task_;
  const CombineTask& combine_;
  const protocol::QueueChannels channels_;
  const std::uint32_t epoch_;
  const std::int64_t tokens_;
  const ReceivingTeam& team_;
  Summing& shared_;
};

// By the last block of the operation, for the next one.
__device__ void finish(const QueuedCombineTask& task, std::uint32_t epoch) {
  const CombineTask& combine = task.combine;
  const Common& common = combine.common;
  if (threadIdx.x == 0) {
    common.board->blocks_done = 0;
    task.queue.board->blocks_sent = task.queue.board->blocks_received = 0;
    if (combine.sends) common.board->epochs[protocol::kCombinePhase] = epoch;
    if (combine.sends) task.queue.board->epochs[protocol::kCombinePhase] = epoch;
  }
  for (int origin = static_cast<int>(threadIdx.x); combine.sends && origin < common.num_ranks; origin += kThreads) {
    if (combine.route.rows_received[origin] > 0) common.owed[origin] = epoch;
  }
  __syncthreads();
  if (combine.receives) clear_queued_route(common, combine.route);
}

template <class Wire, class To>
__global__ void __launch_bounds__(kThreads) queued_combine(const __grid_constant__ QueuedCombineTask task) {
  __shared__ Sending sending;
  __shared__ Summing summing;
  const CombineTask& combine = task.combine;
  const Common& common = combine.common;
  if (__syncthreads_or(static_cast<int>(load_relaxed_device(&common.board->failed))) != 0) return;
  const bool aborted = load_relaxed_device(combine.route.state + kRouteAborted) != 0;
  const std::uint32_t last = common.board->epochs[protocol::kCombinePhase];
  std::uint32_t epoch = combine.sends ? last + 1 : task.queue.board->epochs[protocol::kCombinePhase];
  if (aborted) epoch = last;  // no rank combines a round that was given up, so it uses up none
  if (!aborted && ReceivingTeam::has_thread()) {
    const ReceivingTeam team;
    Summer<Wire, To>(task, epoch, team, summing).run();
    if (combine.receives) release_queues(common, task.queue, team, protocol::kCombinePhase, epoch);
  } else if (!aborted && combine.sends) {
    const SendingTeam team;
    const CombineJob<Wire> job{task, epoch};
    Sender(job, team, sending).run();
    count_sent(task.queue, team);
  }
  if (last_block(&common.board->blocks_done)) finish(task, epoch);
}

using QueuedCombineKernel = void (*)(QueuedCombineTask);

struct Kernels {
  template <class Wire, class To>
  static QueuedCombineKernel get() {
    if constexpr (sizeof(typename Wire::Bits) == 1) {
      return nullptr;  // the rows of this combine cross in a wide dtype
    } else {
      return queued_combine<Wire, To>;
    }
  }
};

}  // namespace

void load_queued_combine() {
  for (const Dtype rows : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const Dtype output : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      cudaFuncAttributes attributes{};
      check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(combine_kernel<Kernels>(rows, output))),
            "loading a kernel of combine");
    }
  }
}

void launch_queued_combine(const QueuedCombineTask& task, int blocks, cudaStream_t stream) {
  combine_kernel<Kernels>(task.combine.rows_dtype, task.combine.output_dtype)<<<blocks, kThreads, 0, stream>>>(task);
  check(cudaGetLastError(), "launching a combine");
}

}  // namespace tokenyard::engine::cuda
