// SPDX-License-Identifier: Apache-2.0
#include "group/store_server.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <utility>
#include <vector>

#include "group/store_session.h"
#include "system/deadline.h"
#include "system/random.h"
#include "system/stream_socket.h"
#include "system/system_error.h"
#include "system/tcp_socket.h"
#include "system/unix_socket.h"

namespace tokenyard::group {

namespace {

constexpr std::size_t kReadBytes = std::size_t{64} * 1024;
// A member has at most one result, one loss and a few answers outstanding unless it stops reading for good.
constexpr std::size_t kMaxQueuedReplies = 64;
constexpr std::chrono::milliseconds kAcceptPause{100};

struct Connection {
  Connection(system::FileDescriptor connected, std::uint32_t expected)
      : socket(std::move(connected)), reader(expected) {}

  system::FileDescriptor socket;
  FrameReader reader;
  std::deque<std::shared_ptr<const Bytes>> queue;
  std::size_t sent = 0;  // of the front of the queue
  bool closing = false;  // reads no more, goes when the queue is empty
  bool broken = false;   // goes now
};

// True when the queue is empty.
bool flush(Connection& connection) {
  while (!connection.queue.empty()) {
    const std::span<const std::byte> rest = std::span(*connection.queue.front()).subspan(connection.sent);
    if (!rest.empty()) {
      const system::Transfer step = system::send_some(connection.socket.get(), rest);
      if (step.closed) connection.broken = true;
      if (step.bytes == 0) return false;
      connection.sent += step.bytes;
      if (step.bytes < rest.size()) return false;
    }
    connection.queue.pop_front();
    connection.sent = 0;
  }
  return true;
}

}  // namespace

class StoreServer::Loop {
 public:
  Loop(system::FileDescriptor listener, const Options& options, int wake)
      : listener_(std::move(listener)),
        wake_(wake),
        same_user_only_(options.same_user_only),
        // Every rank may be a stranger for a moment, and others must not take their places.
        max_strangers_(static_cast<std::size_t>(options.num_ranks) + 64),
        session_({.name = options.name, .num_ranks = options.num_ranks, .nonce = system::random_u64()}),
        scratch_(kReadBytes) {}

  // Never throws: what goes wrong with a connection ends that connection, and what goes wrong with the loop ends the
  // store, which members see as the loss of rank 0.
  void run() noexcept {
    try {
      while (turn()) {
      }
      linger();
    } catch (const std::exception&) {
    }
    connections_.clear();
    listener_.reset();
  }

 private:
  // Serves what is ready; false when told to stop.
  bool turn() {
    std::vector<pollfd> entries{{.fd = wake_, .events = POLLIN, .revents = 0},
                                {.fd = accept_paused_ ? -1 : listener_.get(), .events = POLLIN, .revents = 0}};
    std::vector<ConnectionId> ids;
    for (const auto& [id, connection] : connections_) {
      const auto events =
          static_cast<short>((connection.closing ? 0 : POLLIN) | (connection.queue.empty() ? 0 : POLLOUT));
      entries.push_back({.fd = connection.socket.get(), .events = events, .revents = 0});
      ids.push_back(id);
    }
    const int timeout = accept_paused_ ? static_cast<int>(kAcceptPause.count()) : -1;
    const int ready = ::poll(entries.data(), entries.size(), timeout);
    if (ready < 0 && errno != EINTR) throw system::system_error("poll of the store's sockets failed", errno);
    accept_paused_ = false;
    if (ready <= 0) return true;
    if (entries[0].revents != 0) return false;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (entries[i + 2].revents != 0) serve(ids[i], entries[i + 2].revents);
    }
    if (entries[1].revents != 0) accept_waiting();
    sweep();
    return true;
  }

  void serve(ConnectionId id, short events) {
    Connection& connection = connections_.at(id);
    try {
      if ((events & POLLOUT) != 0) flush(connection);
      if (connection.closing) {
        if ((events & (POLLHUP | POLLERR)) != 0) connection.broken = true;
      } else if ((events & (POLLIN | POLLHUP | POLLERR)) != 0) {
        read(id, connection);
      }
    } catch (const std::exception&) {
      connection.broken = true;
    }
  }

