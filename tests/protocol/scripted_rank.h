// SPDX-License-Identifier: Apache-2.0
// One rank that plays a script of rounds through the public API and checks every output bit for bit against the
// formulas. All ranks of a group play the same script. Everything throws support::CheckFailure.
// Thread rule: one thread at a time, as a communication's.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "tokenyard/communication.h"

#include "protocol/formula.h"

namespace tokenyard::protocol_tests {

enum class Act : std::uint8_t {
  kPlain,           // results are views until combine; expert output is the caller's
  kZeroCopy,        // expert output is written into combine_input()
  kDropped,         // the handle dies without a combine
  kSplit,           // four halves
  kInto,            // results in the caller's tensors
  kDispatchMisuse,  // one rank gives dispatch nonsense, all get to know, all try again
  kCombineMisuse,   // one rank gives combine nonsense; ranks without rows there notice nothing
  kHeldView,        // one rank holds a view and dispatches: refused, the view stays whole, all combine
  kMismatch,        // one rank sends weights and the others do not
  kReplay,          // high_throughput: combines twice, then replays the route with new rows, twice
  kWorstTokens,     // high_throughput: drops rows, tells their origins
  kStatistics,      // rank major: statistics of all ranks come with the rows
  kTwoInFlight,     // depth 2: two rounds at once, in halves; a third dispatch is refused
};

[[nodiscard]] std::string_view name(Act act);

// What the backend can be asked to do.
[[nodiscard]] std::vector<Act> acts_of(const Formula& formula);

struct Operation {
  Act act = Act::kPlain;
  int culprit = 0;
  std::uint64_t number = 0;  // of its formulas; operation `number + 1`, `number + 2` are its replays'
};

// `length` operations drawn from the formula's seed, with numbers that do not meet.
[[nodiscard]] std::vector<Operation> draw_script(const Formula& formula, int length);

class ScriptedRank {
 public:
  // Collective. `pause` is called between reads and writes of the test, where time may pass.
  ScriptedRank(const Group& group,
               const Formula& formula,
               const CommunicationOptions& options,
               std::function<void()> pause);

  void play(const Operation& operation);
  void destroy();

 private:
  // The route of one operation with the rows of another.
  struct Numbers {
    std::uint64_t route = 0;
    std::uint64_t rows = 0;
  };

  struct Row {
    int source = 0;
    std::int64_t token = 0;
    std::int64_t index = 0;  // among the result's rows
    int expert = -1;         // expert major: its number among all
  };

  void play_round(const Operation& operation);
  void play_replay(const Operation& operation);
  void play_dispatch_misuse(const Operation& operation);
  void play_held_view(const Operation& operation);
  void play_mismatch(const Operation& operation);
  void play_combine_misuse(const Operation& operation);
  void play_two_in_flight(const Operation& operation);

  void fill_input(const Numbers& numbers);
  void scribble_input();
  void dispatch(const Numbers& numbers, Act act, const Handle* replay, DispatchResult& result);
  void check_result(const Numbers& numbers, bool with_ids, const DispatchResult& result);
  void check_rows(const Numbers& numbers, bool with_ids, const DispatchResult& result);
  void check_unused_ids(std::uint64_t route, const TensorView& ids) const;
  void check_counts(std::uint64_t route, const RowCounts& counts) const;
  void check_ids(std::uint64_t route, const Row& row, const std::int32_t* ids) const;
  void check_experts(const Numbers& numbers, const DispatchResult& result) const;
  void check_statistics(std::uint64_t rows, const TensorView& statistics) const;
  void add_expert_rows(std::uint64_t route, int expert, std::int64_t index, std::vector<Row>& rows) const;
  // What this rank receives and keeps, in the result's order.
  [[nodiscard]] std::vector<Row> received_rows(std::uint64_t route) const;

  void combine(const Numbers& numbers, Act act, DispatchResult& result);
  TensorView expert_output(const Numbers& numbers, bool zero_copy, const Handle& handle);
  CombineInput combine_input(const Numbers& numbers, bool zero_copy, const Handle& handle);
  TensorView weights_view(const Numbers& numbers);
  [[nodiscard]] float expected_sum(const Numbers& numbers, int owner, std::int64_t token, std::int64_t column) const;
  void check_output(const Numbers& numbers);
  [[nodiscard]] std::int64_t result_rows(std::uint64_t route) const;
  [[nodiscard]] std::int64_t tokens_per_rank(std::uint64_t route) const;
  // Row of a token among those that its receiver orders by (source, token).
  [[nodiscard]] std::int64_t row_at(std::uint64_t route, int source, std::int64_t token, int rank) const;

  [[nodiscard]] TensorView output_view(std::uint64_t route);

  // Experts that answer for themselves, and not for their rank, have values of their own.
  static constexpr int kExpertOwner = 1000;

  Formula formula_;
  int rank_;
  std::function<void()> pause_;
  Communication communication_;
  DispatchResult result_, replayed_, into_;
  std::int64_t worst_tokens_ = -1;  // of the operation under way; -1: none
  std::vector<std::uint32_t> hidden_, hidden_into_;
  std::vector<std::int32_t> ids_, ids_into_;
  std::vector<float> weights_, expert_output_, output_;
  std::vector<std::int32_t> statistics_;
  DispatchInput input_;
};

}  // namespace tokenyard::protocol_tests
