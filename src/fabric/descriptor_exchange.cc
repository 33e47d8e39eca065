// SPDX-License-Identifier: Apache-2.0
#include "fabric/descriptor_exchange.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "tokenyard/error.h"

#include "group/failures.h"
#include "system/deadline.h"
#include "system/random.h"
#include "system/stream_socket.h"
#include "system/system_error.h"
#include "system/unix_socket.h"

namespace tokenyard::fabric {

namespace {

using std::chrono::milliseconds;
using system::Deadline;
using system::FileDescriptor;
using system::IoOutcome;

constexpr std::uint32_t kNoteMagic = 0x44464B54;  // the bytes "TKFD"
constexpr milliseconds kRetry{5};

using SocketKey = std::array<std::uint64_t, 2>;

// What a rank tells the others through the group. After it: one byte per rank, wanted or not; then the reason text
// of a rank that failed.
struct Card {
  std::uint64_t failed = 0;
  std::uint64_t network = 0;  // equal for ranks that can reach each other's abstract sockets; 0: not known
  SocketKey key{};
};

// What accompanies a descriptor.
struct Note {
  std::uint32_t magic = kNoteMagic;
  std::uint32_t sender = 0;
  std::uint64_t nonce = 0;
};

std::string socket_name(const SocketKey& key) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string name = "tokenyard-segment/";
  for (const std::uint64_t word : key) {
    for (int shift = 60; shift >= 0; shift -= 4)
      name += kDigits[(word >> shift) & 15U];
  }
  return name;
}

std::uint64_t fnv1a(std::uint64_t hash, std::span<const std::byte> bytes) {
  for (const std::byte b : bytes)
    hash = (hash ^ std::to_integer<std::uint64_t>(b)) * 0x100000001B3U;
  return hash;
}

// Abstract sockets belong to a network namespace of a running kernel.
std::uint64_t network_identity() {
  const FileDescriptor file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  std::array<std::byte, 64> boot{};
  const ssize_t got = file.valid() ? ::read(file.get(), boot.data(), boot.size()) : -1;

  struct stat space {};

  if (got <= 0 || ::stat("/proc/self/ns/net", &space) != 0) return 0;
  const std::array<std::uint64_t, 2> ids{space.st_dev, space.st_ino};
  const std::uint64_t hash = fnv1a(0xCBF29CE484222325U, std::span(boot).first(static_cast<std::size_t>(got)));
  return std::max<std::uint64_t>(fnv1a(hash, std::as_bytes(std::span(ids))), 1);
}

// Everything that the ranks tell each other, and the checks that all ranks make alike.
class Roster {
 public:
  Roster(const Group& group, const Card& own, std::span<const char> wanted, const std::string& reason)
      : rank_(group.rank()), size_(static_cast<std::size_t>(group.num_ranks())) {
    message_.resize(sizeof(Card) + size_);
    std::memcpy(message_.data(), &own, sizeof(Card));
    for (std::size_t peer = 0; peer < size_; ++peer) {
      const bool want = peer != static_cast<std::size_t>(rank_) && (wanted.size() != size_ || wanted[peer] != 0);
      message_[sizeof(Card) + peer] = static_cast<std::byte>(want);
    }
    const auto text = std::as_bytes(std::span(reason.data(), reason.size()));
    message_.insert(message_.end(), text.begin(), text.end());
  }

  void gather(const Group& group, milliseconds wait) { messages_ = group.all_gather(message_, wait); }

  [[nodiscard]] Card card(std::size_t rank) const {
    Card card;
    std::memcpy(&card, messages_[rank].data(), sizeof(card));
    return card;
  }

  [[nodiscard]] bool wants(std::size_t rank, std::size_t peer) const {
    return messages_[rank][sizeof(Card) + peer] != std::byte{0};
  }

