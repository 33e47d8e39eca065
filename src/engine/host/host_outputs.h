// SPDX-License-Identifier: Apache-2.0
// Writes the outputs of a dispatch whose rows are here, for results that are not by expert: copies of rows, ids in the
// contract's id space, weights, gathered statistics, and the rows of each expert. Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine.h"
#include "engine/host/window_view.h"

namespace tokenyard::engine::host {

class HostOutputs {
 public:
  // `setup` is kept by reference, and may change with the engine's; `own` is this rank's window.
  HostOutputs(const Setup& setup, const WindowView& own);

  void fill(const DispatchOutputs& outputs, Round& round);

 private:
  void copy_rows(const OutputPlane& to, const Round& round, int plane) const;
  void fill_ids(const DispatchOutputs& outputs, const Round& round);
  void clear_ids(const DispatchOutputs& outputs, const Round& round);
  void fill_weights(const DispatchOutputs& outputs, const Round& round) const;
  void gather_stats(const DispatchOutputs& outputs) const;
  void count_experts(Round& round);

  // Calls visit(source, row) for every row that was received and kept, in the order of (source, token), with the
  // arguments of Round::received_row.
  template <class Visit>
  void for_each_row(const Round& round, Visit&& visit) const;
  // Of the experts of this rank; -1: none of them.
  [[nodiscard]] std::int32_t local_expert(std::int32_t wire_id) const;
  [[nodiscard]] std::int64_t shown_id(std::int32_t wire_id) const;

  const Setup& setup_;
  WindowView own_;
  std::int32_t first_expert_ = 0;
  std::int32_t num_experts_ = 0;
  // Rank major: how far the communication's own ids hold other things than invalid ids, per source, and in which dtype.
  std::vector<std::int64_t> filled_;
  Dtype filled_dtype_ = Dtype::kI32;
  std::vector<std::int64_t> last_row_;  // [num local experts]: the row that was counted last
};

}  // namespace tokenyard::engine::host
