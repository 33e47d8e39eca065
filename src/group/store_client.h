// SPDX-License-Identifier: Apache-2.0
// One member's side of the store.
// Thread rule: one thread at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tokenyard/error.h"

#include "group/store_wire.h"
#include "system/deadline.h"
#include "system/stream_socket.h"

namespace tokenyard::group {

class StoreClient {
 public:
  struct Options {
    std::string name;   // what the hello says
    std::string where;  // for messages: "group 'x'", "the group at 127.0.0.1:29500"
    int rank = 0;
    int num_ranks = 1;
  };

  using Connect = std::function<system::SocketAttempt(const system::Deadline&)>;

  // Joins, blocking until all have joined. Tries again while nobody listens, while the rank is taken, and while an
  // earlier session ends.
  StoreClient(Options options, const Connect& connect, std::chrono::milliseconds wait);

  [[nodiscard]] std::uint64_t nonce() const { return nonce_; }

  [[nodiscard]] std::vector<Bytes> all_gather(std::span<const std::byte> bytes, std::chrono::milliseconds wait);

  // How long a store that stays silent is given to answer who is missing, after the deadline.
  static constexpr std::chrono::milliseconds kGrace{2000};

 private:
  // One attempt: true when joined. False: worth another attempt; `last_obstacle` says why.
  bool try_join(const Connect& connect, const system::Deadline& deadline, std::chrono::milliseconds wait);
  [[noreturn]] void throw_not_joined(std::chrono::milliseconds wait) const;
  void reset_connection(system::FileDescriptor socket);
  void send(FrameHeader header, std::span<const std::byte> payload);

  // Moves what can be moved and waits for more; kDone after any progress.
  system::IoOutcome pump(const system::Deadline& deadline);
  bool flush();
  bool receive();
  // Waits until `wanted` holds or the deadline or the end of the connection.
  template <class Predicate>
  system::IoOutcome wait_until(const Predicate& wanted, const system::Deadline& deadline);

  void take(Frame frame);
  void take_result(Frame frame);
  [[noreturn]] void refuse_stream(const std::string& why) const;
  [[nodiscard]] Error refusal_error(const Refusal& refusal) const;

  [[nodiscard]] bool all_results() const { return num_results_ == options_.num_ranks; }

  Options options_;
  system::FileDescriptor socket_;
  FrameReader reader_;
  Bytes out_;  // a frame that a deadline cut is finished by the next call
  std::size_t sent_ = 0;
  std::vector<std::byte> scratch_;

  std::uint64_t nonce_ = 0;
  bool welcome_ = false;
  std::optional<Refusal> refusal_;
  std::uint32_t refusal_rank_ = 0;
  int lost_ = -1;

  std::uint64_t sequence_ = 0;  // of the last collective begun
  std::vector<Bytes> results_;  // of that collective
  std::vector<bool> have_result_;
  int num_results_ = 0;
  std::optional<std::vector<int>> missing_;

  std::string last_obstacle_;
  std::string earlier_;  // whom a rank 0 that gave up had waited for
  int obstacle_peer_ = 0;
  ErrorCode obstacle_code_ = ErrorCode::kTimeout;
};

}  // namespace tokenyard::group