  // `own_error` is thrown on the rank that it happened on.
  void check(const std::exception_ptr& own_error) const {
    for (std::size_t rank = 0; rank < size_; ++rank) {
      if (messages_[rank].size() < sizeof(Card) + size_) {
        fail(ErrorCode::kMismatch, rank, "takes part in another collective than the exchange of descriptors");
      }
    }
    if (own_error) std::rethrow_exception(own_error);
    for (std::size_t rank = 0; rank < size_; ++rank) {
      if (card(rank).failed != 0) fail(ErrorCode::kPeerFailed, rank, "cannot exchange descriptors: " + reason(rank));
    }
    for (std::size_t rank = 0; rank < size_; ++rank)
      check_pairs(rank);
  }

 private:
  [[nodiscard]] std::string reason(std::size_t rank) const {
    std::string text;
    for (const std::byte b : std::span(messages_[rank]).subspan(sizeof(Card) + size_))
      text += static_cast<char>(b);
    return text;
  }

  void check_pairs(std::size_t rank) const {
    for (std::size_t peer = 0; peer < size_; ++peer) {
      if (wants(rank, peer) != wants(peer, rank)) {
        fail(ErrorCode::kMismatch, rank,
             std::string(wants(rank, peer) ? "wants" : "does not want") + " the descriptor of rank " +
                 std::to_string(peer) + ", which sees it the other way round");
      }
      const std::uint64_t a = card(rank).network;
      const std::uint64_t b = card(peer).network;
      if (wants(rank, peer) && a != 0 && b != 0 && a != b) {
        // Named is the other one, seen from a rank of the pair.
        const std::size_t about = peer == static_cast<std::size_t>(rank_) ? rank : peer;
        fail(ErrorCode::kUnsupported, about,
             "is on another host, or in another network namespace, than rank " + std::to_string(rank + peer - about) +
                 "; shared memory reaches only processes of one host");
      }
    }
  }

  [[noreturn]] void fail(ErrorCode code, std::size_t about, const std::string& what) const {
    throw Error(code, "rank " + std::to_string(rank_) + ": rank " + std::to_string(about) + " " + what, rank_,
                static_cast<int>(about));
  }

  int rank_;
  std::size_t size_;
  Bytes message_;
  std::vector<Bytes> messages_;
};

// One rank's part of the meeting. It visits each peer, hands over a copy of its descriptor and awaits one byte of
// acknowledgement; meanwhile it takes the peers' visits. Connections stay open until this rank is through, so that a
// visit that ends before both directions are done tells of a peer that is gone.
class Exchange {
 public:
  struct Options {
    int rank = 0;
    std::uint64_t nonce = 0;
    int own_fd = -1;
    milliseconds wait{0};
  };

  Exchange(const Options& options, FileDescriptor listener, const Roster& roster, std::size_t num_ranks)
      : options_(options), listener_(std::move(listener)), peers_(num_ranks) {
    for (std::size_t peer = 0; peer < num_ranks; ++peer) {
      peers_[peer].wanted = roster.wants(static_cast<std::size_t>(options.rank), peer);
      peers_[peer].address = socket_name(roster.card(peer).key);
      peers_[peer].reachable = roster.card(peer).network != 0;
    }
  }

  std::vector<FileDescriptor> run(const Deadline& deadline) {
    while (!done()) {
      const bool all_visited = visit_peers();
      if (!wait_for_news(deadline, all_visited)) throw_timeout();
    }
    std::vector<FileDescriptor> result;
    for (Peer& peer : peers_)
      result.push_back(std::move(peer.received));
    return result;
  }

 private:
  struct Peer {
    bool wanted = false;
    bool reachable = false;
    bool handed_over = false;
    bool acknowledged = false;
    std::string address;
    FileDescriptor visit;     // our connection to it
    FileDescriptor received;  // its segment
  };

  [[nodiscard]] static bool finished(const Peer& peer) {
    return !peer.wanted || (peer.acknowledged && peer.received.valid());
  }

