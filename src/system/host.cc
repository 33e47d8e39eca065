// SPDX-License-Identifier: Apache-2.0
#include "system/host.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>

#include "system/system_error.h"

namespace tokenyard::system {

std::string host_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string identity;
  if (std::getline(file, identity) && !identity.empty()) return identity;
  // Where /proc is not mounted, a name has to do; two hosts of one name would look like one.
  std::array<char, 256> host_name{};
  if (::gethostname(host_name.data(), host_name.size() - 1) != 0) throw system_error("gethostname", errno);
  return host_name.data();
}

}  // namespace tokenyard::system
