// SPDX-License-Identifier: Apache-2.0
// Calls of a communication that was made from a byte budget: the engine moves as many tokens of each rank at a time as
// the window has room for, and the rows of all sub-rounds land in one place in their final order. A call that fits is
// one round like any other, and its rows stay in the window. docs/design/0004-byte-budget.md has the reasons.
// Thread rule: as the communication's, one thread at a time.
#pragma once

#include <cstdint>
#include <optional>

#include "communication/byte_budget.h"
#include "communication/handle.h"
#include "engine/engine.h"
#include "engine/untouched_memory.h"

namespace tokenyard::communication {

class SubRounds {
 public:
  explicit SubRounds(const Budget& budget) : budget_(budget) {}

  [[nodiscard]] const Budget& budget() const { return budget_; }

  // Before any traffic: where this rank's tokens go, sub-round by sub-round. `route.request` is of the whole call.
  static void plan(engine::Engine& engine, const Route* replay, Route& route);
  // What is a dispatch_send for a call that fits; else all of the dispatch, after which the route has landed. `shown`
  // is the number of result rows when that is fixed.
  Status dispatch(engine::Engine& engine, std::optional<std::int64_t> shown, Route& route);
  // Both halves of the combine of a route with sub-rounds.
  static Status combine(engine::Engine& engine, Route& route);
  // Gives up that combine, or the one of a route without sub-rounds.
  static void abort_combine(engine::Engine& engine, const Route& route);

 private:
  void begin_landing(Route& route, int num_parts, std::optional<std::int64_t> shown);
  void land(engine::Round& part, Route& route) const;

  Budget budget_;
  engine::UntouchedMemory rows_;  // landed rows of the call in flight
  std::int64_t rows_capacity_ = 0;
};

}  // namespace tokenyard::communication
