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
  struct LocalExperts {
    std::int32_t first = 0;
    std::int32_t count = 0;

    // -1: another rank's, or none.
    [[nodiscard]] std::int32_t index_of(std::int32_t wire_id) const {
      const std::int32_t index = wire_id - first;
      return wire_id >= 0 && index >= 0 && index < count ? index : -1;
    }
  };

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
  [[nodiscard]] LocalExperts local_experts() const;

  const Setup& setup_;
  WindowView own_;
  // Rank major: how far the communication's own ids hold other things than invalid ids, per source, and in which dtype.
  std::vector<std::int64_t> filled_;
  Dtype filled_dtype_ = Dtype::kI32;
  std::vector<std::int64_t> last_row_;  // [num local experts]: the row that was counted last
};

}  // namespace tokenyard::engine::host
