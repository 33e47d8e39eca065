// SPDX-License-Identifier: Apache-2.0
// Groups whose members meet at rank 0's store: over Unix sockets on one host, or over TCP.
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "tokenyard/error.h"

#include "group/factories.h"
#include "group/store_client.h"
#include "group/store_server.h"
#include "system/deadline.h"
#include "system/system_error.h"
#include "system/tcp_socket.h"
#include "system/unix_socket.h"

namespace tokenyard::group {

namespace {

using std::chrono::milliseconds;
using system::Deadline;

class StoreMember final : public GroupImpl {
 public:
  StoreMember(const Membership& membership, std::unique_ptr<StoreServer> server, StoreClient client)
      : GroupImpl(membership), server_(std::move(server)), client_(std::move(client)) {}

  std::vector<Bytes> all_gather(std::span<const std::byte> bytes, milliseconds deadline) override {
    return client_.all_gather(bytes, deadline);
  }

 private:
  std::unique_ptr<StoreServer> server_;  // rank 0 only
  StoreClient client_;                   // goes first: rank 0's own end is then like any other's
};

// The address may still belong to an earlier session that is about to end.
system::FileDescriptor listen_until(const std::function<system::SocketAttempt()>& listen,
                                    const std::string& where,
                                    const Deadline& deadline) {
  while (true) {
    system::SocketAttempt attempt = listen();
    if (attempt.socket.valid()) return std::move(attempt.socket);
    if (deadline.expired()) {
      throw Error(ErrorCode::kSystem,
                  "rank 0: " + where + " cannot be served; until the deadline its address stayed unusable, perhaps " +
                      "taken by another group: " + system::errno_text(attempt.error),
                  0);
    }
    std::this_thread::sleep_until(std::min(deadline.at(), Deadline::Clock::now() + milliseconds(20)));
  }
}

struct Meeting {
  StoreClient::Options client;
  bool same_user_only = false;
  std::function<system::SocketAttempt()> listen;
  StoreClient::Connect connect;
};

std::unique_ptr<GroupImpl> meet(const Meeting& meeting, milliseconds wait) {
  const Deadline deadline = Deadline::after(wait);
  const StoreClient::Options& options = meeting.client;
  std::unique_ptr<StoreServer> server;
  if (options.rank == 0) {
    server = std::make_unique<StoreServer>(
        listen_until(meeting.listen, options.where, deadline),
        StoreServer::Options{
            .name = options.name, .num_ranks = options.num_ranks, .same_user_only = meeting.same_user_only});
  }
  StoreClient client(options, meeting.connect, wait);
  const Membership membership{
      .rank = options.rank, .num_ranks = options.num_ranks, .nonce = client.nonce(), .deadline = wait};
  return std::make_unique<StoreMember>(membership, std::move(server), std::move(client));
}

// All ranks may arrive at once, and then some.
int backlog(int num_ranks) {
  return num_ranks + 64;
}

}  // namespace

std::unique_ptr<GroupImpl> make_on_host(std::string_view name, int rank, int num_ranks, milliseconds deadline) {
  // With the user in it, so that users with the same idea of a name do not meet.
  const std::string socket_name = "tokenyard/" + std::to_string(::geteuid()) + "/" + std::string(name);
  const Meeting meeting{.client = {.name = std::string(name),
                                   .where = "group '" + std::string(name) + "'",
                                   .rank = rank,
                                   .num_ranks = num_ranks},
                        .same_user_only = true,
                        .listen = [&] { return system::listen_unix(socket_name, backlog(num_ranks)); },
                        .connect = [&](const Deadline&) { return system::connect_unix(socket_name); }};
  return meet(meeting, deadline);
}

std::unique_ptr<GroupImpl> make_over_tcp(const system::TcpAddress& address,
                                         int rank,
                                         int num_ranks,
                                         milliseconds deadline) {
  const Meeting meeting{
      .client = {.name = "", .where = "the group at " + address.text(), .rank = rank, .num_ranks = num_ranks},
      .same_user_only = false,
      .listen = [&] { return system::listen_tcp(address, backlog(num_ranks)); },
      .connect = [&](const Deadline& until) { return system::connect_tcp(address, until); }};
  return meet(meeting, deadline);
}

}  // namespace tokenyard::group
