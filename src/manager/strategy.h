// SPDX-License-Identifier: Apache-2.0
// In what the managers of the backends differ: data, and pure functions that turn what a layer asks for into what a
// communication is made from. The manager knows no backend by name.
// Thread rule: pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "tokenyard/manager.h"

namespace tokenyard::manager {

// How a manager keeps its communications.
enum class Scheme : std::uint8_t {
  kNone,     // it has none; `no_handle` says why
  kShared,   // one for all equal requests, owned by their handles
  kGrowing,  // one for all layers, grown by `initialize`
  kBySizes,  // one for each CommunicationSizes
  kGather,   // those of the gather calls
};

// An argument of get_handle under its public name.
struct Argument {
  std::string_view name;
  std::optional<int> HandleRequest::*member;
};

// Every argument there is.
[[nodiscard]] std::span<const Argument> handle_arguments();

struct Wanted {
  MoeParams params{};
  BackendConfig config{};
};

// What a layer asks for, and what the options say about the rest.
struct Asked {
  HandleRequest request{};
  MoeParams params{};
  BackendConfig config{};
  int rank = 0;
  int num_ranks = 1;
};

struct Strategy {
  std::string_view backend;
  Scheme scheme = Scheme::kNone;
  // Why get_handle gives nothing, as the end of "`name` has no handle: ...".
  std::string_view no_handle{};
  // Arguments that get_handle must be given and those that it may be given; all others are refused.
  std::span<const std::string_view> required{};
  std::span<const std::string_view> optional{};
  // What get_handle's message says after refusing an argument.
  std::string_view refusal = "leave it out";
  // kShared. Throws kInvalidArgument for values that do not fit the group.
  Wanted (*wanted)(const Asked& asked) = nullptr;
  // Fields of the backend's config that size no window and so are no part of a handle's identity.
  std::span<const std::string_view> unkeyed{};
  BackendConfig (*with_knobs)(const BackendConfig& config, const ManagerKnobs& knobs) = nullptr;
};

[[nodiscard]] std::span<const Strategy> strategies();
// Throws kUnsupported for a backend without a manager.
[[nodiscard]] const Strategy& strategy_of(const BackendInfo& backend);

// Throws kInvalidArgument naming an argument that is missing or not taken.
void check_arguments(const Strategy& strategy, const HandleRequest& request);

}  // namespace tokenyard::manager
