// SPDX-License-Identifier: Apache-2.0
// Makes each kind of group. Arguments have been checked by Group.
// Thread rule: callable from any thread.
#pragma once

#include <chrono>
#include <memory>
#include <string_view>
#include <vector>

#include "group/group_impl.h"
#include "system/tcp_socket.h"

namespace tokenyard::group {

[[nodiscard]] std::vector<std::unique_ptr<GroupImpl>> make_in_process(int num_ranks,
                                                                      std::chrono::milliseconds deadline);
[[nodiscard]] std::unique_ptr<GroupImpl> make_on_host(std::string_view name,
                                                      int rank,
                                                      int num_ranks,
                                                      std::chrono::milliseconds deadline);
[[nodiscard]] std::unique_ptr<GroupImpl> make_over_tcp(const system::TcpAddress& address,
                                                       int rank,
                                                       int num_ranks,
                                                       std::chrono::milliseconds deadline);
[[nodiscard]] std::unique_ptr<GroupImpl> make_from_callbacks(GroupCallbacks callbacks);

}  // namespace tokenyard::group
