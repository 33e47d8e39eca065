// SPDX-License-Identifier: Apache-2.0
// The gather calls: whom they join, what they send, and the round that a dispatch leaves for its combine.
// Thread rule: the manager's lock guards it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "tokenyard/manager.h"

#include "manager/gather_plan.h"
#include "manager/gather_rooms.h"

namespace tokenyard::manager {

// A tensor under the name that messages call it by.
struct Named {
  std::string_view name;
  const TensorView* tensor;
};

struct CombineChoice {
  bool sequence_parallel = false;
  bool into = false;  // the output is the caller's
  Stream stream{};
};

class GatherState {
 public:
  GatherState(GatherPlan plan, RoomOptions options) : plan_(std::move(plan)), rooms_(std::move(options)) {}

  void set_step_num_tokens(std::span<const std::int64_t> num_tokens) { plan_.set_step(num_tokens); }

  // Gathers hidden_states, `with` and the options' extras, in this order, into result->hidden_states, `with_results`
  // and result->extra_tensors.
  Status dispatch(const TensorView& hidden_states,
                  std::span<const Named> with,
                  const GatherOptions& options,
                  std::span<TensorView* const> with_results,
                  GatherResult& result);
  Status combine(const TensorView& hidden_states, TensorView& output, const CombineChoice& choice);
  [[nodiscard]] TensorView allocate_combine_input(std::int64_t num_rows, const RowKind& kind, bool sequence_parallel);

  [[nodiscard]] bool initialized() const { return rooms_.initialized(); }

  Status destroy() { return rooms_.destroy(); }

  void abandon() { rooms_.abandon(); }

 private:
  // What a call turns out to need.
  struct Call {
    const Group* group = nullptr;
    std::optional<RowKind> kind{};
    std::span<const std::int64_t> sizes{};  // of each rank; empty: not known yet
    std::int64_t extra_bytes = 0;
    Stream stream{};
  };

  void read_dispatch(const TensorView& hidden_states,
                     std::span<const Named> with,
                     const GatherOptions& options,
                     Call& call);
  void read_combine(const TensorView& hidden_states, Call& call);
  [[nodiscard]] RowKind kind_of(const TensorView& hidden_states) const;
  Room& ready(const Call& call);
  // Lets the others know that this rank does not come, wherever they are by now.
  void announce(const Call& call, bool combining, const Error& error);
  [[nodiscard]] static bool holds_round(const Room& room, std::span<const std::int64_t> sizes);
  Status open_round(Room& room, const Call& call) const;
  [[nodiscard]] TensorView output_memory(const Room& room, std::int64_t rows) const;
  [[nodiscard]] TensorView on_device(void* data, Dtype dtype, std::initializer_list<std::int64_t> shape) const;

  GatherPlan plan_;
  GatherRooms rooms_;
};

}  // namespace tokenyard::manager
