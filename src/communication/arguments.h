// SPDX-License-Identifier: Apache-2.0
// Checks of everything a caller passes, before any traffic. Each function throws tokenyard::Error with the values and
// what would be right, and has no other effect on failure.
#pragma once

#include "tokenyard/communication.h"

#include "communication/handle.h"
#include "communication/limits.h"

namespace tokenyard::communication {

void check_dispatch_options(const Limits& limits, const DispatchInput& input, const DispatchOptions& options);

// The caller's running statistics, which either half of a dispatch may be given.
void check_statistics(const Limits& limits, const DispatchOptions& options);

// Fills the request, kinds and planes of `route`. `replay` is the round to take the route from, or null.
void prepare_dispatch(const Limits& limits,
                      const DispatchInput& input,
                      const DispatchOptions& options,
                      const engine::Round* replay,
                      Route& route);

[[nodiscard]] engine::CombineRequest prepare_combine(const Limits& limits,
                                                     const CombineInput& input,
                                                     const Route& route);

// Everything of the target but the output, which may come with the receive half.
[[nodiscard]] engine::CombineTarget prepare_target(const Limits& limits,
                                                   const CombineInput& input,
                                                   const CombineOptions& options,
                                                   const Route& route);
void check_output(const Limits& limits, const TensorView& output, const Route& route);
void check_bias_dtypes(const engine::CombineTarget& target);

// What a call may say besides, if it is what the communication was made for; 0: nothing.
void check_num_experts(const Limits& limits, int given);

// Refuses what no tensor can be: dtypes and numbers of dimensions that there are not, negative extents, sizes beyond
// any memory. Everything below and all of TensorView may then be used. A tensor that is not given is fine. `what` names
// it.
void check_tensor(const TensorView& tensor, std::string_view what);
// All of a dispatch's; nothing else may look at them before.
void check_tensors(const DispatchInput& input);

// A tensor that the library reads or writes row by row: memory of Limits::device, rows of contiguous elements, aligned,
// not null unless empty. `what` names it in messages, which are made only when something is wrong: rounds allocate
// nothing.
void check_rows(const Limits& limits, const TensorView& tensor, std::string_view what, std::int64_t num_rows);

// The same of [blocks, rows, ...], where blocks may lie between each other's rows.
void check_blocks(const Limits& limits, const TensorView& tensor, std::string_view what);

// A list of the caller's that the library writes to, or a tensor that is not given.
void check_list(
    const Limits& limits, const TensorView& tensor, std::string_view what, Dtype dtype, std::int64_t entries);

}  // namespace tokenyard::communication