  void read(ConnectionId id, Connection& connection) {
    const system::Transfer step = system::receive_some(connection.socket.get(), scratch_);
    if (step.closed) connection.broken = true;
    std::span<const std::byte> data(scratch_.data(), step.bytes);
    std::vector<Reply> replies;
    while (!data.empty() && !connection.closing) {
      connection.reader.expect(session_.expected_types(id));
      std::optional<Frame> frame = connection.reader.feed(data);
      if (frame) session_.on_frame(id, std::move(*frame), replies);
      if (connection.reader.fault() != WireFault::kNone) session_.on_fault(id, connection.reader.fault(), replies);
      deliver(replies);
    }
  }

  void deliver(std::vector<Reply>& replies) {
    for (Reply& reply : replies) {
      const auto found = connections_.find(reply.to);
      if (found == connections_.end()) continue;
      Connection& connection = found->second;
      connection.queue.push_back(std::move(reply.bytes));
      if (connection.queue.size() > kMaxQueuedReplies) connection.broken = true;
      if (reply.last) connection.closing = true;
    }
    replies.clear();
  }

  void accept_waiting() {
    while (true) {
      system::SocketAttempt attempt = system::accept_some(listener_.get());
      if (!attempt.socket.valid()) {
        // Out of descriptors or memory: the connection stays ready, so asking again at once would spin.
        accept_paused_ = attempt.error != 0;
        return;
      }
      try {
        if (!admit(attempt.socket.get())) continue;
      } catch (const Error&) {
        continue;  // it has gone already
      }
      make_room_for_stranger();
      const ConnectionId id = next_id_++;
      connections_.try_emplace(id, std::move(attempt.socket), session_.expected_types(id));
    }
  }

  [[nodiscard]] bool admit(int socket) const {
    if (same_user_only_) return system::same_user(socket);
    system::tune_tcp(socket);
    return true;
  }

  // The oldest stranger goes: a real member says hello at once.
  void make_room_for_stranger() {
    std::size_t strangers = 0;
    ConnectionId oldest = next_id_;
    for (const auto& [id, connection] : connections_) {
      if (session_.is_member(id)) continue;
      if (strangers == 0) oldest = id;
      ++strangers;
    }
    if (strangers >= max_strangers_) connections_.erase(oldest);
  }

  // Ends connections that are done; the loss of a member makes news, which may break others, hence the repetition.
  void sweep() {
    std::vector<Reply> replies;
    bool changed = true;
    while (changed) {
      changed = false;
      for (auto entry = connections_.begin(); entry != connections_.end();) {
        Connection& connection = entry->second;
        if (connection.broken || (connection.closing && connection.queue.empty())) {
          const ConnectionId id = entry->first;
          entry = connections_.erase(entry);
          session_.on_closed(id, replies);
          changed = true;
        } else {
          ++entry;
        }
      }
      deliver(replies);
    }
  }

  void linger() {
    std::vector<Reply> replies;
    session_.on_shutdown(replies);
    deliver(replies);
    listener_.reset();
    const system::Deadline deadline = system::Deadline::after(kLinger);
    while (!connections_.empty() && !deadline.expired()) {
      std::vector<pollfd> entries;
      for (auto entry = connections_.begin(); entry != connections_.end();) {
        const bool done = flush(entry->second) || entry->second.broken;
        entry = done ? connections_.erase(entry) : std::next(entry);
      }
      for (const auto& [id, connection] : connections_) {
        entries.push_back({.fd = connection.socket.get(), .events = POLLOUT, .revents = 0});
      }
      if (!entries.empty()) ::poll(entries.data(), entries.size(), deadline.poll_timeout());
    }
  }

  system::FileDescriptor listener_;
  int wake_;
  bool same_user_only_;
  bool accept_paused_ = false;
  std::size_t max_strangers_;
  StoreSession session_;
  std::map<ConnectionId, Connection> connections_;  // in the order of their arrival
  ConnectionId next_id_ = 1;
  std::vector<std::byte> scratch_;
};

StoreServer::StoreServer(system::FileDescriptor listener, const Options& options)
    : wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_.valid()) throw system::system_error("making an eventfd failed", errno);
  loop_ = std::make_unique<Loop>(std::move(listener), options, wake_.get());
  // The process's signals are its own affair: none may be delivered to a thread it does not know of.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([loop = loop_.get()] { loop->run(); });
  } catch (const std::system_error& error) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw system::system_error("starting the store's thread failed", error.code().value());
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

StoreServer::~StoreServer() {
  // Cannot fail: the counter is far from its limit.
  ::eventfd_write(wake_.get(), 1);
  thread_.join();
}

}  // namespace tokenyard::group
