// SPDX-License-Identifier: Apache-2.0
// One rank's side of a round: dispatch and combine through the public API, each checked against the plain reference.
// Everything throws CheckFailure, so it works in threads and in processes.
// Thread rule: one thread per communication, as the library's.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tokenyard/communication.h"

#include "support/reference.h"
#include "support/world.h"

namespace tokenyard::support {

struct RoundPlan {
  std::uint64_t seed = 1;  // of expert outputs and biases
  Dtype expert_dtype = Dtype::kBf16;
  Dtype output_dtype = Dtype::kBf16;
  bool strided = false;             // inputs of both phases and the output
  bool caller_tensors = false;      // DispatchOptions::into, with room to spare
  bool zero_copy = false;           // expert output is written into combine_input() where there is one
  bool flat_expert_output = false;  // rank major: [rows, hidden] instead of [ranks, tokens, hidden]
  bool special_values = true;
  bool weights_back = false;
  int num_biases = 0;
  int expert_alignment = 1;
  std::optional<std::int64_t> num_worst_tokens{};
  std::optional<std::int64_t> runtime_max_tokens{};
  bool tell_num_tokens = false;  // all_gather: num_tokens_per_rank
  DispatchCast cast = DispatchCast::kNone;
  std::function<void()> between_halves{};  // given: each phase goes in two halves, and this runs between them
  // Given: called instead of the communication's own, as where tensors go through a device's memory.
  std::function<Status(Communication&, const DispatchInput&, const DispatchOptions&, DispatchResult&)> dispatch_with{};
  std::function<Status(Communication&, Handle&, const CombineInput&, const CombineOptions&, TensorView&)>
      combine_with{};
};

// What the reference needs to know of a communication and a plan.
[[nodiscard]] LayoutRule layout_rule(const Communication& communication, const RoundPlan& plan);

// {blocks, rows of a block} of results in blocks; empty for others.
[[nodiscard]] std::vector<std::int64_t> blocks_of(const Communication& communication, const ExpectedDispatch& expected);

// Statuses other than kOk fail, with the status' own message.
void check_ok(const Status& status, const std::string& what);

// Every member of a result against the reference. `with_ids`: false on replay.
void check_result(const Communication& communication,
                  const World& world,
                  const RoundPlan& plan,
                  const DispatchResult& result,
                  bool with_ids = true);

// `memory` takes the tensors of RoundPlan::caller_tensors. Without it they die with the call, and `result` shows none
// of what lay in them.
void dispatch_and_check(Communication& communication,
                        const World& world,
                        const RoundPlan& plan,
                        DispatchResult& result,
                        std::vector<Tensor>* memory = nullptr);

// With the hash rows of `plan.seed` as expert output. Returns the output's bytes.
std::vector<std::byte> combine_and_check(Communication& communication,
                                         const World& world,
                                         const RoundPlan& plan,
                                         const DispatchResult& result,
                                         Handle& handle);

// Both. Returns the bytes of the combined output.
std::vector<std::byte> play_round(Communication& communication,
                                  const World& world,
                                  const RoundPlan& plan,
                                  DispatchResult& result);

// Every payload's bytes of a result, unused rows too: to compare runs.
[[nodiscard]] std::vector<std::byte> used_bytes(const Communication& communication,
                                                const World& world,
                                                const RoundPlan& plan,
                                                const DispatchResult& result);

// Deadlines short enough for tests, long enough for a loaded machine under a sanitizer.
[[nodiscard]] CommunicationOptions test_options();

}  // namespace tokenyard::support
