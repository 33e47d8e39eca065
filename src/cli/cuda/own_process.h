// SPDX-License-Identifier: Apache-2.0
// Questions to CUDA, asked in a process of their own, because CUDA does not survive fork() and ranks may be forked
// later. Thread rule: call from the main thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <new>
#include <string_view>
#include <type_traits>

#include "cli/ranks.h"
#include "system/segment.h"

namespace tokenyard::cli {

template <std::size_t size>
void put(std::array<char, size>& to, std::string_view text) {
  const std::size_t length = std::min(text.size(), size - 1);
  std::copy_n(text.begin(), length, to.begin());
  to[length] = '\0';
}

// `look` fills the answer. What it throws becomes the answer's `reason`, a std::array<char, n>.
template <class Answer, class Look>
[[nodiscard]] Answer ask_in_own_process(const Look& look) {
  static_assert(std::is_trivially_copyable_v<Answer>);
  const auto memory = system::Segment::create(sizeof(Answer));
  auto* answer = new (memory.data()) Answer{};
  run_ranks(RankKind::kProcesses, 1, [&](const Group& /*group*/) {
    try {
      look(*answer);
    } catch (const std::exception& error) {
      *answer = {};
      put(answer->reason, error.what());
    }
  });
  return *answer;
}

}  // namespace tokenyard::cli
