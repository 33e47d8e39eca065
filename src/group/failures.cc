// SPDX-License-Identifier: Apache-2.0
#include "group/failures.h"

#include <algorithm>

#include "group/gather_ledger.h"

namespace tokenyard::group {

std::string name_ranks(std::span<const int> ranks) {
  constexpr std::size_t kMaxNamed = 16;
  if (ranks.empty()) return "no rank";
  if (ranks.size() == 1) return "rank " + std::to_string(ranks[0]);
  const std::size_t named = std::min(ranks.size(), kMaxNamed);
  std::string text = "ranks ";
  for (std::size_t i = 0; i < named; ++i) {
    const bool last = i + 1 == ranks.size();
    if (i > 0) text += last ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  if (named < ranks.size()) text += " and " + std::to_string(ranks.size() - named) + " more";
  return text;
}

Error timeout_error(const std::string& what, int rank, std::chrono::milliseconds waited, std::span<const int> missing) {
  return {ErrorCode::kTimeout,
          "rank " + std::to_string(rank) + ": " + what + " waited " + std::to_string(waited.count()) + " ms for " +
              name_ranks(missing) + ", which did not come",
          rank, missing.empty() ? -1 : missing.front()};
}

Error peer_lost_error(int rank, int peer) {
  return {ErrorCode::kPeerLost,
          "rank " + std::to_string(rank) + ": rank " + std::to_string(peer) +
              " left the group or died; no collective works without it",
          rank, peer};
}

Error too_far_ahead_error(int rank, std::span<const int> behind) {
  return {ErrorCode::kInvalidState,
          "rank " + std::to_string(rank) + ": " + std::to_string(kMaxCollectivesAhead) +
              " collectives still wait for " + name_ranks(behind) + "; no more are started until it comes",
          rank, behind.empty() ? -1 : behind.front()};
}

}  // namespace tokenyard::group
