// SPDX-License-Identifier: Apache-2.0
// Runs a function on every rank of a fresh group, ranks being threads or forked processes of this program.
// Thread rule: call from the main thread; for processes no other thread may exist, since they are forked.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "tokenyard/group.h"

namespace tokenyard::cli {

enum class RankKind : std::uint8_t { kThreads, kProcesses };

[[nodiscard]] std::string_view name(RankKind kind);

// Throws Error with the message of the rank that failed first: kUnsupported where that is what the rank threw, else
// kPeerFailed. Never hangs: processes that do not end
// soon after another has failed are killed, and threads leave by the deadlines of the library.
void run_ranks(RankKind kind, int num_ranks, const std::function<void(const Group&)>& rank_main);

}  // namespace tokenyard::cli
