// SPDX-License-Identifier: Apache-2.0
// The sample of the conformance space: every backend, rank kind and number of ranks, each with several draws of the
// other dimensions. The draws are fixed, so a scenario's name always means the same test.
// Thread rule: pure functions.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "support/backends.h"
#include "support/rng.h"
#include "support/run_ranks.h"

namespace tokenyard::support {

struct Scenario {
  std::string backend;
  RankKind rank_kind = RankKind::kThreads;
  WorldSpec spec{};
  RoundPlan plan{};
  std::uint32_t initial_epoch = 0;
  int num_threads = 1;

  [[nodiscard]] std::string name() const;
};

inline std::ostream& operator<<(std::ostream& out, const Scenario& scenario) {
  return out << scenario.name();
}

// `draws` for each of backend x rank kind x {1, 2, 3, 4, 5, 7, 8} ranks.
[[nodiscard]] std::vector<Scenario> sample_scenarios(int draws);

}  // namespace tokenyard::support
