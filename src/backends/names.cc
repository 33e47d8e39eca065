// SPDX-License-Identifier: Apache-2.0
// The words of contracts, for tables and JSON.
#include "tokenyard/backends.h"

namespace tokenyard {

std::string_view name(OutputLayout value) {
  switch (value) {
    case OutputLayout::kNone:
      return "none";
    case OutputLayout::kEveryRank:
      return "every_rank";
    case OutputLayout::kCompact:
      return "compact";
    case OutputLayout::kRankMajor:
      return "rank_major";
    case OutputLayout::kExpertMajor:
      return "expert_major";
  }
  return "unknown";
}

std::string_view name(IdSpace value) {
  switch (value) {
    case IdSpace::kCargo:
      return "cargo";
    case IdSpace::kGlobal:
      return "global";
    case IdSpace::kLocal:
      return "local";
  }
  return "unknown";
}

std::string_view name(WeightRule value) {
  switch (value) {
    case WeightRule::kNone:
      return "none";
    case WeightRule::kCaller:
      return "caller";
    case WeightRule::kCombine:
      return "combine";
  }
  return "unknown";
}

std::string_view name(Reduction value) {
  return value == Reduction::kSumOverRanks ? "sum_over_ranks" : "none";
}

std::string_view name(HandleUse value) {
  switch (value) {
    case HandleUse::kNone:
      return "none";
    case HandleUse::kOnce:
      return "once";
    case HandleUse::kReplay:
      return "replay";
  }
  return "unknown";
}

std::string_view name(Ownership value) {
  switch (value) {
    case Ownership::kNone:
      return "none";
    case Ownership::kView:
      return "view";
    case Ownership::kViewOrOwned:
      return "view_or_owned";
  }
  return "unknown";
}

std::string_view name(CountsOn value) {
  if (value == CountsOn::kDevice) return "device";
  return value == CountsOn::kHost ? "host" : "none";
}

}  // namespace tokenyard
