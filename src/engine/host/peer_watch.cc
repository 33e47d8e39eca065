// SPDX-License-Identifier: Apache-2.0
#include "engine/host/peer_watch.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "engine/host/word.h"
#include "protocol/layout.h"
#include "protocol/life.h"

namespace tokenyard::engine::host {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A longer gap between two polls means that this rank itself stood still (stopped, swapped out): that is no reason to
// accuse anyone.
constexpr milliseconds kLongestGap{50};
constexpr milliseconds kScanInterval{1};
constexpr milliseconds kYieldFor{1};
constexpr microseconds kSleep{50};

}  // namespace

PeerWatch::PeerWatch(const Setup& setup, std::vector<std::byte*> life)
    : rank_(setup.rank),
      life_(std::move(life)),
      queues_(setup.queues),
      interval_(setup.deadline / 8),
      seen_(static_cast<std::size_t>(setup.num_ranks)),
      changed_(static_cast<std::size_t>(setup.num_ranks)),
      waited_(static_cast<std::size_t>(setup.num_ranks)) {}

void PeerWatch::pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void PeerWatch::rest(Duration waited) {
  if (waited < kYieldFor) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(kSleep);
  }
}

void PeerWatch::begin(Phase phase, std::uint32_t epoch, milliseconds deadline) {
  phase_ = phase;
  epoch_ = epoch;
  deadline_ = deadline;
  polled_ = published_ = scanned_ = Duration::zero();
  std::ranges::fill(changed_, Duration::zero());
}

std::uint64_t& PeerWatch::life_word(std::size_t of, int by) const {
  return *reinterpret_cast<std::uint64_t*>(life_[of] + by * protocol::kLineBytes);  // a line holds one word
}

void PeerWatch::fail(const Status& fault) {
  fault_ = fault;
  if (queues_ != nullptr) queues_->fail(fault);
}

void PeerWatch::clear() {
  fault_ = {};
  std::ranges::fill(seen_, 0);
}

Status PeerWatch::make_status(StatusCode code, int peer) const {
  return {.code = code, .fault = {.rank = rank_, .peer = peer, .phase = phase_, .epoch = epoch_, .waited = polled_}};
}

bool PeerWatch::poll(int peer) {
  const Clock::time_point now = Clock::now();
  polled_ += std::min<Duration>(now - last_poll_, kLongestGap);
  last_poll_ = now;
  if (polled_ - published_ >= interval_) {
    published_ = polled_;
    publish({.kind = protocol::LifeKind::kWaiting,
             .phase = static_cast<std::uint8_t>(phase_),
             .heartbeat = ++heartbeat_,
             .peer = static_cast<std::uint16_t>(peer),
             .epoch = epoch_});
  }
  if (polled_ - scanned_ >= kScanInterval) {
    scanned_ = polled_;
    scan();
  }
  for (std::size_t p = 0; p < seen_.size(); ++p) {
    const protocol::Life life = protocol::decode_life(seen_[p]);
    const bool concerns = static_cast<int>(p) == peer || life.peer == peer || life.peer == rank_;
    if (life.kind == protocol::LifeKind::kFaulted && concerns) return false;
  }
  return polled_ - changed_[static_cast<std::size_t>(peer)] < deadline_ && polled_ < 2 * deadline_;
}

void PeerWatch::scan() {
  for (std::size_t p = 0; p < seen_.size(); ++p) {
    const std::uint64_t word = load_relaxed(life_word(static_cast<std::size_t>(rank_), static_cast<int>(p)));
    if (word == seen_[p]) continue;
    seen_[p] = word;
    changed_[p] = polled_;
  }
}

void PeerWatch::publish(const protocol::Life& life) {
  const std::uint64_t word = protocol::encode_life(life);
  for (std::size_t p = 0; p < life_.size(); ++p) {
    if (static_cast<int>(p) != rank_) store_relaxed(life_word(p, rank_), word);
  }
}

bool PeerWatch::alive(int peer) const {
  const Duration changed = changed_[static_cast<std::size_t>(peer)];
  return changed > Duration::zero() && polled_ - changed <= deadline_ / 2;
}

int PeerWatch::culprit(int peer) const {
  int end = peer;
  for (std::size_t steps = 0; steps < seen_.size(); ++steps) {
    const protocol::Life life = protocol::decode_life(seen_[static_cast<std::size_t>(end)]);
    if (life.kind != protocol::LifeKind::kWaiting || !alive(end)) return end;
    if (life.peer == rank_ || life.peer >= seen_.size()) return kCycle;
    end = life.peer;
  }
  return kCycle;
}

int PeerWatch::reported_culprit() const {
  int blamed = kUnknown;
  for (const std::uint64_t word : seen_) {
    const protocol::Life life = protocol::decode_life(word);
    if (life.kind != protocol::LifeKind::kFaulted) continue;
    if (life.peer == rank_) return kAccused;
    blamed = life.peer == protocol::kNobody ? kCycle : life.peer;
  }
  return blamed;
}

Status PeerWatch::end_with_fault(int peer) {
  scan();
  int blamed = reported_culprit();
  if (blamed == kAccused) {
    // Whoever accuses this rank has told the others as well: this rank blames nobody.
    fail(make_status(StatusCode::kAborted, rank_));
    return fault_;
  }
  if (blamed == kUnknown) blamed = culprit(peer);
  fail(blamed == kCycle ? make_status(StatusCode::kAborted, -1) : make_status(StatusCode::kTimeout, blamed));
  publish({.kind = protocol::LifeKind::kFaulted,
           .phase = static_cast<std::uint8_t>(phase_),
           .heartbeat = ++heartbeat_,
           .peer = blamed == kCycle ? protocol::kNobody : static_cast<std::uint16_t>(blamed),
           .epoch = epoch_});
  return fault_;
}

}  // namespace tokenyard::engine::host
