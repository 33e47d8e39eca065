// SPDX-License-Identifier: Apache-2.0
// What the store answers to which frame: who has joined, who has come to a collective, who is gone. No I/O, so the
// whole conversation can be tested without a socket.
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "group/gather_ledger.h"
#include "group/store_wire.h"

namespace tokenyard::group {

using ConnectionId = std::uint64_t;

struct Reply {
  ConnectionId to = 0;
  // Shared because one result goes to every member and may be as large as all of their contributions.
  std::shared_ptr<const Bytes> bytes;
  bool last = false;  // the connection is closed when this has been sent
};

class StoreSession {
 public:
  struct Options {
    std::string name;
    int num_ranks = 1;
    std::uint64_t nonce = 0;
  };

  explicit StoreSession(Options options);

  // Each appends what is to be sent. A connection that was given a `last` reply is forgotten.
  void on_frame(ConnectionId from, Frame frame, std::vector<Reply>& replies);
  void on_fault(ConnectionId from, WireFault fault, std::vector<Reply>& replies);
  void on_closed(ConnectionId from, std::vector<Reply>& replies);
  // Rank 0, which hosts the store, goes.
  void on_shutdown(std::vector<Reply>& replies);

  [[nodiscard]] bool is_member(ConnectionId connection) const { return rank_of_.contains(connection); }

  // What the connection may send next.
  [[nodiscard]] std::uint32_t expected_types(ConnectionId connection) const;

 private:
  void on_hello(ConnectionId from, const Frame& frame, std::vector<Reply>& replies);
  void on_gather(ConnectionId from, int rank, Frame frame, std::vector<Reply>& replies);
  void on_who(ConnectionId from, int rank, std::uint64_t sequence, std::vector<Reply>& replies);
  [[nodiscard]] std::optional<Refusal> judge(const Frame& frame) const;
  void expel(ConnectionId from, const Refusal& refusal, std::vector<Reply>& replies);
  // Who has not joined yet.
  [[nodiscard]] std::vector<int> absent() const;
  void lose(int rank, std::vector<Reply>& replies);
  void tell_all(const Bytes& frame, std::vector<Reply>& replies) const;

  Options options_;
  GatherLedger ledger_;
  std::map<ConnectionId, int> rank_of_;
  std::vector<std::optional<ConnectionId>> members_;  // by rank
  bool joined_ = false;                               // all have come; from now on a loss is final
  int lost_ = -1;                                     // the first who went after that
};

}  // namespace tokenyard::group