  [[nodiscard]] bool done() const { return std::all_of(peers_.begin(), peers_.end(), finished); }

  // False when a peer's queue or the kernel's table of travelling descriptors is full, which passes when peers go on.
  bool visit_peers() {
    bool all = true;
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      if (peers_[rank].wanted && !peers_[rank].handed_over) all = visit(rank) && all;
    }
    return all;
  }

  bool visit(std::size_t rank) {
    Peer& peer = peers_[rank];
    if (!peer.visit.valid()) {
      system::SocketAttempt attempt = system::connect_unix(peer.address);
      // Every rank listens before it tells its address.
      if (attempt.error == ECONNREFUSED) throw_gone(rank);
      if (!attempt.socket.valid()) return false;
      peer.visit = std::move(attempt.socket);
    }
    const Note note{.sender = static_cast<std::uint32_t>(options_.rank), .nonce = options_.nonce};
    const IoOutcome outcome = system::send_descriptor(
        peer.visit.get(), options_.own_fd, std::as_bytes(std::span(&note, 1)), Deadline::after(milliseconds(0)));
    if (outcome == IoOutcome::kClosed) throw_gone(rank);
    peer.handed_over = outcome == IoOutcome::kDone;
    return peer.handed_over;
  }

  // False at the deadline.
  bool wait_for_news(const Deadline& deadline, bool all_visited) {
    std::vector<pollfd> entries{{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    for (const FileDescriptor& visitor : visitors_) {
      entries.push_back({.fd = visitor.get(), .events = POLLIN, .revents = 0});
    }
    const std::size_t num_visitors = visitors_.size();
    for (const Peer& peer : peers_) {
      const bool watch = peer.handed_over && !finished(peer);
      entries.push_back({.fd = watch ? peer.visit.get() : -1, .events = POLLIN, .revents = 0});
    }
    const int timeout = deadline.poll_timeout();
    const bool soon = !all_visited && (timeout < 0 || timeout > kRetry.count());
    const int ready = ::poll(entries.data(), entries.size(), soon ? static_cast<int>(kRetry.count()) : timeout);
    if (ready < 0 && errno != EINTR) throw system::system_error("poll of the exchange's sockets failed", errno);
    if (ready <= 0) return !deadline.expired();
    for (std::size_t i = 0; i < num_visitors; ++i) {
      if (entries[1 + i].revents != 0) receive(visitors_[i]);
    }
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      if (entries[1 + num_visitors + rank].revents != 0) take_acknowledgement(rank);
    }
    std::erase_if(visitors_, [](const FileDescriptor& visitor) { return !visitor.valid(); });
    if (entries[0].revents != 0) accept_visitors();
    return true;
  }

  void accept_visitors() {
    while (true) {
      system::SocketAttempt attempt = system::accept_some(listener_.get());
      if (attempt.error != 0) throw system::system_error("accepting a peer's descriptor failed", attempt.error);
      if (!attempt.socket.valid()) return;
      if (system::same_user(attempt.socket.get())) visitors_.push_back(std::move(attempt.socket));
    }
  }

  // Who does not know the nonce is no member; it is sent away without a word.
  void receive(FileDescriptor& visitor) {
    Note note;
    system::ReceivedDescriptor received = system::receive_descriptor(
        visitor.get(), std::as_writable_bytes(std::span(&note, 1)), Deadline::after(milliseconds(0)));
    if (received.outcome == IoOutcome::kTimedOut) return;
    const bool member = received.outcome == IoOutcome::kDone && note.magic == kNoteMagic &&
                        note.nonce == options_.nonce && note.sender < peers_.size() && peers_[note.sender].wanted &&
                        !peers_[note.sender].received.valid();
    if (!member) return visitor.reset();
    if (!received.fd.valid()) {
      throw Error(ErrorCode::kSystem,
                  "rank " + std::to_string(options_.rank) + ": the descriptor of rank " + std::to_string(note.sender) +
                      " did not arrive; the limit of open files may be too low for " + std::to_string(peers_.size()) +
                      " ranks",
                  options_.rank, static_cast<int>(note.sender));
    }
    peers_[note.sender].received = std::move(received.fd);
    const std::byte acknowledgement{1};
    // A fresh socket has room for one byte; a sender that has gone is noticed on our own visit to it.
    static_cast<void>(system::send_some(visitor.get(), std::span(&acknowledgement, 1)));
    kept_.push_back(std::move(visitor));
  }

  void take_acknowledgement(std::size_t rank) {
    Peer& peer = peers_[rank];
    std::byte acknowledgement{};
    const system::Transfer step = system::receive_some(peer.visit.get(), std::span(&acknowledgement, 1));
    if (step.bytes == 1) peer.acknowledged = true;
    if (step.closed && !finished(peer)) throw_gone(rank);
  }

  [[noreturn]] void throw_gone(std::size_t rank) const {
    if (peers_[rank].reachable) throw group::peer_lost_error(options_.rank, static_cast<int>(rank));
    throw Error(ErrorCode::kUnsupported,
                "rank " + std::to_string(options_.rank) + ": rank " + std::to_string(rank) +
                    " cannot be reached through a Unix socket; it has died, or runs on another host or in another "
                    "network namespace, where shared memory does not reach",
                options_.rank, static_cast<int>(rank));
  }

  [[noreturn]] void throw_timeout() const {
    std::vector<int> missing;
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      if (!finished(peers_[rank])) missing.push_back(static_cast<int>(rank));
    }
    throw group::timeout_error("the exchange of descriptors", options_.rank, options_.wait, missing);
  }

