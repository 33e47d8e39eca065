// SPDX-License-Identifier: Apache-2.0
#include "manager/gather_state.h"

#include <algorithm>
#include <array>
#include <string>

#include "tokenyard/error.h"

#include "communication/agreement.h"
#include "communication/allocation.h"
#include "protocol/formats.h"
#include "protocol/planes.h"

namespace tokenyard::manager {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

std::int64_t largest(std::span<const std::int64_t> sizes) {
  return sizes.empty() ? 0 : *std::ranges::max_element(sizes);
}

void require_rows(const TensorView& tensor, std::string_view what) {
  if (!tensor.defined()) refuse(std::string(what) + " is not given");
  if (tensor.num_dims != 2) refuse(std::string(what) + " is " + tensor.describe() + "; it must be [num_tokens, row]");
}

}  // namespace

// Quantised rows say nothing of the width that their layer combines; the options do.
RowKind GatherState::kind_of(const TensorView& hidden_states) const {
  if (protocol::is_wide_float(hidden_states.dtype)) return {hidden_states.shape[1], hidden_states.dtype};
  const MoeParams& params = rooms_.options().params;
  const std::int64_t room = std::int64_t{params.hidden_size} * size_of(params.dtype);
  if (hidden_states.row_bytes() <= room) return {params.hidden_size, params.dtype};
  refuse("hidden_states is " + hidden_states.describe() + ", rows of " + std::to_string(hidden_states.row_bytes()) +
         " bytes; quantised rows must fit a row of ManagerOptions::params, which says hidden_size " +
         std::to_string(params.hidden_size) + " of " + std::string(name(params.dtype)));
}

void GatherState::read_dispatch(const TensorView& hidden_states,
                                std::span<const Named> with,
                                const GatherOptions& options,
                                Call& call) {
  require_rows(hidden_states, "hidden_states");
  call.kind = kind_of(hidden_states);
  call.sizes = plan_.sizes_of_dispatch(*call.group, hidden_states.num_rows());
  for (const Named& each : with) {
    if (!each.tensor->defined()) refuse(std::string(each.name) + " is not given");
    call.extra_bytes += each.tensor->row_bytes();
  }
  if (options.extra_tensors) {
    const std::size_t most = protocol::kMaxExtraPayloads - with.size();
    if (options.extra_tensors->size() > most) {
      refuse(std::to_string(options.extra_tensors->size()) + " extra tensors; at most " + std::to_string(most) +
             " go with this call");
    }
    for (const TensorView& extra : *options.extra_tensors) {
      if (!extra.defined()) refuse("an extra tensor is not given; leave it out of the list");
      call.extra_bytes += extra.row_bytes();
    }
  }
  GatherPlan::require_own(*call.group, call.sizes, hidden_states.num_rows());
}

void GatherState::read_combine(const TensorView& hidden_states, Call& call) {
  require_rows(hidden_states, "hidden_states");
  if (!protocol::is_wide_float(hidden_states.dtype)) {
    refuse("hidden_states is " + hidden_states.describe() + "; combine sums bf16, f16 or f32");
  }
  call.kind = {hidden_states.shape[1], hidden_states.dtype};
  call.sizes = plan_.sizes_of_combine(*call.group, hidden_states.num_rows());
  GatherPlan::require_sum(call.sizes, hidden_states.num_rows());
}

void GatherState::announce(const Call& call, bool combining, const Error& error) {
  const bool grows = call.kind && rooms_.must_grow(*call.group, *call.kind, largest(call.sizes), call.extra_bytes);
  // The others compare sizes before they make a window.
  if (grows) communication::gather_texts(*call.group, "", error);
  Room* room = call.kind ? rooms_.find(*call.group, *call.kind) : rooms_.latest(*call.group);
  if (room == nullptr) return;
  const bool in_combine = combining && room->open;
  room->open = false;
  try {
    TensorView nowhere;
    DispatchResult nothing;
    if (in_combine) {
      (void)room->communication->combine(room->result.handle, {}, {.stream = call.stream}, nowhere);
    } else {
      room->result.handle = Handle();
      (void)room->communication->dispatch({}, {.stream = call.stream}, nothing);
    }
  } catch (const Error&) {  // which has told the others
  }
}

Room& GatherState::ready(const Call& call) {
  return rooms_.ready(*call.group, *call.kind, largest(call.sizes), call.extra_bytes);
}

