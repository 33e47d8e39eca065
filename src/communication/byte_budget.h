// SPDX-License-Identifier: Apache-2.0
// Communications made from a byte budget alone: what their window is, and what a call's tensors make of it.
// Thread rule: pure functions.
#pragma once

#include "tokenyard/communication.h"

#include "communication/limits.h"

namespace tokenyard::communication {

struct Route;

// What a communication is made from.
struct Budget {
  MoeParams made_with{};  // of these only what the public header says
  BackendConfig config{};
};

// Bytes of the window, or 0 where it is sized by params.
[[nodiscard]] inline std::int64_t byte_budget_of(const Backend& backend, const BackendConfig& config) {
  return backend.byte_budget == nullptr ? 0 : backend.byte_budget(config);
}

// The plan before any call. Throws kInvalidArgument for params that no call could go with, and for a budget that has
// no room for the smallest row.
[[nodiscard]] Plan plan_of_budget(const Backend& backend, const Budget& budget, int num_ranks);

// A call as it is checked and laid out: params from its tensors, as many tokens per sub-round as the window has room
// for. `replay` is the route that is used again, or null. Throws kInvalidArgument for shapes that no call has, and
// kCapacity when not one token per rank fits, or less than the replayed route's sub-rounds need.
[[nodiscard]] Limits limits_of_call(const Limits& now,
                                    const Budget& budget,
                                    const DispatchInput& input,
                                    const DispatchOptions& options,
                                    const Route* replay);

// As far as a query of routes needs them.
[[nodiscard]] Limits limits_of_query(const Limits& now,
                                     const Budget& budget,
                                     const TensorView& topk_ids,
                                     int num_experts);

}  // namespace tokenyard::communication
