// SPDX-License-Identifier: Apache-2.0
// What the host side hands to the kernels of rounds through queues, and what those keep in device memory. Pointers are
// device pointers of the calling rank unless said otherwise.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "engine/cuda/tasks.h"
#include "protocol/queue_channels.h"
#include "protocol/queue_layout.h"

namespace tokenyard::engine::cuda {

enum class ItemStage : std::uint32_t { kNew, kOpen, kDone };

// How far the rows for one peer in one channel are sent. Candidates are the channel's tokens, 32 at a time.
struct SendState {
  std::int64_t base = 0;   // of the first candidate, counted in the channel
  std::uint32_t mask = 0;  // the candidates that have a row for the peer and were not sent
  std::uint32_t sent = 0;  // entries
  ItemStage stage = ItemStage::kNew;
};

// How far the rows of one source in one channel are received: between the halves of an operation too.
struct ReceiveState {
  std::uint32_t done = 0;  // entries
  ItemStage stage = ItemStage::kNew;
};

// The last operation of each phase that was sent, and how many blocks have sent, or received, all that they have to.
struct QueueBoard {
  std::array<std::uint32_t, protocol::kNumQueuePhases> epochs{};
  std::uint32_t blocks_sent = 0;
  std::uint32_t blocks_received = 0;
};

struct QueueTask {
  protocol::QueueLayout layout{};
  std::byte* const* windows = nullptr;  // [num_ranks], of queues
  protocol::QueueChannels channels{};   // of this operation's entries
  QueueBoard* board = nullptr;
  SendState* sending = nullptr;       // [num_ranks, kMaxQueueChannels], one operation at a time
  ReceiveState* receiving = nullptr;  // the same
  std::int64_t* summed = nullptr;     // [kMaxQueueChannels]: tokens of a channel that combine has summed
};

struct QueuedLane {
  Lane lane{};
  std::int64_t entry_offset = 0;
};

struct QueuedDispatchTask {
  Common common{};
  RouteMemory route{};
  QueueTask queue{};
  std::array<QueuedLane, protocol::kMaxPlanes> lanes{};
  std::array<Copied, protocol::kMaxPlanes> copied{};
  int num_lanes = 0;  // without the ids, which follow them
  int num_copied = 0;
  Ids ids{};
  std::byte* landing = nullptr;  // [num_ranks] spaces, where rows land whatever the outputs are
  std::int64_t space_stride = 0;
  std::int64_t num_tokens = 0;
  const std::int32_t* num_tokens_on_device = nullptr;
  std::int64_t rows_per_block = 0;
  std::uint64_t digest = 0;
  std::int64_t agreed = 0;
  const std::int32_t* stats = nullptr;
  std::int32_t* landed_stats = nullptr;  // [num_ranks, num_stats]
  std::int32_t* gathered_stats = nullptr;
  std::int64_t num_stats = 0;
  bool sends = true;
  bool receives = true;
};

struct QueuedCombineTask {
  CombineTask combine{};
  QueueTask queue{};
  std::byte* sums = nullptr;  // f32 [max_tokens, hidden]: of the tokens that the send half summed
  bool own_in_queue = false;  // this rank's own rows too: those that a cast changes
};

void load_queued_dispatch();
void launch_queued_dispatch(const QueuedDispatchTask& task, int blocks, cudaStream_t stream);
// A dispatch that this rank gives up: it uses up the epoch and tells every peer.
void launch_queued_abort(const Common& common, cudaStream_t stream);
// Makes a route as new, after a round that no combine ended.
void launch_queued_clear(const Common& common, const RouteMemory& route, cudaStream_t stream);
void load_queued_combine();
void launch_queued_combine(const QueuedCombineTask& task, int blocks, cudaStream_t stream);

}  // namespace tokenyard::engine::cuda