  Options options_;
  FileDescriptor listener_;
  std::vector<Peer> peers_;
  std::vector<FileDescriptor> visitors_;  // have not handed over anything yet
  std::vector<FileDescriptor> kept_;      // have, and watch us
};

FileDescriptor listen_for_peers(const Group& group, int own_fd, std::span<const char> wanted, const SocketKey& key) {
  if (own_fd < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "the descriptor to exchange is " + std::to_string(own_fd) + "; it must be an open one", group.rank());
  }
  if (!wanted.empty() && wanted.size() != static_cast<std::size_t>(group.num_ranks())) {
    throw Error(ErrorCode::kInvalidArgument,
                "`wanted` has " + std::to_string(wanted.size()) + " entries; the group has " +
                    std::to_string(group.num_ranks()) + " ranks",
                group.rank());
  }
  system::SocketAttempt attempt = system::listen_unix(socket_name(key), group.num_ranks() + 16);
  if (!attempt.socket.valid()) {
    throw system::system_error("listening on '@" + socket_name(key) + "' failed", attempt.error);
  }
  return std::move(attempt.socket);
}

}  // namespace

std::vector<FileDescriptor> exchange_descriptors(const Group& group,
                                                 int own_fd,
                                                 std::span<const char> wanted,
                                                 milliseconds deadline) {
  const Deadline end = Deadline::after(deadline);
  Card card{.failed = 0, .network = 0, .key = {system::random_u64(), system::random_u64()}};
  FileDescriptor listener;
  std::exception_ptr own_error;
  std::string reason;
  // What goes wrong here must reach the others, who would otherwise wait.
  try {
    card.network = network_identity();
    listener = listen_for_peers(group, own_fd, wanted, card.key);
  } catch (const Error& error) {
    own_error = std::current_exception();
    card.failed = 1;
    reason = error.what();
  }
  Roster roster(group, card, wanted, reason);
  roster.gather(group, deadline);
  roster.check(own_error);
  const Exchange::Options options{.rank = group.rank(), .nonce = group.nonce(), .own_fd = own_fd, .wait = deadline};
  return Exchange(options, std::move(listener), roster, static_cast<std::size_t>(group.num_ranks())).run(end);
}

}  // namespace tokenyard::fabric
