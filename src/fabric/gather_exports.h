// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other about their windows, the same plain struct from every rank.
// Thread rule: collective; called by one thread of each rank.
#pragma once

#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "tokenyard/error.h"
#include "tokenyard/group.h"

namespace tokenyard::fabric {

// Every rank's struct in rank order. Throws kMismatch naming a rank that brought something else.
template <class Export>
[[nodiscard]] std::vector<Export> gather_exports(const Group& group,
                                                 const Export& mine,
                                                 std::chrono::milliseconds deadline) {
  static_assert(std::is_trivially_copyable_v<Export>);
  const std::vector<Bytes> gathered = group.all_gather(std::as_bytes(std::span(&mine, 1)), deadline);
  std::vector<Export> exports(gathered.size());
  for (std::size_t rank = 0; rank < gathered.size(); ++rank) {
    if (gathered[rank].size() != sizeof(Export)) {
      throw Error(ErrorCode::kMismatch,
                  "rank " + std::to_string(rank) + " described its window in " + std::to_string(gathered[rank].size()) +
                      " bytes instead of " + std::to_string(sizeof(Export)) +
                      "; do all ranks run the same build, with windows of one fabric?",
                  group.rank(), static_cast<int>(rank));
    }
    std::memcpy(&exports[rank], gathered[rank].data(), sizeof(Export));
  }
  return exports;
}

}  // namespace tokenyard::fabric
