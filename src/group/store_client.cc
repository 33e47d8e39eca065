// SPDX-License-Identifier: Apache-2.0
#include "group/store_client.h"

#include <poll.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "group/failures.h"
#include "group/gather_ledger.h"
#include "system/system_error.h"

namespace tokenyard::group {

namespace {

using std::chrono::milliseconds;
using system::Deadline;
using system::IoOutcome;

constexpr std::uint32_t kFromStore = type_bit(FrameType::kWelcome) | type_bit(FrameType::kRefused) |
                                     type_bit(FrameType::kResult) | type_bit(FrameType::kMissing) |
                                     type_bit(FrameType::kLost);
constexpr std::size_t kReadBytes = std::size_t{64} * 1024;
// Contributions that a store which reads nothing leaves with us.
constexpr std::size_t kMaxUnsent =
    kMaxCollectivesAhead * (static_cast<std::size_t>(Group::kMaxGatherBytes) + 2 * kHeaderBytes);

void pause_before_retry(int attempt, const Deadline& deadline) {
  const milliseconds pause = std::min(milliseconds(5 << std::min(attempt, 5)), milliseconds(100));
  std::this_thread::sleep_until(std::min(deadline.at(), Deadline::Clock::now() + pause));
}

bool may_pass(RefusalCode code) {
  return code == RefusalCode::kRankTaken || code == RefusalCode::kEnded;
}

}  // namespace

StoreClient::StoreClient(Options options, const Connect& connect, milliseconds wait)
    : options_(std::move(options)), reader_(kFromStore), scratch_(kReadBytes) {
  const Deadline deadline = Deadline::after(wait);
  for (int attempt = 0; !try_join(connect, deadline, wait); ++attempt) {
    if (deadline.expired()) throw_not_joined(wait);
    pause_before_retry(attempt, deadline);
  }
}

void StoreClient::throw_not_joined(milliseconds wait) const {
  throw Error(obstacle_code_,
              "rank " + std::to_string(options_.rank) + ": joining " + options_.where + " failed for " +
                  std::to_string(wait.count()) + " ms: " + last_obstacle_ + earlier_,
              options_.rank, obstacle_peer_);
}

void StoreClient::reset_connection(system::FileDescriptor socket) {
  socket_ = std::move(socket);
  reader_ = FrameReader(kFromStore);
  out_.clear();
  sent_ = 0;
  refusal_.reset();
  missing_.reset();
  lost_ = -1;
}

bool StoreClient::try_join(const Connect& connect, const Deadline& deadline, milliseconds wait) {
  system::SocketAttempt attempt = connect(deadline);
  obstacle_code_ = ErrorCode::kTimeout;
  obstacle_peer_ = 0;
  if (!attempt.socket.valid()) {
    last_obstacle_ = "rank 0, which serves it, did not come: " + system::errno_text(attempt.error);
    return false;
  }
  reset_connection(std::move(attempt.socket));
  send({.type = FrameType::kHello},
       encode(Hello{.num_ranks = static_cast<std::uint32_t>(options_.num_ranks), .name = options_.name}));
  const auto decided = [&] { return welcome_ || refusal_ || lost_ >= 0; };
  IoOutcome outcome = wait_until(decided, deadline);
  if (outcome == IoOutcome::kTimedOut) {
    send({.type = FrameType::kWho}, {});
    outcome = wait_until([&] { return decided() || missing_; }, Deadline::after(kGrace));
  }
  if (welcome_) return true;
  if (refusal_) {
    if (!may_pass(refusal_->code)) throw refusal_error(*refusal_);
    last_obstacle_ = refusal_->reason;
    obstacle_code_ = refusal_->code == RefusalCode::kRankTaken ? ErrorCode::kMismatch : ErrorCode::kTimeout;
    obstacle_peer_ = -1;
    return false;
  }
  if (missing_ && lost_ >= 0) {
    earlier_ = "; earlier it gave up waiting for " + name_ranks(*missing_);
  } else if (missing_) {
    throw timeout_error("joining " + options_.where, options_.rank, wait, *missing_);
  }
  last_obstacle_ = outcome == IoOutcome::kTimedOut ? "rank 0, which serves it, accepts connections and does not answer"
                                                   : "rank 0, which serves it, left or died";
  return false;
}

std::vector<Bytes> StoreClient::all_gather(std::span<const std::byte> bytes, milliseconds wait) {
  if (lost_ >= 0) throw peer_lost_error(options_.rank, lost_);
  const int store_rank = 0;
  if (out_.size() - sent_ > kMaxUnsent) throw too_far_ahead_error(options_.rank, std::span(&store_rank, 1));
  const Deadline deadline = Deadline::after(wait);
  ++sequence_;
  results_.assign(static_cast<std::size_t>(options_.num_ranks), {});
  have_result_.assign(static_cast<std::size_t>(options_.num_ranks), false);
  num_results_ = 0;
  missing_.reset();
  refusal_.reset();
  send({.type = FrameType::kGather, .sequence = sequence_}, bytes);
  const auto decided = [&] { return all_results() || refusal_ || lost_ >= 0; };
  IoOutcome outcome = wait_until(decided, deadline);
  if (outcome == IoOutcome::kTimedOut) {
    send({.type = FrameType::kWho, .sequence = sequence_}, {});
    outcome = wait_until([&] { return decided() || missing_; }, Deadline::after(kGrace));
  }
  if (all_results()) return std::move(results_);
  if (outcome == IoOutcome::kClosed && lost_ < 0 && !refusal_) lost_ = 0;  // only the store can close
  if (lost_ >= 0) throw peer_lost_error(options_.rank, lost_);
  if (refusal_ && refusal_->code == RefusalCode::kTooFarAhead) {
    --sequence_;  // the store did not count it
    const int behind = static_cast<int>(refusal_rank_);
    throw too_far_ahead_error(options_.rank, std::span(&behind, 1));
  }
  if (refusal_) throw refusal_error(*refusal_);
  throw timeout_error("a collective", options_.rank, wait, missing_ ? *missing_ : std::vector<int>{store_rank});
}

void StoreClient::send(FrameHeader header, std::span<const std::byte> payload) {
  if (sent_ > 0) out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(sent_));
  sent_ = 0;
  header.rank = static_cast<std::uint32_t>(options_.rank);
  append_frame(out_, header, payload);
}

