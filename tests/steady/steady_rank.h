// SPDX-License-Identifier: Apache-2.0
// One rank whose rounds are steady: all memory of the test is there before the first, so what a round allocates or asks
// of the system is the library's doing.
// Thread rule: one thread at a time, as a communication's.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "tokenyard/communication.h"

#include "support/tensor.h"
#include "support/world.h"

namespace tokenyard::steady_tests {

enum class Variant : std::uint8_t {
  kViews,     // results are views, expert output is the caller's
  kZeroCopy,  // expert output lies in combine_input()
  kSplit,     // four halves
  kReplay,    // high_throughput: every round after the first takes its route from a handle
  kInto,      // results in the caller's tensors
  kTurns,     // two communications that share what their backend lets them share, round about
};

struct SteadyCase {
  std::string_view backend;
  Variant variant = Variant::kViews;
  int num_ranks = 2;
  int num_threads = 1;
  std::int64_t max_tokens = 70;
  std::int64_t budget_bytes = 0;  // high_throughput: made from these alone
};

// Budgets through which the tokens go at once, and in several sub-rounds.
inline constexpr std::int64_t kWholeBudget = 1 << 20;
inline constexpr std::int64_t kCutBudget = 100'000;

[[nodiscard]] std::string name(const SteadyCase& value);
std::ostream& operator<<(std::ostream& out, const SteadyCase& value);
[[nodiscard]] bool possible(const SteadyCase& value);

class SteadyRank {
 public:
  // Collective. Rows of bf16 with ids and weights, and with extra payloads and statistics where the backend takes them.
  SteadyRank(const Group& group, const SteadyCase& steady_case);

  // One round. A status that is not ok gives false: nothing here may allocate.
  [[nodiscard]] bool play();
  void destroy();

 private:
  [[nodiscard]] bool dispatch();
  [[nodiscard]] bool combine();

  SteadyCase case_;
  support::World world_;
  support::RankTensors tensors_;
  Communication communication_;
  std::optional<Communication> next_;  // kTurns: whose turn is next
  DispatchInput input_, replay_input_;
  DispatchOptions options_;
  DispatchResult first_, result_, into_;
  support::Tensor expert_output_, output_, hidden_into_, ids_into_, weights_into_;
  bool routed_ = false;  // kReplay: `first_` holds the route
};

}  // namespace tokenyard::steady_tests
