// SPDX-License-Identifier: Apache-2.0
// What one dispatch leaves behind for its combine: the route of this rank's tokens, and what it received. All vectors
// are sized once, so a round fills them without allocating.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "protocol/layout.h"

namespace tokenyard::engine {

// One copy of a token: the rank it goes to and its row among the rows of that rank's combine section.
struct Destination {
  std::int32_t rank = 0;
  std::int32_t row = 0;
};

// Expert major: where received tokens went, kept because their rows in the window do not last.
struct ExpertRows {
  // [num_ranks, max_tokens, top_k]: the row that the pick of a received token became, counted through all experts
  // (expert * num_ranks * max_tokens + row); -1 where the pick is of another rank. Defined for received tokens only.
  std::vector<std::int32_t> picks;
  std::vector<float> weights;                   // the same shape; used when weights came with dispatch
  std::vector<std::int32_t> source_tokens;      // [num_local_experts, num_ranks * max_tokens]
  std::vector<std::int32_t> source_ranges;      // [num_local_experts, num_ranks, {first row, rows}]
  std::vector<std::int32_t> routes_per_expert;  // [num_local_experts], with repeated picks
  std::vector<std::int64_t> waited;             // [num_ranks] nanoseconds, by the receive half
  bool has_weights = false;
  // The same on the device, where counts stay there: rows of each expert, source tokens and ranges.
  std::int32_t* rows_on_device = nullptr;
  std::int32_t* source_tokens_on_device = nullptr;
  std::int32_t* source_ranges_on_device = nullptr;
};

// What an engine keeps of a round besides, where it needs it.
struct RoundMemory {
  RoundMemory() = default;
  RoundMemory(const RoundMemory&) = delete;
  RoundMemory& operator=(const RoundMemory&) = delete;
  RoundMemory(RoundMemory&&) = delete;
  RoundMemory& operator=(RoundMemory&&) = delete;
  virtual ~RoundMemory() = default;
};

struct Round {
  std::uint32_t epoch = 0;          // of the dispatch that filled it
  std::uint32_t combine_epoch = 0;  // of the combine half that was sent for it
  std::uint32_t route_epoch = 0;    // of the dispatch that made the route; older than `epoch` after a replay
  std::int64_t num_tokens = 0;      // of this rank

  // Token t goes to destinations [first_destination[t], first_destination[t + 1]), ascending by rank.
  std::vector<std::int32_t> first_destination;
  std::vector<Destination> destinations;
  std::vector<std::int32_t> wire_ids;   // [num_tokens, top_k]; -1 where there is no expert
  std::vector<std::int32_t> rows_sent;  // [num_ranks]

  std::vector<std::int32_t> rows_received;  // [num_ranks]
  std::vector<std::int32_t> row_base;       // [num_ranks]: first row of each source in this rank's combine section
  std::vector<std::int32_t> tokens_of;      // [num_ranks]
  // [num_ranks] final places: first row of each source among the rows that the caller sees.
  std::vector<std::int32_t> result_row;
  // [num_ranks]: tokens of each rank, and rows from it, in the whole call that this dispatch is a part of.
  std::vector<std::int32_t> call_tokens_of;
  std::vector<std::int32_t> call_rows_from;
  std::vector<std::uint64_t> masks;  // rank major: [num_ranks, max_chunks], tokens with a row here
  std::int64_t num_rows = 0;         // received in all
  std::int64_t row_limit = 0;        // final places: rows kept of them
  std::int64_t tokens_per_rank = 0;  // rank major: rows of a source that the caller sees
  // [num_local_experts]: rows with at least one route to the expert. Filled where outputs ask for it, and always by
  // expert.
  std::vector<std::int64_t> rows_per_expert;
  protocol::PlanePlan planes;
  // Where received rows lie, known from the send half on: source s's planes from rows + s * space_stride on; one space
  // for all when the stride is 0.
  const std::byte* rows = nullptr;
  std::int64_t space_stride = 0;

  ExpertRows experts;  // expert major

  std::unique_ptr<RoundMemory> memory;
  // [num_ranks] on the device, where counts stay there: rows from each source and its tokens.
  std::int32_t* rows_on_device = nullptr;
  std::int32_t* tokens_on_device = nullptr;

  // `row` is the token index where sources have spaces of their own, and else the row of the result (source is then 0).
  [[nodiscard]] const std::byte* received_row(int plane, std::int64_t source, std::int64_t row) const {
    const protocol::Plane& at = planes.planes[static_cast<std::size_t>(plane)];
    return rows + source * space_stride + at.offset + row * at.stride;
  }

  // `top_k` 0: tokens go to every rank and ids are not looked at.
  void reserve(const protocol::WindowShape& shape, int top_k, int num_local_experts);
};

// The tokens of one source that have a row here, where sources have spaces of their own: chunks of them, so that
// threads can share them out.
class ReceivedTokens {
 public:
  ReceivedTokens(const Round& round, const protocol::WindowLayout& layout, std::int64_t source)
      : masks_(round.masks.data() + source * layout.max_chunks()), per_chunk_(layout.shape().tokens_per_chunk) {
    const auto at = static_cast<std::size_t>(source);
    if (round.rows_received[at] > 0) num_chunks_ = protocol::num_chunks(round.tokens_of[at], per_chunk_);
  }

  [[nodiscard]] std::int64_t num_chunks() const { return num_chunks_; }

  // Calls visit(token) in ascending order for chunks [begin, end).
  template <class Visit>
  void visit(std::int64_t begin, std::int64_t end, Visit&& visit) const {
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      for (std::uint64_t mask = masks_[chunk]; mask != 0; mask &= mask - 1)
        visit(chunk * per_chunk_ + std::countr_zero(mask));
    }
  }

  template <class Visit>
  void visit_all(Visit&& visit) const {
    this->visit(0, num_chunks_, visit);
  }

 private:
  const std::uint64_t* masks_;
  int per_chunk_;
  std::int64_t num_chunks_ = 0;
};

}  // namespace tokenyard::engine