Status GatherState::dispatch(const TensorView& hidden_states,
                             std::span<const Named> with,
                             const GatherOptions& options,
                             std::span<TensorView* const> with_results,
                             GatherResult& result) {
  Call call{.group = &plan_.group(options.sequence_parallel), .stream = options.stream};
  try {
    read_dispatch(hidden_states, with, options, call);
  } catch (const Error& error) {
    announce(call, false, error);
    throw communication::named(error, call.group->rank());
  }
  Room& room = ready(call);
  room.open = false;
  std::array<TensorView, protocol::kMaxExtraPayloads> payloads{};
  std::size_t count = 0;
  for (const Named& each : with)
    payloads[count++] = *each.tensor;
  for (const TensorView& extra : options.extra_tensors.value_or(std::span<const TensorView>{}))
    payloads[count++] = extra;
  const Status status =
      room.communication->dispatch({.hidden_states = hidden_states, .extra_payloads = std::span(payloads).first(count)},
                                   {.num_tokens_per_rank = call.sizes, .stream = call.stream}, room.result);
  if (!status.ok()) return status;
  room.open = true;
  room.sizes.assign(call.sizes.begin(), call.sizes.end());
  result.hidden_states = room.result.hidden_states;
  for (std::size_t i = 0; i < with.size(); ++i)
    *with_results[i] = room.result.extra_payloads[i];
  if (!options.extra_tensors) {
    result.extra_tensors.reset();
    return status;
  }
  if (!result.extra_tensors) result.extra_tensors.emplace();
  result.extra_tensors->assign(room.result.extra_payloads.begin() + std::ssize(with), room.result.extra_payloads.end());
  return status;
}

bool GatherState::holds_round(const Room& room, std::span<const std::int64_t> sizes) {
  return room.open && std::ranges::equal(room.sizes, sizes);
}

TensorView GatherState::on_device(void* data, Dtype dtype, std::initializer_list<std::int64_t> shape) const {
  TensorView view(data, dtype, shape);
  view.device = rooms_.device();
  return view;
}

// A combine without a dispatch of these sizes: one byte a row is sent, for the sake of the route.
Status GatherState::open_round(Room& room, const Call& call) const {
  const std::int64_t own = call.sizes[static_cast<std::size_t>(room.group.rank())];
  DispatchResult into;
  into.hidden_states = on_device(room.marks_of_all, Dtype::kU8, {room.group.num_ranks() * room.max_tokens, 1});
  room.open = false;
  const Status status = room.communication->dispatch(
      {.hidden_states = on_device(room.marks, Dtype::kU8, {own, 1})},
      {.num_tokens_per_rank = call.sizes, .into = &into, .stream = call.stream}, room.result);
  room.open = status.ok();
  room.sizes.assign(call.sizes.begin(), call.sizes.end());
  return status;
}

TensorView GatherState::output_memory(const Room& room, std::int64_t rows) const {
  const auto& allocate = rooms_.options().communication.allocate_output;
  void* memory = room.output;
  if (allocate) {
    const std::int64_t bytes = rows * room.kind.hidden * size_of(room.kind.dtype);
    memory = communication::allocate_output(allocate, bytes, rooms_.device());
  }
  return on_device(memory, room.kind.dtype, {rows, room.kind.hidden});
}

Status GatherState::combine(const TensorView& hidden_states, TensorView& output, const CombineChoice& choice) {
  Call call{.group = &plan_.group(choice.sequence_parallel), .stream = choice.stream};
  try {
    read_combine(hidden_states, call);
  } catch (const Error& error) {
    announce(call, true, error);
    throw communication::named(error, call.group->rank());
  }
  Room& room = ready(call);
  if (!holds_round(room, call.sizes)) {
    const Status status = open_round(room, call);
    if (!status.ok()) return status;
  }
  try {
    if (!choice.into) output = output_memory(room, call.sizes[static_cast<std::size_t>(call.group->rank())]);
  } catch (const Error& error) {
    announce(call, true, error);
    throw communication::named(error, call.group->rank());
  }
  room.open = false;  // used up, also when combine fails
  try {
    const Status status = room.communication->combine(room.result.handle, {.expert_output = hidden_states},
                                                      {.stream = call.stream}, output);
    rooms_.end_combine(room);
    return status;
  } catch (...) {
    rooms_.end_combine(room);
    throw;
  }
}

TensorView GatherState::allocate_combine_input(std::int64_t num_rows, const RowKind& kind, bool sequence_parallel) {
  try {
    const Group& group = plan_.group(sequence_parallel);
    const auto sizes = plan_.sizes_of_combine(group, num_rows);
    GatherPlan::require_sum(sizes, num_rows);
    const bool equal = std::ranges::adjacent_find(sizes, std::ranges::not_equal_to{}) == sizes.end();
    Room* room = rooms_.find(group, kind);
    if (!equal || room == nullptr) return {};
    const TensorView memory = room->communication->combine_input(num_rows, kind.dtype);
    room->given = room->given || memory.defined();
    return memory;
  } catch (const Error&) {
    return {};  // the call that follows says what is wrong
  }
}

}  // namespace tokenyard::manager
