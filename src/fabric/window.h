// SPDX-License-Identifier: Apache-2.0
// A window: this rank's symmetric memory and how the peers' windows are reached. Made in two steps, so that the
// caller can tell all ranks of a failure in between: `allocate` is local, `connect` is collective.
// Thread rule: a window is made by one thread; its memory is then shared under the protocol's rules.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "tokenyard/backends.h"
#include "tokenyard/group.h"
#include "tokenyard/tensor.h"

namespace tokenyard::fabric {

struct WindowRequest {
  std::int64_t bytes = 0;
  Device device{};
  // For fabrics of device memory: pinned host memory that every rank's device maps, for ranks whose devices do not
  // reach each other. All ranks must ask for it, or none.
  bool allow_mapped_host = false;
};

class Window {
 public:
  Window() = default;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  Window(Window&&) = delete;
  Window& operator=(Window&&) = delete;
  virtual ~Window() = default;

  // Collective. Afterwards `peer` answers for every rank. Throws tokenyard::Error. The window must live until another
  // collective call of the group has returned: only then have all peers taken hold of its memory.
  virtual void connect(const Group& group, std::chrono::milliseconds deadline) = 0;

  [[nodiscard]] virtual std::byte* own() const = 0;
  // Where this rank can load from and store to `rank`'s window; its own for itself. Null when the fabric reaches the
  // rank only by other means, which engines must then use: none may assume load/store reach.
  [[nodiscard]] virtual std::byte* peer(int rank) const = 0;
  [[nodiscard]] virtual std::int64_t bytes() const = 0;
  // Whose loads and stores `own` and `peer` are for.
  [[nodiscard]] virtual Device device() const = 0;

  // After `connect`: how many ranks share this rank's device, itself among them. Ranks on the host share no device.
  [[nodiscard]] virtual int ranks_on_device() const { return 1; }
};

struct FabricInfo {
  std::string_view name;
  std::string_view description;
  DeviceKind kind;     // what its windows are for
  Support (*probe)();  // never throws
  // Local: zeroed memory, or an Error with the reason.
  std::unique_ptr<Window> (*allocate)(const WindowRequest& request);
};

// Every fabric of this build, in order of preference.
[[nodiscard]] std::span<const FabricInfo> fabrics();
// The first of that kind. Throws kUnsupported when this build has none.
[[nodiscard]] const FabricInfo& find_fabric(DeviceKind kind);

}  // namespace tokenyard::fabric
