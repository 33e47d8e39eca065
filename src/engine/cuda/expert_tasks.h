// SPDX-License-Identifier: Apache-2.0
// What the host side of expert-major rounds hands to their kernels, and what those share, as tasks.h for all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tokenyard/dispatch.h"

#include "engine/cuda/expert_layout.h"
#include "engine/cuda/tasks.h"
#include "protocol/owner.h"

namespace tokenyard::engine::cuda {

// What a warp moves at a time: of a row in lines a piece, by so many accesses; of one that is stamped a part.
inline constexpr int kLinesOfAccess = kWarp / kLineThreads;
inline constexpr int kPieceAccesses = 2;
inline constexpr int kPieceLines = kPieceAccesses * kLinesOfAccess;
inline constexpr int kStampedParts = 4;

// Which operations are under way, in device memory, one per communication; zero at first. One block of each operation
// looks at it. The first thing that it does is to take what the operation before was receiving as received.
struct alignas(16) ExpertBoard {
  // [dispatch and combine, slot], not 0: sent and not received; and the operation that does receive it runs, or was the
  // last to run.
  std::uint32_t open[2][kExpertDepth];     // NOLINT(modernize-avoid-c-arrays): device code
  std::uint32_t closing[2][kExpertDepth];  // NOLINT(modernize-avoid-c-arrays): device code
};

enum ExpertWord : int {
  kOwnTokens,       // that this rank dispatched
  kItems,           // rows received
  kDispatchEpoch,   // of the round
  kCombineEpoch,    //
  kGivenUp,         // not 0: a rank gave the dispatch up, and no rank will combine it
  kCombineGivenUp,  // not 0: an owner of this rank's rows gave the combine up
  kExpertWords
};

// What a dispatch leaves for its combine, in device memory that a handle owns.
struct ExpertRoute {
  std::uint32_t* state = nullptr;           // [kExpertWords]
  std::uint32_t* ranks_of_token = nullptr;  // [max_tokens, words]: bit r = the token goes to rank r
  std::int32_t* rows_sent = nullptr;        // [num_ranks]
  std::int32_t* rows_received = nullptr;    // [num_ranks]
  std::int32_t* tokens_of = nullptr;        // [num_ranks]
  std::int32_t* rows_per_expert = nullptr;  // [num_local_experts]
  std::int32_t* source_ranges = nullptr;    // [num_local_experts, num_ranks, {first row, rows}]
  std::int32_t* source_tokens = nullptr;    // [num_local_experts, rows of an expert]
  unsigned long long* waited_ns = nullptr;  // [num_ranks]; 0 between operations
  // [rows received, item_words]: source and token; then for each pick its place and its weight. Sources from the next
  // rank on, so that the rows of others are combined first.
  std::uint32_t* items = nullptr;
  int words = 1;  // of a token's set of ranks
  int item_words = 0;
};

// The experts, and how ids name them.
struct Experts {
  protocol::OwnerRule owners{};
  int top_k = 0;
  protocol::Divisor picks{1};  // top_k
  int num_experts = 0;
  int first_local = 0;
  int num_local = 0;
  std::int64_t invalid_id = -1;
  std::int64_t rows = 0;  // of an expert
  int row_bits = 0;       // of a place: the row is in the low ones, above it the expert among its owner's

  TOKENYARD_HD constexpr std::int32_t place(int local_expert, std::int32_t row) const {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(local_expert) << row_bits |
                                     static_cast<std::uint32_t>(row));
  }

  TOKENYARD_HD constexpr int expert_of(std::int32_t place) const {
    return static_cast<int>(static_cast<std::uint32_t>(place) >> row_bits);
  }

  TOKENYARD_HD constexpr int row_of(std::int32_t place) const {
    return static_cast<int>(static_cast<std::uint32_t>(place) & ((1U << row_bits) - 1));
  }
};

// [num_tokens, top_k] as the caller gave them.
struct Picks {
  const std::byte* ids = nullptr;
  std::int64_t ids_stride = 0;
  bool ids_i64 = false;
  const std::byte* weights = nullptr;  // null: they come with combine
  std::int64_t weights_stride = 0;
  Dtype weights_dtype = Dtype::kF32;
};

// A row on its way in lines: its values, then its scales from a multiple of 16 bytes on.
struct RowInLines {
  int values = 0;  // bytes
  int scales = 0;

  TOKENYARD_HD constexpr int scales_at() const { return (values + 15) / 16 * 16; }

  TOKENYARD_HD constexpr int lines() const { return static_cast<int>(lines_of(scales_at() + scales)); }
};

struct ExpertDispatchTask {
  Common common{};
  ExpertLayout extra{};
  ExpertBoard* state = nullptr;
  ExpertRoute route{};
  Experts experts{};
  Picks picks{};
  RowInLines row{};
  Lane values{};
  Lane scales{};  // of a cast only its place on the wire
  DispatchCast cast = DispatchCast::kNone;
  Dtype rows_dtype = Dtype::kBf16;
  std::int64_t num_tokens = 0;
  const std::int32_t* num_tokens_on_device = nullptr;
  std::uint64_t digest = 0;
  std::int64_t agreed = 0;
  Copied values_to{};  // no data: rows stay in the window
  Copied scales_to{};
  std::int32_t* routes_per_expert = nullptr;  // the caller's statistics
  std::int64_t* waited = nullptr;
  protocol::Divisor parts{1};  // of a row, a warp each at the receiver
  protocol::Divisor peers{1};  // all ranks; for rows in lines, which are few enough
  bool with_weights = false;
  bool overlaps = false;  // the launch (overlap.cuh)
  bool sends = true;
  bool receives = true;
};

struct ExpertCombineTask {
  Common common{};
  ExpertLayout extra{};
  ExpertBoard* state = nullptr;
  ExpertRoute route{};
  Experts experts{};
  const std::byte* from = nullptr;  // what the experts gave
  std::int64_t from_block_stride = 0;
  std::int64_t from_row_stride = 0;
  const std::byte* weights = nullptr;  // null: they came with dispatch
  std::int64_t weights_stride = 0;
  std::byte* output = nullptr;
  std::int64_t output_stride = 0;
  std::int64_t hidden = 0;
  int piece_lines = 0;          // where rows cross in lines: of a warp at a time
  protocol::Divisor pieces{1};  // of a row
  int row_lines = 0;
  Dtype from_dtype = Dtype::kBf16;
  Dtype wire_dtype = Dtype::kBf16;
  Dtype output_dtype = Dtype::kBf16;
  bool from_vectors = false;  // rows may be accessed by 16 bytes
  bool output_vectors = false;
  bool overlaps = false;  // the launch
  bool sends = true;
  bool receives = true;
};

}  // namespace tokenyard::engine::cuda
