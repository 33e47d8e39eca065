// SPDX-License-Identifier: Apache-2.0
// Rounds at final places: what their kernels are told, and the route that a dispatch leaves for its combine. A token's
// row at a receiver follows from three numbers: where this rank's rows begin there, how many of them the chunks before
// have, and how many the chunk's tokens before.
#pragma once

#include <array>
#include <cstdint>

#include "engine/cuda/compact_headers.h"
#include "engine/cuda/tasks.h"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {

// In device memory that a handle owns. Of `basic`, masks are of the tokens sent to each rank.
struct CompactRoute {
  RouteMemory basic{};
  std::int32_t* wire_ids = nullptr;         // [max_tokens, top_k]; -1 where there is no expert
  std::uint32_t* first_of_chunk = nullptr;  // [num_ranks, chunk_stride]: rows for the rank in the chunks before
  std::int32_t* begin_at = nullptr;         // [num_ranks]: this rank's first row at each receiver
  int chunks = 0;                           // of a source
  int chunk_stride = 0;                     // the same, as a multiple of 4
  int top_k = 0;
};

// In pinned host memory: what a dispatch whose counts are wanted on the host tells it. `ticket` is stored last.
struct ToldCounts {
  std::uint32_t ticket;
  std::uint32_t there;  // 0: the operation ended without a result
  std::int32_t num_rows;
  std::int32_t padding;
};

// Behind it.
struct ToldLists {
  std::int32_t* rows_received = nullptr;    // [num_ranks]
  std::int32_t* tokens_of = nullptr;        // [num_ranks]
  std::int32_t* rows_per_expert = nullptr;  // [num_local_experts]
};

// How many rows go where, which all ranks tell each other before the first row goes.
struct CountTask {
  std::int64_t num_tokens = 0;
  const std::int32_t* num_tokens_on_device = nullptr;
  std::uint64_t digest = 0;
  std::int64_t agreed = 0;
  CompactHeaders headers{};
  protocol::OwnerRule owners{};
  protocol::Divisor slots{};             // by top_k
  std::byte* masks = nullptr;            // [num_ranks, chunk_stride] tagged units: as in the route
  std::uint32_t* expert_rows = nullptr;  // [num_experts]: rows of this rank for each; 0 between operations
  ToldCounts* told = nullptr;            // null: the host does not wait
  ToldLists lists{};
  std::uint32_t ticket = 0;
};

// A dispatch, or a part of it.
struct MoveTask {
  Common common{};
  CompactRoute route{};
  CountTask counts{};
  std::array<Lane, protocol::kMaxPlanes> lanes{};
  std::array<Copied, protocol::kMaxPlanes> copied{};
  int num_lanes = 0;
  int num_copied = 0;
  // Picks of the result. The unit of weights is an element of theirs; their data is null where none came.
  Ids ids{};
  Copied weights{};
  int first_expert = 0;
  int num_local_experts = 0;
  std::int64_t row_limit = 0;
  std::int64_t rows_shown = 0;
  bool sends_ids = true;
  bool settles = true;  // begins with the counts; else they are settled
  bool sends = true;
  bool receives = true;
  bool releases = false;  // the result needs no row of the window
};

struct CompactCombineTask {
  CombineTask rows{};
  CompactRoute route{};
  // Weights to bring back: rows as given, and the tokens' tensor.
  const std::byte* weights = nullptr;
  std::int64_t weights_stride = 0;
  std::byte* weights_output = nullptr;
  std::int64_t weights_output_stride = 0;
  int num_experts = 0;
};

}  // namespace tokenyard::engine::cuda
