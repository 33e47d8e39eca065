// SPDX-License-Identifier: Apache-2.0
// How ranks with windows for devices meet: what they tell each other, what must agree, and who reaches whom.
// Thread rule: collective where a group is an argument; called by one thread of each rank.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tokenyard/group.h"

#include "fabric/cuda/context.h"
#include "fabric/cuda/device_memory.h"

namespace tokenyard::fabric::cuda {

// What a rank tells the others about its window.
struct WindowCard {
  std::uint64_t process = 0;  // system::process_nonce()
  std::int64_t bytes = 0;
  AllocationSize allocation{};
  std::uint64_t mapped_host = 0;  // 1: pinned host memory
  std::int64_t device = 0;        // as its process counts
  std::array<char, 16> uuid{};
  std::array<char, 32> bus_id{};
  std::array<char, 256> host{};
  // The window's memory, for ranks with the same process nonce, and only inside `connect`: the exporter keeps the
  // pointed-to owner in place until the collective that follows it.
  const void* memory = nullptr;
};

// Who it is; the window's size and memory are the caller's to add.
[[nodiscard]] WindowCard card_of(const Context& context);

struct Meeting {
  std::vector<WindowCard> cards;
  std::vector<char> foreign;  // per rank: of another process
  bool any_foreign = false;   // the same on all ranks
};

// Collective. Throws on all ranks alike: kMismatch when sizes or places of memory differ, kUnsupported when ranks are
// on several hosts.
[[nodiscard]] Meeting meet(const Group& group, const WindowCard& mine, std::chrono::milliseconds deadline);

// Throws kUnsupported naming the first rank whose memory the context's device does not reach, both devices, and why.
void require_reach(const Context& context, std::span<const WindowCard> cards, int rank);

// Collective. All ranks do it, or all throw: its own error where it failed, else kPeerFailed with the reason.
void all_or_none(const Group& group, std::chrono::milliseconds deadline, const std::function<void()>& step);

}  // namespace tokenyard::fabric::cuda
