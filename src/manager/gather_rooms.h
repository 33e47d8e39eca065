// SPDX-License-Identifier: Apache-2.0
// The communications of the gather calls: one for each group, width and dtype of rows, made on first use and grown when
// a step needs more.
// Thread rule: the manager's lock guards them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tokenyard/communication.h"

#include "fabric/window.h"

namespace tokenyard::manager {

// What a window starts with.
struct RoomOptions {
  MoeParams params{};
  AllGatherConfig config{};
  CommunicationOptions communication{};
};

// Rows of `hidden` elements. Weights, ids, logits and extras all travel as extra payloads: their shapes and dtypes are
// the layer's affair, and layers that differ in them share a window.
struct RowKind {
  std::int64_t hidden = 0;
  Dtype dtype = Dtype::kBf16;

  friend bool operator==(const RowKind&, const RowKind&) = default;
};

// Where the communication's tensors are. Of a device it is taken like a window's memory, never inside a call.
struct OwnMemory {
  std::vector<std::uint64_t> host{};
  std::unique_ptr<fabric::Window> device{};
};

struct Room {
  Room(Group joined, const RowKind& rows) : group(std::move(joined)), kind(rows) {}

  Group group;
  RowKind kind;
  std::int64_t max_tokens = 0;
  std::int64_t extra_bytes = 0;
  std::optional<Communication> communication{};  // none before the first creation that works
  DispatchResult result{};
  bool open = false;  // `result` holds a dispatch that is yet to be combined
  // Memory of the present window is given out for the next combine; windows whose memory was, and which were replaced
  // since.
  bool given = false;
  std::vector<Communication> replaced{};
  std::vector<std::int64_t> sizes{};  // of the open dispatch: rows of each rank
  // Sized when a window is made: rows of the round that a combine without a dispatch makes, this rank's and all, and
  // what combine() gives.
  OwnMemory memory{};
  std::byte* marks = nullptr;
  std::byte* marks_of_all = nullptr;
  std::byte* output = nullptr;
};

class GatherRooms {
 public:
  explicit GatherRooms(RoomOptions options) : options_(std::move(options)) {}

  [[nodiscard]] const RoomOptions& options() const { return options_; }

  // Where tensors are.
  [[nodiscard]] Device device() const;

  // Null when there is none with a communication.
  [[nodiscard]] Room* find(const Group& group, const RowKind& kind) const;
  // That of the latest call that joined this group, or null.
  [[nodiscard]] Room* latest(const Group& group) const;
  // Whether `ready` would be collective.
  [[nodiscard]] bool must_grow(const Group& group, const RowKind& kind, std::int64_t tokens, std::int64_t extra) const;
  // The room, large enough. Collective when it must grow: ranks that need different sizes all get kMismatch and keep
  // what they have.
  Room& ready(const Group& group, const RowKind& kind, std::int64_t tokens, std::int64_t extra);

  // What was given out for this combine is of no use any more.
  void end_combine(Room& room) const;

  [[nodiscard]] bool initialized() const;
  // Collective, in the order of creation.
  Status destroy();

  void abandon() { rooms_.clear(); }

 private:
  void grow(Room& room, std::int64_t tokens, std::int64_t extra) const;
  void make_memory(Room& room, std::int64_t tokens) const;
  static Status end_window(Room& room);

  RoomOptions options_;
  std::vector<std::unique_ptr<Room>> rooms_;
  Room* latest_ = nullptr;
};

}  // namespace tokenyard::manager
