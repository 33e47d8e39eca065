// SPDX-License-Identifier: Apache-2.0
// Decides where the outputs of a dispatch go, which the engine then writes: views of the window, the caller's tensors,
// memory of allocate_output, or this communication's own; and turns what the engine has counted into what the caller
// sees. Ids and weights of routed backends are never views of the window: peers do not write to them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tokenyard/communication.h"

#include "communication/allocation.h"
#include "communication/arguments.h"
#include "communication/handle.h"
#include "protocol/layout.h"

namespace tokenyard::communication {

class Received {
 public:
  // Both are kept by reference, and may change with the calls.
  Received(const Limits& limits, const protocol::WindowLayout& layout, engine::Engine& engine);

  struct Outcome {
    std::int64_t needed_rows = 0;  // > 0: the caller's tensors are too small, and there are no outputs
    bool has_views = false;        // some output is memory of this communication
  };

  // Between the send half and the receive half: sets the tensors of `result`, and `route.request.outputs` for the
  // engine.
  Outcome place(Route& route, const DispatchOptions& options, const Allocate& allocate, DispatchResult& result);
  // After the receive half: the rest of `result` but the handle, and the caller's running statistics.
  void finish(Route& route, const DispatchOptions& options, DispatchResult& result) const;

  // [num_local_experts, rows, hidden] to write expert output into; ordinary memory, which lasts as long as the round.
  [[nodiscard]] TensorView combine_buffer(const Route& route, Dtype dtype) const;

  // Checks the caller's tensors before any traffic: kinds, and room where it is known by then.
  void check_into(const Route& route, const DispatchOptions& options) const;

 private:
  // For ids and weights of this many rows.
  void make_room(std::int64_t rows);

  [[nodiscard]] bool blocked() const { return protocol::space_per_source(limits_.plan.spec.placement); }

  [[nodiscard]] bool by_expert() const { return protocol::by_expert(limits_.plan.spec.placement); }

  // Results whose addresses never move: what is not the caller's is a view, whatever allocate_output is.
  [[nodiscard]] bool views_only() const { return limits_.plan.spec.placement == protocol::Placement::kRankMajor; }

  // Whether results have the plane at all; by expert the routing is told in other words.
  [[nodiscard]] bool shows(int plane) const;
  [[nodiscard]] bool own_copy(int plane) const;
  [[nodiscard]] std::int64_t rows_shown(const Route& route) const;
  [[nodiscard]] TensorView shaped(const PayloadKind& kind, const engine::OutputPlane& places, const Route& route) const;
  [[nodiscard]] TensorView window_view(const Route& route, int plane) const;
  [[nodiscard]] engine::OutputPlane own_places(const Route& route, int plane);
  TensorView place_plane(Route& route, int plane, const TensorView& into, const Allocate& allocate);
  void check_room(const TensorView& into, const Route& route, bool blocks, std::string_view label) const;

  // Of outputs by plane; extras follow.
  static TensorView& output_of(DispatchResult& result, int plane);
  static TensorView wanted(const DispatchOptions& options, int plane);

  // received_experts.cc
  void make_expert_buffers();
  [[nodiscard]] engine::OutputPlane expert_places(const Route& route, int plane) const;
  void finish_experts(Route& route, const DispatchOptions& options, DispatchResult& result) const;

  // received_counts.cc
  void fill_counts(const Route& route, RowCounts& counts) const;
  [[nodiscard]] TensorView on_device(std::int32_t* counts, std::int64_t entries) const;  // of each rank
  void tell_device_counts(const engine::Round& round, RowCounts& counts) const;
  void check_stats_into(const Route& route, const TensorView& stats) const;
  TensorView place_stats(Route& route, const DispatchOptions& options);

  const Limits& limits_;
  const protocol::WindowLayout& layout_;
  engine::Engine& engine_;  // whose memory these are of
  std::int64_t room_ = 0;   // picks
  engine::Memory ids_;      // [rows, top_k] of i32 or i64
  engine::Memory weights_;  // [rows, top_k] of at most 4 bytes
  engine::Memory stats_;    // [num_ranks, stats_entries] i32
  bool has_views_ = false;  // of the result that is being placed

  struct ExpertBuffer {
    engine::Memory rows;     // the planes of all experts' rows
    engine::Memory combine;  // what the experts make of them
  };

  std::vector<ExpertBuffer> expert_buffers_;  // one for every round in flight
  std::int64_t combine_stride_ = 0;
};

}  // namespace tokenyard::communication
