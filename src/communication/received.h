// SPDX-License-Identifier: Apache-2.0
// Turns what lies in the window after a dispatch into what the caller sees: views, copies, ids in the contract's id
// space, counts. Ids and weights of routed backends are this rank's own copies; peers never write to them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tokenyard/communication.h"

#include "communication/allocation.h"
#include "communication/arguments.h"
#include "communication/handle.h"
#include "communication/received_rows.h"
#include "engine/untouched_memory.h"
#include "protocol/layout.h"

namespace tokenyard::communication {

class Received {
 public:
  Received(const Limits& limits, const protocol::WindowLayout& layout, std::byte* window);

  // The limits and the layout that it was made with have changed.
  void reshape();

  struct Outcome {
    std::int64_t needed_rows = 0;  // > 0: the caller's tensors are too small, and nothing was copied
    bool has_views = false;        // some output is memory of this communication
  };

  // Fills everything of `result` but the handle.
  Outcome fill(Route& route, const DispatchOptions& options, const Allocate& allocate, DispatchResult& result);

  // Expert major, before the receive half: chooses the memory that rows are copied to, and tells the engine.
  void place_expert_rows(Route& route,
                         const DispatchOptions& options,
                         const Allocate& allocate,
                         DispatchResult& result);
  // [num_local_experts, rows, hidden] to write expert output into; ordinary memory, which lasts as long as the round.
  [[nodiscard]] TensorView combine_buffer(const Route& route, Dtype dtype) const;

  // Checks the caller's tensors before any traffic: kinds, and room where it is known by then.
  void check_into(const Route& route, const DispatchOptions& options) const;

 private:
  // For ids and weights of this many rows.
  void make_room(std::int64_t rows);

  [[nodiscard]] bool blocked() const { return protocol::space_per_source(limits_.plan.spec.placement); }

  // Results whose addresses never move: what is not the caller's is a view, whatever allocate_output is.
  [[nodiscard]] bool views_only() const { return limits_.plan.spec.placement == protocol::Placement::kRankMajor; }

  [[nodiscard]] bool own_copy(int plane) const;
  [[nodiscard]] std::int64_t rows_shown(const Route& route) const;
  [[nodiscard]] const std::byte* window_row(const Route& route, int plane, std::int64_t source, std::int64_t row) const;
  [[nodiscard]] TensorView shaped(const PayloadKind& kind,
                                  const RowPlaces& places,
                                  const Route& route,
                                  std::int64_t rows) const;
  [[nodiscard]] TensorView window_view(const Route& route, int plane, std::int64_t rows) const;
  [[nodiscard]] TensorView own_view(const Route& route, int plane, std::int64_t rows);
  TensorView place(const Route& route, int plane, std::int64_t rows, const TensorView& into, const Allocate& allocate);
  void check_room(const TensorView& into, const Route& route, bool blocks, std::string_view label) const;
  void copy_rows(const Route& route, int plane, const TensorView& to) const;

  // Of outputs by plane; extras follow.
  static TensorView& output_of(DispatchResult& result, int plane);
  static TensorView wanted(const DispatchOptions& options, int plane);
  static std::int64_t bytes_of_row(const PayloadKind& kind);

  // received_experts.cc
  void make_expert_buffers();
  Outcome fill_experts(Route& route, const DispatchOptions& options, DispatchResult& result);

  // received_ids.cc
  void fill_ids(const Route& route, const TensorView& ids, std::int64_t rows);
  void fill_weights(const Route& route, const TensorView& weights, std::int64_t rows) const;
  void clear_ids(const Route& route, const TensorView& ids, std::int64_t rows);
  [[nodiscard]] std::int64_t shown_id(std::int32_t wire_id) const;
  void count_experts(const Route& route, RowCounts& counts);
  void fill_counts(const Route& route, RowCounts& counts);
  void check_stats_into(const Route& route, const TensorView& stats) const;
  void fill_stats(const Route& route, const DispatchOptions& options, TensorView& stats);

  const Limits& limits_;
  const protocol::WindowLayout& layout_;
  std::byte* window_;
  int first_expert_ = 0;
  int num_experts_ = 0;
  std::vector<std::byte> ids_;      // [rows, top_k] of i32 or i64
  std::vector<std::byte> weights_;  // [rows, top_k] of at most 4 bytes
  std::vector<std::int32_t> stats_;
  // Rank major: how far ids_ holds other things than invalid ids, per source, and in which dtype.
  std::vector<std::int64_t> filled_;
  Dtype filled_dtype_ = Dtype::kI32;
  std::vector<std::int64_t> last_row_;  // [num local experts]: the row that was counted last
  bool has_views_ = false;              // of the fill that is running

  struct ExpertBuffer {
    engine::UntouchedMemory rows;     // the planes of all experts' rows
    engine::UntouchedMemory combine;  // what the experts make of them
  };

  std::vector<ExpertBuffer> expert_buffers_;  // one for every round in flight
  std::int64_t combine_stride_ = 0;
};

}  // namespace tokenyard::communication
