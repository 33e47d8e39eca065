// SPDX-License-Identifier: Apache-2.0
// Serves a StoreSession on a listening socket from one thread that sleeps in poll(). No connection can hold up
// another: sockets never block, each has its own bounded buffers, and strangers are limited in number.
// Thread rule: made and destroyed by one thread.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "system/file_descriptor.h"

namespace tokenyard::group {

class StoreServer {
 public:
  struct Options {
    std::string name;
    int num_ranks = 1;
    // The listener is a Unix socket: processes of other users are refused. Otherwise it is a TCP socket.
    bool same_user_only = false;
  };

  StoreServer(system::FileDescriptor listener, const Options& options);
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  StoreServer(StoreServer&&) = delete;
  StoreServer& operator=(StoreServer&&) = delete;
  // Tells every member that rank 0 goes, then stops. Results that members are still owed and that their sockets
  // cannot take at once are sent for at most kLinger.
  ~StoreServer();

  static constexpr std::chrono::milliseconds kLinger{2000};

 private:
  class Loop;

  system::FileDescriptor wake_;
  std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

}  // namespace tokenyard::group
