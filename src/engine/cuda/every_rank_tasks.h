// SPDX-License-Identifier: Apache-2.0
// What rounds of `every_rank` hand to their kernels: plain data, passed by value. All sizes are known to the host when
// rows go out. Of a route's memory they use
//
//   tokens_of      the tokens that each rank brought
//   rows_received  its rows in the result: as many, or the most that there may be where a device says how many
//   rows_sent      the tokens of this rank, which go to all
#pragma once

#include <array>
#include <cstdint>

#include "engine/cuda/tasks.h"

namespace tokenyard::engine::cuda {

inline constexpr std::int64_t kNoSizes = -1;  // what must agree when no sizes were given

// In pinned host memory: what the ranks' headers said, for a host that was not told their sizes.
enum class SizesState : std::uint32_t { kUnknown, kKnown, kGivenUp };

struct HostSizes {
  SizesState state;
  std::int32_t rows[kMaxRanks];  // NOLINT(modernize-avoid-c-arrays): as the device sees it
};

// What a rank's header says.
struct Announcement {
  Common common{};
  RouteMemory route{};
  std::int64_t num_tokens = 0;
  const std::int32_t* num_tokens_on_device = nullptr;  // when not null, num_tokens is the most that it may hold
  std::uint64_t digest = 0;
  std::int64_t agreed = kNoSizes;
};

struct EveryRankDispatchTask {
  Announcement said{};
  std::array<Lane, protocol::kMaxPlanes> lanes{};
  std::array<Copied, protocol::kMaxPlanes> copied{};
  int num_lanes = 0;
  int num_copied = 0;
  std::int64_t first_row = 0;    // of this rank's rows, in every rank's result
  std::int64_t num_rows = 0;     // of the result
  std::int64_t most_tokens = 0;  // of any rank
  int slices = 1;                // of a row, each moved by a block of its own
  int tokens_at_once = 1;        // in bulk: whose rows are one copy; it divides a chunk
  bool announces = true;         // the header goes out with this launch; otherwise it did before
  bool verifies = true;          // headers have yet to be compared
  bool sends = true;
  bool receives = true;
  bool releases = false;  // the whole result is the caller's, and nothing in the window is read after this
};

struct EveryRankCombineTask {
  CombineTask rows{};
  std::int64_t first_row = 0;  // of this rank's tokens among each owner's rows
};

}  // namespace tokenyard::engine::cuda
