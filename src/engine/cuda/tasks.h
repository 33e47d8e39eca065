// SPDX-License-Identifier: Apache-2.0
// What the host side of the CUDA engine hands to its kernels: plain data, passed by value, and the memory that kernels
// of one communication share. Pointers are device pointers of the calling rank unless said otherwise.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tokenyard/tensor.h"

#include "engine/cuda/small_layout.h"
#include "protocol/host_device.h"
#include "protocol/layout.h"
#include "protocol/owner.h"
#include "protocol/planes.h"

namespace tokenyard::engine::cuda {

inline constexpr int kThreads = 512;  // of a block
inline constexpr int kWarp = 32;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr int kMaxRanks = 1024;  // as the library
inline constexpr int kMaxTopK = 64;
inline constexpr int kNearRanks = 8;  // whose windows' addresses kernels get without a load
inline constexpr int kWordBits = 32;  // ranks in a word of a token's set of ranks

inline constexpr int kMaxBlocks = 256;  // of a launch

// In device memory, one per communication. The last block of each operation writes it for the next one.
struct alignas(16) Board {
  std::array<std::uint32_t, protocol::kNumPhases> epochs{};  // of the last operation
  std::uint32_t failed = 0;                                  // not 0: a wait ran out, and all that follows ends at once
  std::uint32_t rows_released = 0;                           // of dispatch, as last told to the peers
  std::uint32_t blocks_done = 0;
  std::uint32_t blocks_counted = 0;  // whose rows for each expert are counted
  std::uint32_t shares_taken = 0;    // of the sums of a combine; 0 between operations
  std::uint32_t initial_epoch = 0;
  std::uint64_t deadline_ns = 0;        // of one wait
  std::uint64_t first_deadline_ns = 0;  // in the first operation of each phase
  std::uint64_t invalid_ids = 0;        // ids that are no experts, since creation: their picks were dropped
  std::uint64_t missing_rows = 0;       // of this rank's tokens that receivers had dropped, in all combines
  std::uint64_t invalid_told = 0;       // of them, on the host's board
  // The same epochs, one word for each block of a small round: a block writes its own for its successor, so none has to
  // be found that is the last.
  std::array<std::array<std::uint32_t, kMaxBlocks>, protocol::kNumPhases> block_epochs{};
};

enum class NoticeKind : std::uint32_t { kNone, kTimeout, kAborted, kMismatch };

// In pinned host memory that the device reaches: what the host may read at any time without synchronising.
struct Notice {
  NoticeKind kind;
  std::int32_t peer;
  std::uint32_t phase;  // tokenyard::Phase
  std::uint32_t epoch;
  std::uint64_t waited_ns;
};

struct HostBoard {
  Notice fault;    // sticky
  Notice aborted;  // the last operation that a peer gave up, or in which ranks passed what must agree and did not
  std::uint64_t invalid_ids;
  std::uint64_t missing_rows;
  std::int32_t culprit;  // of the fault, when it was looked for (culprit.h)
};

// What a dispatch leaves for its combine, in device memory that a handle owns.
struct RouteMemory {
  std::uint32_t* ranks_of_token = nullptr;  // [max_tokens, words]: bit r = the token goes to rank r
  std::uint64_t* masks = nullptr;           // [num_ranks, max_chunks]: tokens of the chunk that have a row here
  std::uint32_t* rows_sent = nullptr;       // [num_ranks]
  std::uint32_t* rows_received = nullptr;   // [num_ranks]
  std::int32_t* tokens_of = nullptr;        // [num_ranks]
  std::uint32_t* state = nullptr;           // [kRouteWords]
  std::uint32_t* present = nullptr;         // [num_ranks, small tokens]: of a small round, whether the row is here
  int words = 1;                            // ceil(num_ranks / kWordBits)
};

// kRouteAborted: the dispatch was given up by a rank, and no rank will combine it. kCombineAborted: an owner of this
// rank's rows gave the combine up. Small rounds have words of their own for it (plain_headers.cuh), of which dispatches
// to final places use one. Of these are the dispatch's epoch, and the rows received in all.
enum RouteWord : int {
  kRouteTokens,
  kRouteAborted,
  kCombineAborted,
  kSmallRouteAborted,
  kSmallCombineAborted,
  kRouteEpoch,
  kRouteRows,
  kRouteWords
};

// What every kernel of a communication is given. Reads of parameters miss, too: what small rounds need comes first.
struct Common {
  int rank = 0;
  int num_ranks = 1;
  Board* board = nullptr;
  std::array<std::byte*, kNearRanks> near{};  // the first of the windows
  std::byte* const* windows = nullptr;        // [num_ranks]
  HostBoard* host = nullptr;
  // Parts of chunks that are on their way; 0 between operations. [max_chunks], in combine [num_ranks, max_chunks].
  std::uint32_t* arrivals = nullptr;
  std::uint32_t* owed = nullptr;  // [num_ranks]: combine in which this rank last owed rows to each origin
  protocol::WindowLayout layout{};
};

// One payload on its way: where token 0's row is, and where its row goes inside a payload space.
struct Lane {
  const std::byte* from = nullptr;
  std::int64_t from_stride = 0;
  std::int64_t offset = 0;
  std::int64_t stride = 0;
  std::int64_t row_bytes = 0;
  int unit = 1;  // bytes of one access: divides all of the above
};

inline constexpr int kStageBytes = 16 << 10;  // of shared memory, which bulk copies go through

// Rows that bulk copies take, so many at once, and that are long enough to gain from them.
TOKENYARD_HD constexpr bool moves_in_bulk(const Lane& lane, int at_once = 1) {
  constexpr std::int64_t kLeastBytes = 512;
  return lane.unit == 16 && at_once * lane.row_bytes >= kLeastBytes;
}

// A block sends several tokens at once then. What other ranks choose does not matter.
template <class Task>
bool gains_from_bulk(const Task& task, std::int64_t num_tokens, int blocks, int at_once = 1) {
  if (!task.sends || num_tokens <= blocks) return false;
  for (int i = 0; i < task.num_lanes; ++i) {
    if (moves_in_bulk(task.lanes[static_cast<unsigned>(i)], at_once)) return true;
  }
  return false;
}

// Where the rows of one plane of the result go, when not to where they arrive.
struct Copied {
  std::byte* data = nullptr;
  std::int64_t block_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t row_bytes = 0;
  std::int64_t offset = 0;  // of the plane in a payload space
  std::int64_t stride = 0;
  int unit = 1;
};

struct Ids {
  const std::byte* from = nullptr;
  std::int64_t from_stride = 0;
  std::int64_t offset = 0;  // of the plane of wire ids
  std::int64_t stride = 0;
  bool from_i64 = false;
  std::byte* to = nullptr;
  std::int64_t to_block_stride = 0;
  std::int64_t to_row_stride = 0;
  bool to_i64 = false;
  int top_k = 0;
  int num_experts = 0;
  std::int64_t invalid_id = -1;
};

struct DispatchTask {
  Common common{};
  RouteMemory route{};
  SmallLayout small{};  // where a peer may believe that this is a small round
  std::array<Lane, protocol::kMaxPlanes> lanes{};
  std::array<Copied, protocol::kMaxPlanes> copied{};
  int num_lanes = 0;
  int num_copied = 0;
  Ids ids{};
  std::int64_t num_tokens = 0;
  const std::int32_t* num_tokens_on_device = nullptr;  // when not null, num_tokens is the most that it may hold
  std::int64_t rows_per_block = 0;
  std::uint64_t digest = 0;
  std::int64_t agreed = 0;
  const std::int32_t* stats = nullptr;
  std::int32_t* gathered_stats = nullptr;  // [num_ranks, num_stats]
  std::int64_t num_stats = 0;
  bool sends = true;
  bool receives = true;
  bool counts = true;  // false when the same rows are received again
};

// A lane of a small round: its lines in a packet, and where its rows go at the receiver.
struct SmallLane {
  const std::byte* from = nullptr;
  std::int64_t from_stride = 0;
  std::byte* to = nullptr;
  std::int64_t to_block_stride = 0;
  std::int64_t to_row_stride = 0;
  int row_bytes = 0;
  int first_line = 0;
  int end_line = 0;
  bool words_from = false;  // rows are whole words of 8 bytes, at such addresses
  bool words_to = false;
};

// How the lines of small rounds go round the blocks: an item is a slice of a row or packet for one peer.
struct SmallWork {
  int threads = kThreads;  // of a block
  unsigned slices_log2 = 0;
  unsigned slices = 1;
  unsigned step = 0;      // lines that the blocks of all slices take at once
  bool overlaps = false;  // may start while the kernel before it on the stream runs, and waits for its end
  protocol::Divisor peers{1};
};

struct SmallDispatchTask {
  Common common{};
  SmallWork work{};
  protocol::OwnerRule owners{};
  std::int64_t num_tokens = 0;
  const std::int32_t* num_tokens_on_device = nullptr;
  int rows_per_block = 0;
  std::uint32_t agreed = 0;  // a hash of all that must agree
  int lane_lines = 0;        // of a packet; then come the ids
  int num_lines = 0;         // with them
  bool sends = true;
  bool receives = true;
  bool counts = true;  // false when the same rows are received again
  // Own rows go straight to where they are shown; else through lines, as where nobody knows yet where that is.
  bool own_direct = true;
  Ids ids{};
  RouteMemory route{};
  SmallLayout small{};
  std::array<SmallLane, kSmallLanes> lanes{};
};

struct CombineTask {
  Common common{};
  RouteMemory route{};
  // The expert output, where it does not lie in the window already.
  const std::byte* from = nullptr;
  std::int64_t from_block_stride = 0;
  std::int64_t from_row_stride = 0;
  std::int64_t row_bytes = 0;  // of a row on the wire
  int unit = 1;
  bool staged = false;
  bool ends_views = false;   // nothing of the dispatch's rows is read any more
  bool reads_views = false;  // only staging does, and ends them
  std::byte* output = nullptr;
  std::int64_t output_stride = 0;
  std::array<const std::byte*, 2> bias{};
  std::array<std::int64_t, 2> bias_stride{};
  Dtype from_dtype = Dtype::kBf16;
  Dtype rows_dtype = Dtype::kBf16;  // on the wire
  Dtype output_dtype = Dtype::kBf16;
  std::int64_t hidden = 0;
  std::int64_t row_limit = 0;  // final places: rows of the dispatch that this rank kept
  std::int64_t most_rows = 0;  // that this rank may have for one origin
  bool stages_rest = false;    // something comes with the rows, wherever they lie
  bool repeats = false;        // another combine may be before this one without a dispatch between
  SmallLayout small{};
  SmallWork work{};
  int tokens_per_rank = 0;
  int row_lines = 0;     // of a row of a small round
  bool casts = false;    // of a small round: to the wire's dtype
  bool words = false;    // and expert output is whole words of 8 bytes, at such addresses
  bool biased = false;   // and there is a bias
  bool vectors = false;  // rows, biases and output may be accessed by units of 16 bytes of the wire; small: of words
  bool sends = true;
  bool receives = true;
};

}  // namespace tokenyard::engine::cuda
