// SPDX-License-Identifier: Apache-2.0
#include "steady/holdings.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <ostream>
#include <system_error>

namespace tokenyard::steady_tests {
namespace {

// "socket:[4711]" is a socket and "/memfd:window (deleted)" a memfd; files are told apart.
std::string kind_of(const std::string& target) {
  if (target.starts_with("/memfd:")) return "memfd";
  return target.substr(0, target.find(":["));
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Holdings& value) {
  out << "descriptors {";
  for (const auto& [kind, count] : value.descriptors)
    out << ' ' << kind << ": " << count;
  return out << " }, " << value.memfd_mappings << " mappings of memfd, " << value.threads << " threads";
}

Holdings holdings() {
  Holdings held{.descriptors = {{"memfd", 0}}};
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::filesystem::path target = std::filesystem::read_symlink(entry.path(), gone);
    if (!gone) ++held.descriptors[kind_of(target.string())];
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    held.memfd_mappings += line.find("memfd:") != std::string::npos ? 1 : 0;
  held.threads = std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  return held;
}

}  // namespace tokenyard::steady_tests
