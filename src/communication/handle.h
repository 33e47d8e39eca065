// SPDX-License-Identifier: Apache-2.0
// Handles and their pool. Routes are made once and used again, so a round allocates nothing; a handle that is used up
// leaves its route to the next. The pool outlives its communication for as long as a handle lives; it then only says
// why the handle is of no use any more.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tokenyard/error.h"
#include "tokenyard/tensor.h"

#include "communication/limits.h"
#include "engine/engine.h"

namespace tokenyard::communication {

class Core;

// What a payload's rows look like to the caller.
struct PayloadKind {
  Dtype dtype = Dtype::kU8;
  int num_inner = 0;  // dimensions after the row
  std::array<std::int64_t, 2> inner{};
};

enum class RouteState : std::uint8_t {
  kFree,
  kSent,       // dispatch_send is done
  kReceived,   // dispatch_receive is done
  kCombining,  // combine_send is done
  kAborted,    // the round ended without a result
};

struct Route {
  engine::Round round;
  engine::DispatchRequest request;  // of the dispatch; pointers are dead after the half that they are for
  std::array<PayloadKind, protocol::kMaxPlanes> kinds{};
  int num_extras = 0;
  std::int64_t num_stats = 0;
  // DispatchOptions of the send half, which the receive half goes by.
  std::optional<std::int64_t> num_worst_tokens{};
  int expert_alignment = 1;
  std::int64_t rows_shown = 0;  // of the result, with the tail of num_worst_tokens
  // Results in blocks: [num_blocks, rows_per_block, ...]; a block is a source rank or an expert. 0 for others.
  std::int64_t num_blocks = 0;
  std::int64_t rows_per_block = 0;
  int buffer = 0;                  // of `Received`, where results outlive the window's rows
  std::int64_t combine_width = 0;  // elements of a row of the expert output that combine was given
  bool has_ids = false;
  bool combined = false;  // once at least, with this handle
  RouteState state = RouteState::kFree;
  std::uint64_t turn = 0;        // counts the handles that had it
  bool views_open = false;       // peers may not store to this rank's rows yet
  engine::CombineTarget target;  // between the halves of a combine

  // Made from a byte budget: the call's own limits and, of a call that went through the window in several sub-rounds,
  // each one's round. `round` then is of all together, with its rows in memory of the communication.
  Limits limits;
  std::vector<engine::Round> parts;
  int num_parts = 0;                     // 0: there is only `round`
  bool landed = false;                   // the rows were copied out of the window
  std::vector<std::int32_t> call_rows;   // [num_ranks]: rows for each rank, all sub-rounds together
  engine::CombineRequest expert_output;  // between the halves of a combine in sub-rounds
};

struct HandlePool {
  Core* core = nullptr;                    // null once the communication or its window is gone
  ErrorCode gone = ErrorCode::kDestroyed;  // why
  std::vector<std::unique_ptr<Route>> routes;
  std::vector<Route*> free;
};

}  // namespace tokenyard::communication
