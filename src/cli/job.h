// SPDX-License-Identifier: Apache-2.0
// The main job: a layer's tokens through one backend. Each rank dispatches its share of the tokens, runs its own
// experts on what it received, and combines; the sums are compared with the layer's expected output. Thread rule: call
// from the main thread. JobMemory is written by all ranks at once, each in its own part.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "tokenyard/backends.h"

#include "cli/engine_choice.h"
#include "cli/moe_layer.h"
#include "cli/ranks.h"
#include "system/segment.h"

namespace tokenyard::cli {

enum class DispatchDtype : std::uint8_t { kBf16, kFp8 };

[[nodiscard]] std::string_view name(DispatchDtype dtype);

// Relative errors up to this are right: what rounding rows to the wire's dtype may cost on this layer.
[[nodiscard]] double error_limit(DispatchDtype dtype);

struct JobOptions {
  int num_ranks = 8;
  RankKind rank_kind = RankKind::kThreads;
  DispatchDtype dispatch_dtype = DispatchDtype::kBf16;
  // Tokens of its share that a rank dispatches at most.
  std::int64_t max_tokens_per_rank = std::numeric_limits<std::int64_t>::max();
  int num_threads = 1;
  int num_rounds = 3;
  EngineChoice engine{};
};

// Medians over the rounds of the slowest rank's time, in microseconds.
struct PhaseTimes {
  double dispatch_us = 0;
  double expert_us = 0;
  double combine_us = 0;
};

struct JobReport {
  double relative_error = 0;
  PhaseTimes times{};
  std::vector<std::int64_t> rows_per_rank;  // rows that each rank received
  std::vector<std::uint16_t> output;        // bf16 [tokens dispatched, hidden], in the layer's order
  std::int64_t num_tokens = 0;
};

// What ranks leave behind, in memory that forked ranks share.
class JobMemory {
 public:
  JobMemory(const MoeLayer& layer, const JobOptions& options);

  // The tokens of the layer that a rank dispatches.
  [[nodiscard]] TokenRange tokens(int rank) const { return tokens_[static_cast<std::size_t>(rank)]; }

  // [tokens(rank).count, hidden] bf16
  [[nodiscard]] TensorView output(int rank) const;
  [[nodiscard]] std::int64_t& rows_received(int rank) const;
  [[nodiscard]] PhaseTimes& times(int rank, int round) const;
  [[nodiscard]] std::int64_t largest_share() const;

 private:
  std::vector<TokenRange> tokens_;
  int num_rounds_;
  int hidden_size_;
  std::int64_t times_offset_ = 0;
  std::int64_t output_offset_ = 0;
  system::Segment segment_;
};

// Throws the Error of the rank that failed first.
[[nodiscard]] JobReport run_job(const BackendInfo& backend, const MoeLayer& layer, const JobOptions& options);

}  // namespace tokenyard::cli
