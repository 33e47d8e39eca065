// SPDX-License-Identifier: Apache-2.0
#include "system/random.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "system/system_error.h"

namespace tokenyard::system {

void fill_random(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw system_error("getrandom of " + std::to_string(bytes.size()) + " bytes failed", errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

std::uint64_t random_u64() {
  std::array<std::byte, sizeof(std::uint64_t)> bytes{};
  fill_random(bytes);
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

}  // namespace tokenyard::system
