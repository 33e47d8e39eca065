// SPDX-License-Identifier: Apache-2.0
// What this process holds of the system: descriptors by kind, mappings of shared memory, threads.
// Thread rule: any thread; other threads that open or map meanwhile blur the count.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>

namespace tokenyard::steady_tests {

struct Holdings {
  std::map<std::string, std::int64_t> descriptors{};  // by kind: "socket", "memfd", "pipe", or a path
  std::int64_t memfd_mappings = 0;
  std::int64_t threads = 0;

  friend bool operator==(const Holdings&, const Holdings&) = default;
};

std::ostream& operator<<(std::ostream& out, const Holdings& value);

[[nodiscard]] Holdings holdings();

}  // namespace tokenyard::steady_tests