template <class Predicate>
IoOutcome StoreClient::wait_until(const Predicate& wanted, const Deadline& deadline) {
  while (!wanted()) {
    const IoOutcome outcome = pump(deadline);
    // What came before the end counts, so look once more.
    if (outcome != IoOutcome::kDone) return wanted() ? IoOutcome::kDone : outcome;
  }
  return IoOutcome::kDone;
}

IoOutcome StoreClient::pump(const Deadline& deadline) {
  // A store that went with a last word may refuse ours; that word is still to be read.
  const bool can_send = flush();
  const auto events = static_cast<short>(POLLIN | (can_send && sent_ < out_.size() ? POLLOUT : 0));
  if (!system::wait_for(socket_.get(), events, can_send ? deadline : Deadline::after(milliseconds(0)))) {
    return can_send ? IoOutcome::kTimedOut : IoOutcome::kClosed;
  }
  return receive() ? IoOutcome::kDone : IoOutcome::kClosed;
}

bool StoreClient::flush() {
  while (sent_ < out_.size()) {
    const system::Transfer step = system::send_some(socket_.get(), std::span<const std::byte>(out_).subspan(sent_));
    if (step.closed) return false;
    if (step.bytes == 0) return true;
    sent_ += step.bytes;
  }
  out_.clear();
  sent_ = 0;
  return true;
}

bool StoreClient::receive() {
  const system::Transfer step = system::receive_some(socket_.get(), scratch_);
  std::span<const std::byte> data(scratch_.data(), step.bytes);
  while (!data.empty()) {
    std::optional<Frame> frame = reader_.feed(data);
    if (frame) take(std::move(*frame));
    if (reader_.fault() != WireFault::kNone) refuse_stream(std::string(describe(reader_.fault())));
  }
  return !step.closed;
}

void StoreClient::take(Frame frame) {
  switch (frame.header.type) {
    case FrameType::kWelcome: {
      const std::optional<std::uint64_t> nonce = decode_nonce(frame.payload);
      if (!nonce || welcome_) refuse_stream("a welcome comes once and has 8 bytes");
      nonce_ = *nonce;
      welcome_ = true;
      return;
    }
    case FrameType::kRefused:
      refusal_ = decode_refusal(frame.payload);
      if (!refusal_) refuse_stream("a refusal has at least 4 bytes");
      refusal_rank_ = frame.header.rank;
      return;
    case FrameType::kResult:
      return take_result(std::move(frame));
    case FrameType::kMissing: {
      std::optional<std::vector<int>> missing = decode_ranks(frame.payload, options_.num_ranks);
      if (!missing) refuse_stream("it names a missing rank that the group does not have");
      if (frame.header.sequence == sequence_) missing_ = std::move(missing);  // else the answer to an older question
      return;
    }
    case FrameType::kLost:
      if (frame.header.rank >= static_cast<std::uint32_t>(options_.num_ranks)) {
        refuse_stream("it names a lost rank that the group does not have");
      }
      if (lost_ < 0) lost_ = static_cast<int>(frame.header.rank);
      return;
    case FrameType::kHello:
    case FrameType::kGather:
    case FrameType::kWho:
      break;  // the reader does not let them through
  }
}

void StoreClient::take_result(Frame frame) {
  if (frame.header.sequence < sequence_) return;  // of a collective that timed out here
  const std::size_t rank = frame.header.rank;
  if (frame.header.sequence > sequence_ || rank >= have_result_.size() || have_result_[rank]) {
    refuse_stream("the result of rank " + std::to_string(rank) + " for collective " +
                  std::to_string(frame.header.sequence) + " was not asked for");
  }
  results_[rank] = std::move(frame.payload);
  have_result_[rank] = true;
  ++num_results_;
}

void StoreClient::refuse_stream(const std::string& why) const {
  throw Error(ErrorCode::kMismatch,
              "rank " + std::to_string(options_.rank) + ": what answers for " + options_.where +
                  " is no store of this library, or another version of it: " + why,
              options_.rank, 0);
}

Error StoreClient::refusal_error(const Refusal& refusal) const {
  return {ErrorCode::kMismatch,
          "rank " + std::to_string(options_.rank) + " was refused by " + options_.where + ": " + refusal.reason,
          options_.rank, 0};
}

}  // namespace tokenyard::group
