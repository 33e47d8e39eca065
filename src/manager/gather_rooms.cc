// SPDX-License-Identifier: Apache-2.0
#include "manager/gather_rooms.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <utility>

#include "tokenyard/error.h"

#include "communication/agreement.h"
#include "engine/engine.h"
#include "protocol/layout.h"

namespace tokenyard::manager {
namespace {

// Steps that need ever more rows find room most of the time: windows grow to powers of two.
std::int64_t rounded_up(std::int64_t tokens) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(tokens)));
}

int as_int(std::int64_t value, const std::string& what) {
  if (value <= std::numeric_limits<int>::max()) return static_cast<int>(value);
  throw Error(ErrorCode::kInvalidArgument, std::to_string(value) + " " + what + "; at most " +
                                               std::to_string(std::numeric_limits<int>::max()) + " are supported");
}

}  // namespace

Room* GatherRooms::find(const Group& group, const RowKind& kind) const {
  const auto found = std::ranges::find_if(rooms_, [&](const auto& room) {
    return room->communication && room->group.nonce() == group.nonce() && room->kind == kind;
  });
  return found == rooms_.end() ? nullptr : found->get();
}

Room* GatherRooms::latest(const Group& group) const {
  const bool same = latest_ != nullptr && latest_->communication && latest_->group.nonce() == group.nonce();
  return same ? latest_ : nullptr;
}

bool GatherRooms::must_grow(const Group& group, const RowKind& kind, std::int64_t tokens, std::int64_t extra) const {
  const Room* room = find(group, kind);
  return room == nullptr || tokens > room->max_tokens || extra > room->extra_bytes;
}

Room& GatherRooms::ready(const Group& group, const RowKind& kind, std::int64_t tokens, std::int64_t extra) {
  Room* room = find(group, kind);
  if (room == nullptr) {
    // What failed to be made leaves no communication and no place in the list.
    std::erase_if(rooms_, [](const auto& other) { return !other->communication; });
    latest_ = nullptr;
    auto made = std::make_unique<Room>(group, kind);
    grow(*made, std::max<std::int64_t>({tokens, options_.params.max_tokens_per_rank, 1}),
         std::max(extra, options_.config.extra_payload_bytes_per_token));
    room = rooms_.emplace_back(std::move(made)).get();
  } else if (tokens > room->max_tokens || extra > room->extra_bytes) {
    grow(*room, tokens > room->max_tokens ? rounded_up(tokens) : room->max_tokens, std::max(extra, room->extra_bytes));
  }
  latest_ = room;
  return *room;
}

// Collective; never two windows at once. But where a caller may be writing to this one for the next combine, it stays
// on this rank until then.
Status GatherRooms::end_window(Room& room) {
  room.result = {};
  room.open = false;
  Status status;
  if (room.given) {
    try {
      room.group.barrier();
    } catch (const Error& error) {
      status = communication::status_of(error, room.group.rank(), Phase::kDestroy);
    }
    room.replaced.push_back(std::move(*room.communication));
    room.given = false;
  } else {
    status = room.communication->destroy();
    room.replaced.clear();  // the combines that they were given for have run
  }
  room.communication.reset();
  return status;
}

// On a GPU the combine is only enqueued, and reads what was given out.
void GatherRooms::end_combine(Room& room) const {
  room.given = false;
  if (device().kind == DeviceKind::kCpu) room.replaced.clear();
}

Device GatherRooms::device() const {
  const DeviceKind kind = engine::find_engine(options_.communication.engine).memory;
  return {kind, kind == DeviceKind::kCpu ? 0 : options_.communication.device};
}

void GatherRooms::make_memory(Room& room, std::int64_t tokens) const {
  constexpr std::int64_t kAlignment = 256;
  const std::int64_t marks = protocol::align_up(tokens, kAlignment);
  const std::int64_t all = protocol::align_up(tokens * room.group.num_ranks(), kAlignment);
  const std::int64_t output = options_.communication.allocate_output
                                  ? 0
                                  : tokens * room.kind.hidden * static_cast<std::int64_t>(size_of(room.kind.dtype));
  const std::int64_t bytes = marks + all + output;
  room.memory = {};
  if (device().kind == DeviceKind::kCpu) {
    room.memory.host.resize((static_cast<std::size_t>(bytes) + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t));
    room.marks = reinterpret_cast<std::byte*>(room.memory.host.data());
  } else {
    room.memory.device = fabric::find_fabric(device().kind).allocate({.bytes = bytes, .device = device()});
    room.marks = room.memory.device->own();
  }
  room.marks_of_all = room.marks + marks;
  room.output = room.marks_of_all + all;
}

void GatherRooms::grow(Room& room, std::int64_t tokens, std::int64_t extra) const {
  std::optional<Error> failure;
  // Ids are cargo, so nobody looks at experts.
  MoeParams params{.num_experts = 1, .top_k = 1, .dtype = room.kind.dtype};
  const AllGatherConfig config{.extra_payload_bytes_per_token = extra};
  try {
    params.hidden_size = as_int(room.kind.hidden, "elements in a row");
    params.max_tokens_per_rank = as_int(tokens, "tokens of one rank");
    (void)window_bytes(params, config, room.group.num_ranks());
    if (room.communication && room.communication->captured()) {
      throw Error(ErrorCode::kInvalidState,
                  std::to_string(tokens) + " tokens of a rank and " + std::to_string(extra) +
                      " bytes of cargo a token are more than the window has room for, and it cannot be replaced once a "
                      "CUDA graph holds its addresses; set ManagerOptions::params.max_tokens_per_rank to the largest "
                      "step before the first capture",
                  room.group.rank());
    }
  } catch (const Error& error) {
    failure = error;
  }
  if (failure) communication::gather_texts(room.group, "", failure);
  if (room.communication) {
    // Asked before anything goes, so that those who disagree keep what they have.
    communication::Fields fields = communication::fields_of(params);
    fields.emplace_back("extra_payload_bytes_per_token", std::to_string(extra));
    communication::require_equal(communication::gather_texts(room.group, communication::joined(fields)),
                                 room.group.rank());
    const Status status = end_window(room);
    if (!status.ok()) {
      throw Error(ErrorCode::kPeerFailed, "a window could not be replaced by a larger one: " + status.message(),
                  room.group.rank(), status.fault.peer);
    }
  }
  // Creation compares the sizes and tells everybody of a failure.
  room.communication = create_communication(room.group, params, config, options_.communication);
  std::optional<Error> no_memory;
  try {
    make_memory(room, tokens);
  } catch (const Error& error) {
    no_memory = error;
  } catch (const std::exception& exception) {
    no_memory = Error(ErrorCode::kSystem, exception.what(), room.group.rank());
  }
  try {
    communication::gather_texts(room.group, "", no_memory);
  } catch (...) {
    room.communication.reset();
    throw;
  }
  room.max_tokens = tokens;
  room.extra_bytes = extra;
}

bool GatherRooms::initialized() const {
  return std::ranges::any_of(rooms_, [](const auto& room) { return room->communication.has_value(); });
}

Status GatherRooms::destroy() {
  Status status;
  for (const auto& room : rooms_) {
    end_combine(*room);
    if (!room->communication) continue;
    const Status one = room->communication->destroy();
    if (status.ok()) status = one;
    room->replaced.clear();
  }
  return status;
}

}  // namespace tokenyard::manager
